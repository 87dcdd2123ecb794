"""One rank that makes each call of ``torch.distributed`` on a group of gloo's and on one of ours, and compares results.

gloo gets contiguous tensors: it takes strided ones, and reduces other numbers than theirs. Prints a line for each call
that one of the two answers alone, or otherwise; then the counts.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROOT = WORLD - 1
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
OTHERS = ("complex64", "complex128", "bool")
SOME = ("float32", "bool", "uint8")
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
LAYOUTS = ("plain", "scalar", "empty", "every other", "turned")
Tensors = list[torch.Tensor]
Group = dist.ProcessGroup


def laid_out(numbers: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor of these 6 numbers, or of the first or none of them, in that layout."""
    if layout == "scalar":
        return numbers[0].clone()
    if layout == "empty":
        return numbers[:0].reshape(0, 3).clone()
    if layout == "every other":
        whole = torch.zeros(12, dtype=numbers.dtype)
        whole[::2] = numbers
        return whole[::2]
    return numbers.reshape(3, 2).t() if layout == "turned" else numbers.reshape(2, 3).clone()


class Kind:
    """The number type and the layout of the tensors of one comparison, and the operation, if there is one."""

    def __init__(self, dtype: str, layout: str, op: str = "", *, is_contiguous: bool = False) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.layout, self.is_contiguous = layout, is_contiguous
        self.op: Any = getattr(dist.ReduceOp, op) if op else None

    def brought(self, salt: int = 0, rank: int = RANK) -> torch.Tensor:
        """Return what a rank brings: small whole numbers, whose sums and products are exact in every type."""
        numbers = torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(100 * salt + rank))
        return self.laid_out(numbers)

    def laid_out(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return them as tensors of this kind are."""
        tensor = laid_out(numbers.to(self.dtype), self.layout)
        return tensor.contiguous() if self.is_contiguous else tensor

    def outputs(self) -> Tensors:
        """Return one to be filled for each rank."""
        return [self.laid_out(torch.zeros(6)) for _ in range(WORLD)]

    def joined(self, tensors: Tensors) -> torch.Tensor:
        """Return the tensors of all ranks as one, in rank order."""
        return torch.cat([one.reshape(1) if one.ndim == 0 else one for one in tensors])


def all_reduce(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    tensor = kind.brought()
    yield dist.all_reduce(tensor, kind.op, group=group, **how)
    yield [tensor]


def all_reduce_coalesced(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    tensors = [kind.brought(salt) for salt in range(3)]
    yield dist.all_reduce_coalesced(tensors, kind.op, group=group, **how)
    yield tensors


def reduce(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    tensor = kind.brought()
    yield dist.reduce(tensor, ROOT, kind.op, group=group, **how)
    yield [tensor] if RANK == ROOT else []


def reduce_scatter(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    output = kind.outputs()[0]
    yield dist.reduce_scatter(output, [kind.brought(k) for k in range(WORLD)], kind.op, group=group, **how)
    yield [output]


def reduce_scatter_single(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    output = kind.outputs()[0]
    source = kind.joined([kind.brought(k) for k in range(WORLD)])
    call = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    yield call(output, source, kind.op, group=group, **how)
    yield [output]


def broadcast(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    tensor = kind.brought()
    yield dist.broadcast(tensor, ROOT, group=group, **how)
    yield [tensor]


def all_gather(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    outputs = kind.outputs()
    yield dist.all_gather(outputs, kind.brought(), group=group, **how)
    yield outputs


def all_gather_single(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    output = kind.joined(kind.outputs())
    call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    yield call(output, kind.brought(), group=group, **how)
    yield [output]


def gather(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    outputs = kind.outputs() if RANK == ROOT else None
    yield dist.gather(kind.brought(), outputs, ROOT, group=group, **how)
    yield outputs or []


def scatter(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    output = kind.outputs()[0]
    inputs = [kind.brought(k) for k in range(WORLD)] if RANK == ROOT else None
    yield dist.scatter(output, inputs, ROOT, group=group, **how)
    yield [output]


def all_to_all(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    outputs = kind.outputs()
    yield dist.all_to_all(outputs, [kind.brought(k) for k in range(WORLD)], group=group, **how)
    yield outputs


def all_to_all_single(group: Group, kind: Kind, **how: Any) -> Iterator[Any]:
    """Rank r has r + k rows for rank k."""
    splits = [RANK + k for k in range(WORLD)]
    source = torch.arange(sum(splits) * 2).reshape(-1, 2).to(kind.dtype)
    output = torch.zeros(sum(splits), 2).to(kind.dtype)
    yield dist.all_to_all_single(output, source, splits, splits, group=group, **how)
    yield [output]


def send(group: Group, kind: Kind, **_: Any) -> Iterator[Any]:
    """Around in a ring, two messages at once, which are received by their tags, last one first; then from anyone."""
    following, before = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    works = [dist.isend(kind.brought(tag), following, group=group, tag=tag) for tag in range(2)]
    results = kind.outputs()[:3]
    works += [dist.irecv(results[tag], before, group=group, tag=tag) for tag in (1, 0)]
    for work in works:
        work.wait()
    yield None
    if RANK == 0:
        dist.send(kind.brought(), 1, group=group, tag=7)
    elif RANK == 1:
        assert dist.recv(results[2], None, group=group, tag=7) == 0
    yield results


def batch_isend_irecv(group: Group, kind: Kind, **_: Any) -> Iterator[Any]:
    result = kind.outputs()[0]
    following, before = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    operations = [
        dist.P2POp(dist.isend, kind.brought(), following, group),
        dist.P2POp(dist.irecv, result, before, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    yield None
    yield [result]


REDUCTIONS = (all_reduce, reduce_scatter_single, all_reduce_coalesced, reduce, reduce_scatter)
# Not all_gather_coalesced: gloo's own ended the process twice in a hundred runs or so, where it allocates, after it had
# refused to move numbers of 8 bits, which are left out too.
MOVES = (broadcast, all_gather, all_gather_single, gather, scatter, all_to_all, all_to_all_single)
MESSAGES = (send, batch_isend_irecv)
Call = Callable[..., Iterator[Any]]


Begun = tuple[Iterator[Any], Any] | Exception


def begin(call: Call, group: Group, kind: Kind, *, is_async: bool) -> Begun:
    """Make a call; return its steps and its work, or what it raised."""
    try:
        steps = call(group, kind, **({"async_op": True} if is_async else {}))
        return steps, next(steps)
    except Exception as error:
        return error


def end(begun: Begun) -> Tensors | Exception:
    """Return a call's results, or what it raised."""
    if isinstance(begun, Exception):
        return begun
    steps, work = begun
    try:
        if work is not None:
            work.wait()
            assert work.is_completed()
        results: Tensors = next(steps)
    except Exception as error:
        return error
    return results


def are_alike(ours: Tensors, theirs: Tensors, kind: Kind) -> bool:
    if kind.dtype is torch.bool:  # gloo's are bytes of any value
        return all(torch.equal(one, other.view(torch.uint8).ne(0)) for one, other in zip(ours, theirs, strict=True))
    if kind.op is None or not (kind.dtype.is_floating_point or kind.dtype.is_complex):
        return [bits(one) for one in ours] == [bits(one) for one in theirs]
    tolerance = 1e-2 if kind.dtype.itemsize == 2 else 1e-6
    return all(torch.allclose(one, other, rtol=tolerance) for one, other in zip(ours, theirs, strict=True))


def bits(tensor: torch.Tensor) -> tuple[torch.Size, list[int]]:
    return tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def comparisons() -> Iterator[tuple[Call, tuple[str, ...]]]:
    """Calls with each operation and type, and with some of them in each layout."""
    for call, op in itertools.product(REDUCTIONS, OPERATIONS):
        for dtype in FLOATS + INTEGERS + OTHERS if call in REDUCTIONS[:2] else SOME:
            yield call, (dtype, "plain", op)
    for call, op, layout in itertools.product(REDUCTIONS, ("SUM", "MAX"), LAYOUTS):
        if (call, layout) != (reduce_scatter_single, "scalar"):  # gloo ends the process
            for dtype in SOME:
                yield call, (dtype, layout, op)
    for call in MOVES + MESSAGES:
        for dtype in FLOATS + INTEGERS + OTHERS if call in MOVES else SOME:
            yield call, (dtype, "plain")
    for call, layout in itertools.product(MOVES + MESSAGES, LAYOUTS):
        if not (call in MESSAGES and layout == "empty"):  # gloo waits for ever
            yield call, ("float32", layout)


def compare(theirs: Group, ours: Group) -> Counter[str]:
    """Compare many calls at once, of which each eighth is waited for before the next is made."""
    counts: Counter[str] = Counter()
    numbered = enumerate(comparisons())
    while batch := list(itertools.islice(numbered, 64)):
        begun = []
        for number, (call, words) in batch:
            is_async = number % 8 > 0
            expected = begin(call, theirs, Kind(*words, is_contiguous=True), is_async=is_async)
            begun.append((call, words, expected, begin(call, ours, Kind(*words), is_async=is_async)))
        for call, words, first, second in begun:
            expected, found = end(first), end(second)
            verdict = judge(expected, found, Kind(*words))
            counts[verdict] += 1
            if verdict not in {"alike", "refused by both"}:
                print(f"{verdict}: {call.__name__} {words}: gloo {expected!r:.200}; ours {found!r:.200}", flush=True)
    return counts


def judge(expected: Tensors | Exception, found: Tensors | Exception, kind: Kind) -> str:
    if isinstance(expected, Exception):
        return "refused by both" if isinstance(found, Exception) else "ours alone"
    if isinstance(found, Exception):
        return "MISSING"
    return "alike" if are_alike(found, expected, kind) else "DIFFERENT"


def main() -> None:
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=timeout)
    ours = dist.new_group(backend="syncline", timeout=timeout)
    counts = compare(dist.group.WORLD, ours)
    print(" ".join(f"{name}={count}" for name, count in sorted(counts.items())), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
