"""Each collective with each operation and number type, against plain arithmetic on the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.tensors.collectives import TensorCollectives

Tensors = list[torch.Tensor]
WORLD = 3
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
SIGNED = [torch.int64, torch.int32, torch.int16, torch.int8]
UNSIGNED = [torch.uint64, torch.uint32, torch.uint16, torch.uint8]
INTEGERS = SIGNED + UNSIGNED
BYTES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
EVERY_KIND = [*FLOATS, *COMPLEX, *INTEGERS, *BYTES, torch.bool]
SHAPES = [(), (0,), (1,), (5, 3)]


def brought(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (5, 3), *, salt: int = 0) -> torch.Tensor:
    """What a rank brings: small whole numbers, whose sums and products are exact in every type."""
    numbers = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(1000 * salt + rank))
    return numbers.to(dtype)


def reduced(tensors: Tensors, op: str) -> torch.Tensor:
    """What plain arithmetic makes of the tensors of all ranks."""
    dtype = tensors[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    result = tensors[0].to(wide)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    for tensor in tensors[1:]:
        result = functions[op](result, tensor.to(wide))
    if op == "AVG":
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        result = torch.div(result, len(tensors), rounding_mode="trunc" if is_whole else None)
    return result.to(dtype)


CASES = [
    *(("SUM", dtype) for dtype in FLOATS + COMPLEX + INTEGERS + [torch.bool]),
    *(("AVG", dtype) for dtype in FLOATS + COMPLEX + SIGNED + [torch.uint8]),
    *(("PRODUCT", dtype) for dtype in FLOATS + COMPLEX + INTEGERS + [torch.bool]),
    *((op, dtype) for op in ("MIN", "MAX") for dtype in FLOATS + INTEGERS + [torch.bool]),
    *((op, dtype) for op in ("BAND", "BOR", "BXOR") for dtype in [*INTEGERS, torch.bool]),
]


def check_reductions(collectives: TensorCollectives, rank: int, name: str, dtype: torch.dtype) -> None:
    op = getattr(dist.ReduceOp, name)
    for shape in SHAPES:
        every = [brought(k, dtype, shape) for k in range(WORLD)]
        tensor = every[rank].clone()
        collectives.all_reduce(tensor, op).wait()
        assert_close(tensor, reduced(every, name))
        tensor = every[rank].clone()
        collectives.reduce(tensor, 1, dist.ReduceOp(op), is_awaited=True).wait()
        assert_close(tensor, reduced(every, name) if rank == 1 else every[rank])
    lists = [[brought(k, dtype, (4, 2), salt=part + 1) for part in range(WORLD)] for k in range(WORLD)]
    expected = reduced([one[rank] for one in lists], name)
    output = torch.empty(4, 2, dtype=dtype)
    collectives.reduce_scatter(output, lists[rank], op).wait()
    assert_close(output, expected)
    output.zero_()
    collectives.reduce_scatter_single(output, torch.cat(lists[rank]), op, is_awaited=True).wait()
    assert_close(output, expected)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-2 if actual.itemsize == 2 else 1e-6, atol=0)


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_every_reduction_of_every_type(op: str, run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        for dtype in (dtype for name, dtype in CASES if name == op):
            check_reductions(collectives, communicator.rank, op, dtype)

    run_ranks(WORLD, body)


def test_reductions_anywhere(run_anywhere: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        for op, dtype in (("SUM", torch.float32), ("AVG", torch.bfloat16), ("BXOR", torch.int16), ("SUM", torch.bool)):
            check_reductions(collectives, communicator.rank, op, dtype)

    run_anywhere(WORLD, body)


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.25)])
def test_a_factor_multiplies_before_the_sum(factor: float | torch.Tensor, run_ranks: Any) -> None:
    op = dist._make_nccl_premul_sum(factor)

    def body(collectives: TensorCollectives, communicator: Any) -> None:
        for dtype in FLOATS + COMPLEX:
            tensor = torch.full((3,), communicator.rank + 1).to(dtype)
            collectives.all_reduce(tensor, op).wait()
            assert_close(tensor, torch.full((3,), 6 * float(factor)).to(dtype))
            output, source = torch.empty(2, dtype=dtype), torch.ones(6, dtype=dtype)
            collectives.reduce_scatter_single(output, source, op).wait()
            assert_close(output, torch.full((2,), 3 * float(factor)).to(dtype))
            assert_close(source, torch.ones(6, dtype=dtype))

    run_ranks(WORLD, body)


def check_moves(collectives: TensorCollectives, rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    every = [brought(k, dtype, shape) for k in range(WORLD)]

    def fresh() -> Tensors:
        return [torch.empty(shape, dtype=dtype) for _ in range(WORLD)]

    tensor = every[rank].clone()
    collectives.broadcast(tensor, 2).wait()
    check_same([tensor], [every[2]])
    outputs = fresh()
    collectives.all_gather(outputs, every[rank]).wait()
    check_same(outputs, every)
    outputs = fresh()
    collectives.gather(outputs if rank == 1 else None, every[rank], 1).wait()
    if rank == 1:
        check_same(outputs, every)
    output = torch.empty(shape, dtype=dtype)
    collectives.scatter(output, every if rank == 2 else [], 2).wait()
    check_same([output], [every[rank]])
    outputs, pairs = fresh(), [[brought(k, dtype, shape, salt=part + 1) for part in range(WORLD)] for k in range(WORLD)]
    collectives.all_to_all(outputs, pairs[rank]).wait()
    check_same(outputs, [one[rank] for one in pairs])


def check_same(actual: Tensors, expected: Tensors) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert one.reshape(-1).view(torch.uint8).tolist() == other.reshape(-1).view(torch.uint8).tolist()


def test_every_type_is_moved(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        for dtype in EVERY_KIND:
            check_moves(collectives, communicator.rank, dtype, (2, 3))

    run_ranks(WORLD, body)


def test_tensors_of_any_shape_are_moved_anywhere(run_anywhere: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        for shape in [*SHAPES, (300_001,)]:
            check_moves(collectives, communicator.rank, torch.int64, shape)

    run_anywhere(WORLD, body)


def test_one_tensor_of_all_ranks(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        for dtype in EVERY_KIND:
            every = [brought(k, dtype, (2, 2)) for k in range(WORLD)]
            output = torch.empty(6, 2, dtype=dtype)
            collectives.all_gather_single(output, every[communicator.rank]).wait()
            check_same([output], [torch.cat(every)])

    run_ranks(WORLD, body)


def test_rows_for_every_rank(run_anywhere: Any) -> None:
    """Rank r has r * k rows for rank k, so there are pairs with none; and as many for each."""

    def body(collectives: TensorCollectives, communicator: Any) -> None:
        rank = communicator.rank
        splits = [rank * k for k in range(WORLD)]
        source = torch.cat([torch.full((rank * k, 2), 10.0 * rank + k) for k in range(WORLD)])
        output = torch.empty(sum(splits), 2)
        collectives.all_to_all_single(output, source, splits, splits).wait()
        check_same([output], [torch.cat([torch.full((rank * k, 2), 10.0 * k + rank) for k in range(WORLD)])])
        output = torch.empty(WORLD, dtype=torch.int32)
        collectives.all_to_all_single(output, torch.arange(WORLD, dtype=torch.int32) + 10 * rank).wait()
        assert output.tolist() == [rank, 10 + rank, 20 + rank]

    run_anywhere(WORLD, body)


def test_several_tensors_at_once(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        rank = communicator.rank
        many = [torch.full((4,), rank + 1.0), torch.full((2, 2), rank, dtype=torch.int64), torch.empty(0)]
        collectives.all_reduce_coalesced(many, dist.ReduceOp.SUM).wait()
        check_same(many, [torch.full((4,), 6.0), torch.full((2, 2), 3), torch.empty(0)])
        wholes = [torch.empty(3), torch.empty(6, dtype=torch.int32)]
        collectives.all_gather_single_coalesced(
            wholes, [torch.full((1,), float(rank)), torch.full((2,), rank, dtype=torch.int32)]
        ).wait()
        assert [whole.tolist() for whole in wholes] == [[0, 1, 2], [0, 0, 1, 1, 2, 2]]
        parts = [torch.empty(1), torch.empty(2, dtype=torch.int32)]
        collectives.reduce_scatter_single_coalesced(
            parts, [torch.arange(3.0), torch.arange(6, dtype=torch.int32)], dist.ReduceOp.SUM
        ).wait()
        assert [part.tolist() for part in parts] == [[3.0 * rank], [6 * rank, 6 * rank + 3]]
        outputs = [[torch.empty(2), torch.empty(3, dtype=torch.bool)] for _ in range(WORLD)]
        collectives.all_gather_coalesced(outputs, [torch.full((2,), float(rank)), torch.full((3,), rank == 1)]).wait()
        for k in range(WORLD):
            check_same(outputs[k], [torch.full((2,), float(k)), torch.full((3,), k == 1)])
        collectives.all_reduce_coalesced([], dist.ReduceOp.SUM).wait()

    run_ranks(WORLD, body)


def test_a_single_rank(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, _: Any) -> None:
        source, output = torch.arange(4.0), torch.empty(4)
        collectives.all_reduce(output.copy_(source), dist.ReduceOp.AVG).wait()
        check_same([output], [source])
        for begin in (
            lambda: collectives.all_gather([output], source),
            lambda: collectives.reduce_scatter(output, [source], dist.ReduceOp.SUM),
            lambda: collectives.gather([output], source, 0),
            lambda: collectives.scatter(output, [source], 0),
            lambda: collectives.all_to_all([output], [source]),
            lambda: collectives.all_to_all_single(output, source),
        ):
            output.zero_()
            begin().wait()
            check_same([output], [source])
        collectives.barrier().wait()
        collectives.monitored_barrier().wait()

    run_ranks(1, body)


def test_barriers(run_anywhere: Any) -> None:
    def body(collectives: TensorCollectives, _: Any) -> bool:
        collectives.barrier(is_awaited=True).wait()
        collectives.monitored_barrier(wait_all_ranks=True).wait()
        work = collectives.barrier()
        work.wait()
        return work.done()

    assert run_anywhere(WORLD, body) == [True] * WORLD
