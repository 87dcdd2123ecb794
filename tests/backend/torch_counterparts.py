"""One rank that does what PyTorch's own tests of process groups do, on a group of gloo's and on one of ours.

Each check gives tensors, which are to be the same on both. Prints the name of each check that went well.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from syncline.backend.calls import GroupCalls

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NUM_AT_ONCE = 300
Group = Any
Tensors = Iterator[torch.Tensor]


def given(kind: str, **values: Any) -> Any:
    """Options of a call."""
    options = getattr(c10d, f"{kind}Options")()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def wrong_calls(group: Group) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What gloo refuses where it is called."""
    one, double, two = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    sparse, longer = (torch.sparse_coo_tensor([[0]], [1.0], size=(size,), check_invariants=False) for size in (2, 4))
    for root in (-1, WORLD):
        yield "broadcast root", lambda root=root: group.broadcast([one], given("Broadcast", rootRank=root))
        yield "reduce root", lambda root=root: group.reduce([one], given("Reduce", rootRank=root))
        yield "scatter root", lambda root=root: group.scatter([one], [], given("Scatter", rootRank=root))
        yield "gather root", lambda root=root: group.gather([], [one], given("Gather", rootRank=root))
    for number in (-1, 1):
        yield "root tensor", lambda n=number: group.broadcast([one], given("Broadcast", rootRank=RANK, rootTensor=n))
    yield "reduce root tensor", lambda: group.reduce([one], given("Reduce", rootRank=RANK, rootTensor=1))
    yield "reduce two", lambda: group.reduce([one, one], given("Reduce", rootRank=RANK))
    for other in (double, two):
        yield "broadcast unlike", lambda other=other: group.broadcast([one, other], given("Broadcast", rootRank=RANK))
        yield "allreduce unlike", lambda other=other: group.allreduce([one, other], given("Allreduce"))
        yield "allgather unlike", lambda other=other: group.allgather([[one] * 2 * WORLD] * 2, [one, other])
        root = given("Scatter", rootRank=RANK)
        yield "scatter unlike", lambda other=other, root=root: group.scatter([one], [[other] * WORLD], root)
        root = given("Gather", rootRank=RANK)
        yield "gather unlike", lambda other=other, root=root: group.gather([[other] * WORLD], [one], root)
    yield "allgather unlike outputs", lambda: group.allgather([[one, double][:WORLD]], [one])
    yield "allreduce none", lambda: group.allreduce([], given("Allreduce"))
    yield "coalesced none", lambda: group.allreduce_coalesced([], given("AllreduceCoalesced"))
    yield "coalesced layouts", lambda: group.allreduce_coalesced([one, sparse], given("AllreduceCoalesced"))
    yield "sparse and dense", lambda: group.allreduce([one, sparse], given("Allreduce"))
    yield "sparse sizes", lambda: group.allreduce([sparse, longer], given("Allreduce"))
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        yield "sparse reduction", lambda op=op: group.allreduce([sparse], given("Allreduce", reduceOp=op))
    for outputs, inputs in (([], []), ([], [one]), ([[one] * WORLD] * 2, [one])):
        yield "allgather lists", lambda outputs=outputs, inputs=inputs: group.allgather(outputs, inputs)
    for size in (WORLD - 1, WORLD + 1):
        yield "allgather outputs", lambda size=size: group.allgather([[one] * size], [one])
        root = given("Scatter", rootRank=RANK)
        yield "scatter parts", lambda size=size, root=root: group.scatter([one], [[one] * size], root)
        root = given("Gather", rootRank=RANK)
        yield "gather parts", lambda size=size, root=root: group.gather([[one] * size], [one], root)
    for outputs in ([], [one, one]):
        yield "scatter outputs", lambda outputs=outputs: group.scatter(outputs, [], given("Scatter", rootRank=0))
    for lists in ([], [[one] * WORLD] * 2):
        root = given("Scatter", rootRank=RANK)
        yield "scatter lists", lambda lists=lists, root=root: group.scatter([one], lists, root)
        root = given("Gather", rootRank=RANK)
        yield "gather lists", lambda lists=lists, root=root: group.gather(lists, [one], root)
    for inputs in ([], [one, one]):
        yield "gather inputs", lambda inputs=inputs: group.gather([], inputs, given("Gather", rootRank=0))
    following = (RANK + 1) % WORLD
    yield "not the root", lambda: group.scatter([one], [[one] * WORLD], given("Scatter", rootRank=following))
    yield "not the root either", lambda: group.gather([[one] * WORLD], [one], given("Gather", rootRank=following))


def refusals(group: Group) -> Tensors:
    for name, call in wrong_calls(group):
        try:
            call()
        except (RuntimeError, ValueError):
            continue
        raise AssertionError(f"{name} is not refused")
    value = torch.ones(1)
    group.allreduce([value]).wait()
    yield value


def many_at_once(group: Group) -> Tensors:
    """Calls of every kind, all begun before the first is waited for, with each rank as the root in turn."""

    def number(value: int) -> torch.Tensor:
        return torch.tensor([value])

    def several() -> list[torch.Tensor]:
        return [number(-1) for _ in range(WORLD)]

    begun = []
    for turn in range(NUM_AT_ONCE):
        root, own = turn % WORLD, turn * WORLD + RANK
        is_root = root == RANK
        parts, outputs = [several()] if is_root else [], [several()] if is_root else []
        begun += [
            group.broadcast([number(own)], given("Broadcast", rootRank=root)),
            group.allreduce([number(own)]),
            group.allreduce_coalesced([number(own), number(own)]),
            group.allgather([several()], [number(own)]),
            group.scatter([number(own)], parts, given("Scatter", rootRank=root)),
            group.gather(outputs, [number(own)], given("Gather", rootRank=root)),
        ]
        reduced = group.reduce([number(own)], given("Reduce", rootRank=root))
        begun += [reduced] if is_root else []
    futures = [work.get_future() for work in begun]
    for future in futures:
        result = future.wait()
        yield torch.cat([one for one in result if isinstance(one, torch.Tensor)] or [number(0)])


def kinds_of_tensors(group: Group) -> Tensors:
    empty = torch.empty(0)
    (result,) = group.broadcast([empty], given("Broadcast", rootRank=0)).get_future().wait()
    yield result
    flags = torch.tensor([True, False, False, True]) if RANK == 0 else torch.zeros(4, dtype=torch.bool)
    dist.broadcast(flags, 0, group=group)
    yield flags
    pair = torch.full((2,), RANK + 1.0)
    for source in (pair, torch.view_as_complex(pair.clone())):
        outputs = [torch.zeros(2) for _ in range(WORLD)]
        outputs[1] = outputs[1].view(2)
        dist.all_gather(
            outputs, source if source.dtype == outputs[0].dtype else torch.view_as_real(source), group=group
        )
        yield from outputs
    half = torch.full((10,), 0.1 * (RANK + 1)).half()
    dist.all_reduce(half, group=group)
    yield half
    parts = [torch.rand(size, generator=torch.Generator().manual_seed(size)) for size in range(WORLD)]
    output = torch.empty(RANK)
    dist.reduce_scatter(output, parts, group=group, async_op=True).wait()
    yield output
    with torch.inference_mode():
        outputs = [torch.zeros(2) for _ in range(WORLD)]
        group.allgather([outputs], [pair]).wait()
        yield from (one.clone() for one in outputs)
    tensors = [torch.arange(60).chunk(5)[0].to(kind) * (RANK + 1) for kind in (torch.float32, torch.float64) * 3]
    dist._broadcast_coalesced(group, tensors, 256, 1)
    yield from tensors


def numbered(group: Group) -> Tensors:
    first = group._get_sequence_number_for_group()
    for turn in range(3):
        dist.all_reduce(torch.ones(1), group=group)
        yield torch.tensor(group._get_sequence_number_for_group() - first - turn)


def gathered_into(group: Group, value: torch.Tensor) -> torch.Tensor:
    """Gather with ``out=``; before PyTorch 2.14 that asks for a backend in C++, and is refused on a group of Python."""
    ops, output = torch.ops._c10d_functional, torch.empty(WORLD * len(value), *value.shape[1:])
    if isinstance(group, GroupCalls) and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        with pytest.raises(RuntimeError, match="error_on_collective"):
            ops.all_gather_into_tensor_out(value, WORLD, group.group_name, out=output)
        return ops.wait_tensor(ops.all_gather_into_tensor(value, WORLD, group.group_name))
    assert ops.wait_tensor(ops.all_gather_into_tensor_out(value, WORLD, group.group_name, out=output)) is output
    return output


def native(group: Group) -> Tensors:
    """The operators behind functional collectives: in and out of place, several at once, awaited by use."""
    ops, name = torch.ops._c10d_functional, group.group_name
    value = torch.full((3, 3), float(RANK))
    several = [torch.full((size, size), float(RANK * size)) for size in range(4)]
    registered = torch._C._distributed_c10d._get_work_registry_size
    before = registered()
    outputs = [ops.all_reduce(value, "sum", name), ops.broadcast(value, 1, name)]
    assert registered() == before + 2
    outputs += [
        ops.all_gather_into_tensor(value, WORLD, name),
        ops.reduce_scatter_tensor(torch.arange(4.0), "sum", WORLD, name),
        ops.all_to_all_single(torch.full((2 + RANK,), float(RANK)), [1, 1 + RANK], [1, 1 + RANK], name),
        *ops.all_reduce_coalesced(several, "sum", name),
        *ops.all_gather_into_tensor_coalesced(several, WORLD, name),
        *ops.reduce_scatter_tensor_coalesced([torch.arange(4.0), torch.arange(2.0)], "sum", WORLD, name),
    ]
    yield from [ops.wait_tensor(output) for output in outputs]
    assert registered() == before
    yield gathered_into(group, value)
    own = value.clone()
    assert ops.wait_tensor(ops.all_reduce_(own, "sum", name)) is own
    yield own
    for own, other in zip(several, ops.all_reduce_coalesced_(several, "sum", name), strict=True):
        assert ops.wait_tensor(other) is own
        yield own.clone()
    lazy = functional.all_reduce(value, "sum", group)
    gc.collect()
    assert isinstance(lazy, functional.AsyncCollectiveTensor)
    assert not lazy.completed
    yield lazy + 0
    assert lazy.completed
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(lambda: functional.all_reduce(value, "sum", group) + 1).result()
    functional.all_reduce(value, "sum", group)  # which nobody waits for


@dataclass
class Output:
    first: torch.Tensor | None
    rest: dict[str, torch.Tensor]


class Branches(nn.Module):
    """Uses the first branch or does not, runs a layer twice under activation checkpoints, gives a dataclass."""

    def __init__(self, *, has_first: bool, num_checkpoints: int) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.has_first, self.num_checkpoints, self.use_reentrant = has_first, num_checkpoints, False

    def forward(self, batch: torch.Tensor) -> Output:
        hidden = self.norm(batch)
        for _ in range(self.num_checkpoints):
            hidden = checkpoint(self.second, hidden, use_reentrant=self.use_reentrant)
        return Output(self.first(batch) if self.has_first else None, {"second": self.second(hidden)})


def data_parallel(group: Group) -> Tensors:
    """DistributedDataParallel: outputs that are ignored, dataclasses, activation checkpoints, shared weights."""
    for has_first, num_checkpoints, static_graph in ((True, 1, False), (False, 2, False), (True, 2, True)):
        for is_view in (False, True):
            torch.manual_seed(RANK)
            plain = Branches(has_first=has_first, num_checkpoints=num_checkpoints)
            if static_graph:
                plain.first.weight = plain.second.weight
            options = {"static_graph": static_graph, "find_unused_parameters": not static_graph}
            model = DistributedDataParallel(plain, process_group=group, gradient_as_bucket_view=is_view, **options)
            if not static_graph:
                model(torch.ones(2, 4))  # ignored
            batch = torch.arange(8.0).reshape(2, 4).cos() * (RANK + 1)
            output = model(batch)
            loss = output.rest["second"].square().mean()
            (loss if output.first is None else loss + output.first.sum()).backward()
            yield from (torch.empty(0) if one.grad is None else one.grad.clone() for one in plain.parameters())


def changing_data_parallel(group: Group) -> Tensors:
    """Models that use other layers from step to step, or recompute them as another pass within the backward pass."""
    for is_shared, use_reentrant in itertools.product((False, True), repeat=2):
        torch.manual_seed(RANK)
        plain = Branches(has_first=not use_reentrant, num_checkpoints=1)
        plain.use_reentrant = use_reentrant
        if is_shared:
            plain.first.weight = plain.second.weight
        model = DistributedDataParallel(
            plain, process_group=group, find_unused_parameters=not use_reentrant, static_graph=use_reentrant
        )
        for step in range(3):
            if not use_reentrant:
                plain.has_first, plain.num_checkpoints = step % 2 == 0, 1 + step % 2
            model.zero_grad()
            output = model((torch.arange(8.0).reshape(2, 4) + step).cos() * (RANK + 1))
            loss = output.rest["second"].square().mean()
            (loss if output.first is None else loss + output.first.sum()).backward()
            yield from (torch.empty(0) if one.grad is None else one.grad.clone() for one in plain.parameters())


def hooks(group: Group) -> Tensors:
    """Communication hooks: futures of theirs, sparse gradients through a group's own call, and refusals."""

    def constant(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.ones_like(bucket.buffer()))
        return future.then(lambda done: done.value() + 1)

    def mean(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = group.allreduce([bucket.buffer()]).get_future()
        return future.then(lambda done: done.wait()[0] / WORLD)

    for hook, is_sparse in ((constant, False), (mean, False), (None, True), (mean, True)):
        torch.manual_seed(7)
        plain = nn.EmbeddingBag(6, 3, sparse=True) if is_sparse else nn.Linear(2, 2)
        model = DistributedDataParallel(plain, process_group=group)
        if hook is not None:
            model.register_comm_hook(hook, lambda hook, bucket: hook(bucket))
            with pytest.raises(RuntimeError, match="only be called once"):
                model.register_comm_hook(hook, lambda hook, bucket: hook(bucket))
        batch = torch.tensor([[0, 1 + RANK], [2, 2]]) if is_sparse else torch.ones(3, 2) * (RANK + 1)
        model(batch).sum().backward()
        yield from (one.grad.to_dense() for one in plain.parameters())
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    with pytest.raises(TypeError):
        model.register_comm_hook(None, 1)
    model.register_comm_hook(None, lambda _, bucket: 1)
    with pytest.raises(RuntimeError, match=r"future|Future"):
        model(torch.ones(1, 2)).sum().backward()


def reducers(group: Group) -> Tensors:
    """The class in C++ behind DistributedDataParallel, with buckets of one number type each."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(2, 3).double(), nn.ReLU())
    parameters = list(model.parameters())
    size = [dist._DEFAULT_FIRST_BUCKET_BYTES]
    reducer = dist.Reducer(parameters, [[0, 1]], size, group)
    for _ in range(2):
        reducer.prepare_for_forward()
        loss = model(torch.ones(2, 2).double() * (RANK + 1)).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
    yield from (one.grad.clone() for one in parameters)
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())]
    with pytest.raises(RuntimeError):
        dist.Reducer(mixed, [[0, 1]], size, group)


PLACEMENTS = (Replicate(), Shard(0), Shard(1), Partial())


def redistributions(group: Group) -> Tensors:
    """DTensors from each placement to each other, of sizes that do and do not divide, and their gradients."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for shape in ((4, 6), (5, 3), (1, 7)):
        for kind in (torch.float32, torch.complex64):
            whole = torch.arange(shape[0] * shape[1]).reshape(shape).to(kind)
            for before in PLACEMENTS:
                for after in PLACEMENTS:
                    if isinstance(after, Partial) and not isinstance(before, Partial):
                        continue  # nobody can ask for it
                    source = distribute_tensor(whole, mesh, [Replicate() if isinstance(before, Partial) else before])
                    if isinstance(before, Partial):
                        source = DTensor.from_local(whole, mesh, [before], run_check=False)
                    source = source.detach().requires_grad_()
                    moved = source.redistribute(mesh, [after])
                    yield moved.to_local()
                    if not isinstance(after, Partial):
                        moved.backward(distribute_tensor(whole + 1, mesh, [after]))
                        yield source.grad.to_local()


OPERATIONS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda one, other: one @ other,
    lambda one, other: torch.addmm(torch.ones_like(one), one, other),
    lambda one, other: one + other,
    lambda one, other: one * other.t(),
    lambda one, _: one.sum(),
    lambda one, _: one.mean(0),
    lambda one, _: one.amax(1),
    lambda one, _: one.var(),
    lambda one, _: one.softmax(1),
    lambda one, _: one.log_softmax(0),
    lambda one, _: one.view(2, 4, 8),
    lambda one, _: one.t().reshape(-1),
    lambda one, other: torch.cat([one, other], 1),
    lambda one, other: torch.stack([one, other]),
    lambda one, _: one.split(4)[1],
    lambda one, _: one[:, 1:5],
    lambda one, _: one.cumsum(0),
    lambda one, _: one.topk(3)[0],
    lambda one, _: torch.nn.functional.layer_norm(one, (8,)),
    lambda one, _: torch.nn.functional.gelu(one),
    lambda one, other: torch.where(one > 0, one, other),
    lambda one, other: torch.bmm(one.unsqueeze(0), other.unsqueeze(0)),
    lambda one, _: torch.linalg.vector_norm(one),
    lambda one, _: one.equal(one) + one,
)


def sharded_operations(group: Group) -> Tensors:
    """Operators on DTensors in each pair of placements: what they are on plain tensors."""
    mesh = DeviceMesh.from_group(group, "cpu")
    one, other = (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    for operation in OPERATIONS:
        expected = operation(one, other)
        for first in PLACEMENTS[:3]:
            for second in PLACEMENTS[:3]:
                result = operation(distribute_tensor(one, mesh, [first]), distribute_tensor(other, mesh, [second]))
                torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-4, atol=1e-5)
                yield result.to_local()
    table = distribute_tensor(one, mesh, [Shard(0)])
    rows = distribute_tensor(torch.tensor([0, 3, 7]), mesh, [Replicate()])
    yield torch.nn.functional.embedding(rows, table).full_tensor()


def checkpoints(group: Group) -> Tensors:
    """Saved by the group, at once or beside, and loaded in other placements."""
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(35.0).reshape(7, 5)
    for save in (dcp.save, dcp.async_save):
        for before in PLACEMENTS[:3]:
            place: list[Any] = [tempfile.mkdtemp() if RANK == 0 else None]
            dist.broadcast_object_list(place, 0, group=group)
            state = {"weight": distribute_tensor(whole, mesh, [before]), "plain": torch.ones(3), "step": 5}
            done = save(state, checkpoint_id=place[0], process_group=group)
            if save is dcp.async_save:
                done.result()
            for after in PLACEMENTS[:3]:
                empty = distribute_tensor(torch.zeros(7, 5), mesh, [after])
                loaded = {"weight": empty, "plain": torch.zeros(3), "step": 0}
                dcp.load(loaded, checkpoint_id=place[0], process_group=group)
                assert loaded["step"] == 5
                yield loaded["weight"].full_tensor()
                yield loaded["plain"]


CHECKS = (
    refusals,
    many_at_once,
    kinds_of_tensors,
    numbered,
    native,
    data_parallel,
    changing_data_parallel,
    hooks,
    reducers,
    redistributions,
    sharded_operations,
    checkpoints,
)


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=timeout)
    ours = dist.new_group(backend="syncline", timeout=timeout)
    for check in CHECKS:
        if len(sys.argv) > 1 and check.__name__ not in sys.argv:
            continue
        expected, found = ([one.detach().clone() for one in check(group)] for group in (dist.group.WORLD, ours))
        assert len(expected) == len(found), check
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            torch.testing.assert_close(other, one, msg=lambda text, n=number, c=check: f"{c.__name__} {n}: {text}")
        print(check.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
