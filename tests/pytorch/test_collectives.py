"""Collectives on tensors of every kind."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.errors import ConfigurationError, MismatchError, SynclineError
from syncline.pytorch.fleet import Fleet

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 3)])
def test_sum_of_any_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...], run_fleets: Any) -> None:
    def body(fleet: Fleet) -> torch.Tensor:
        tensor = torch.full(shape, fleet.rank + 1).to(dtype)
        fleet.all_reduce(tensor)
        return tensor

    for result in run_fleets(3, body):
        assert torch.equal(result, torch.full(shape, 6).to(dtype))


@pytest.mark.parametrize("is_in_shared_memory", [False, True])
@pytest.mark.parametrize("dtype", [kind for kind in FLOATS + INTEGERS if not kind.is_complex])
def test_max_min_and_product(dtype: torch.dtype, is_in_shared_memory: bool, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> list[list[float]]:
        if is_in_shared_memory:
            fleet.communicator.open_segment()
        results = []
        for op in ("max", "min", "product"):
            tensor = torch.tensor([fleet.rank + 1, 4 - fleet.rank, 2]).to(dtype)
            fleet.all_reduce(tensor, op=op)
            results.append(tensor.tolist())
        part = torch.empty(1, dtype=dtype)
        fleet.reduce_scatter(part, torch.tensor([fleet.rank + 1, 5 - fleet.rank, 2]).to(dtype), op="max")
        return [*results, part.tolist()]

    expected = [[3, 4, 2], [1, 2, 2], [6, 24, 8]]
    assert run_fleets(3, body) == [[*expected, [3]], [*expected, [5]], [*expected, [2]]]


def test_bool_has_any_and_all(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> list[list[bool]]:
        some, every = (torch.tensor([fleet.rank == 1, True, False]) for _ in range(2))
        fleet.all_reduce(some, op="max")
        fleet.all_reduce(every, op="min")
        return [some.tolist(), every.tolist()]

    assert run_fleets(3, body) == [[[True, True, False], [False, True, False]]] * 3


def test_maxima_pass_not_a_number_on(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> float:
        tensor = torch.tensor([float("nan") if fleet.rank == 1 else 3.0])
        fleet.all_reduce(tensor, op="max")
        return float(tensor)

    assert all(math.isnan(result) for result in run_fleets(3, body))


def test_one_rank_gets_what_all_have(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> tuple[list[float], Any]:
        tensor = torch.tensor([float(fleet.rank), 1.0])
        fleet.reduce(tensor, dst=1)
        strided = torch.full((2, 4), fleet.rank)[:, ::2]
        gathered = fleet.gather(strided, dst=2)
        return tensor.tolist(), gathered and [part.tolist() for part in gathered]

    zero, one, two = run_fleets(3, body)
    assert zero == ([0.0, 1.0], None)
    assert one == ([3.0, 3.0], None)
    assert two == ([2.0, 1.0], [[[rank, rank], [rank, rank]] for rank in range(3)])


Call = Callable[[Fleet], object]
DIFFERENT: dict[str, tuple[Call, Call, str, str]] = {
    "op": (
        lambda fleet: fleet.all_reduce(torch.ones(3)),
        lambda fleet: fleet.all_reduce(torch.ones(3), op="mean"),
        "all_reduce of 3 x float32 (sum;",
        "all_reduce of 3 x float32 (mean;",
    ),
    "maximum": (
        lambda fleet: fleet.all_reduce(torch.ones(3), op="max"),
        lambda fleet: fleet.all_reduce(torch.ones(3), op="min"),
        "all_reduce of 3 x float32 (max;",
        "all_reduce of 3 x float32 (min;",
    ),
    "scattered op": (
        lambda fleet: fleet.reduce_scatter(torch.ones(2), torch.ones(6)),
        lambda fleet: fleet.reduce_scatter(torch.ones(2), torch.ones(6), op="mean"),
        "reduce_scatter of 6 x float32 (sum;",
        "reduce_scatter of 6 x float32 (mean;",
    ),
    "weight of a sum": (
        lambda fleet: fleet.all_reduce(torch.ones(3)),
        lambda fleet: fleet.all_reduce(torch.ones(3), weight=2.0),
        "all_reduce of 3 x float32 (sum;",
        "all_reduce of 3 x float32 (weighted sum;",
    ),
    "weight of a mean": (
        lambda fleet: fleet.all_reduce(torch.ones(1, dtype=torch.float64), op="mean"),
        lambda fleet: fleet.all_reduce(torch.ones(1, dtype=torch.float64), op="mean", weight=2.0),
        "all_reduce of 1 x float64 (mean; all_reduce)",
        "all_reduce of 1 x float64 (total weight of a mean; weight of 1 x float64)",
    ),
    "gathered type": (
        lambda fleet: fleet.all_gather(torch.ones(3), torch.ones(1)),
        lambda fleet: fleet.all_gather(torch.ones(3, dtype=torch.int32), torch.ones(1, dtype=torch.int32)),
        "all_gather of 12 bytes of float32",
        "all_gather of 12 bytes of int32",
    ),
    "broadcast type": (
        lambda fleet: fleet.broadcast(torch.ones(1, dtype=torch.float64)),
        lambda fleet: fleet.broadcast(torch.ones(2)),
        "broadcast of 8 bytes of float64",
        "broadcast of 8 bytes of float32",
    ),
    "who gathers": (
        lambda fleet: fleet.gather(torch.ones(2), dst=0),
        lambda fleet: fleet.gather(torch.ones(2), dst=1),
        "all_gather of 24 bytes of float32 (for rank 0;",
        "all_gather of 24 bytes of float32 (for rank 1;",
    ),
    "who reduces": (
        lambda fleet: fleet.reduce(torch.ones(2), dst=0),
        lambda fleet: fleet.reduce(torch.ones(2), dst=1),
        "all_reduce of 2 x float32 (sum for rank 0;",
        "all_reduce of 2 x float32 (sum for rank 1;",
    ),
}


@pytest.mark.parametrize("is_in_shared_memory", [False, True])
@pytest.mark.parametrize("odd_rank", range(3))
@pytest.mark.parametrize("kind", DIFFERENT)
def test_calls_that_mean_different_things_are_an_error_that_names_both(
    kind: str, odd_rank: int, is_in_shared_memory: bool, run_fleets: Any
) -> None:
    usual, odd, usual_text, odd_text = DIFFERENT[kind]

    have_failed = threading.Barrier(3)

    def make_calls(fleet: Fleet) -> None:
        (odd if fleet.rank == odd_rank else usual)(fleet)
        fleet.barrier()  # a rank that had all it needed from those that agree with it finds out at its next call

    def body(fleet: Fleet) -> str:
        if is_in_shared_memory:
            fleet.communicator.open_segment()
        with pytest.raises(MismatchError) as caught:
            make_calls(fleet)
        have_failed.wait(60)
        return str(caught.value)

    for text in run_fleets(3, body):
        assert usual_text in text
        assert odd_text in text


def test_non_contiguous_and_asynchronous(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> torch.Tensor:
        base = torch.zeros(4, 6)
        work = None
        base[:, ::2] = fleet.rank + 1.0
        work = fleet.all_reduce(base[:, ::2], async_op=True)
        assert work is not None
        work.wait()
        work.wait()
        assert work.done()
        return base

    for result in run_fleets(3, body):
        assert result[:, ::2].eq(6).all()
        assert result[:, 1::2].eq(0).all()


def test_weighted_mean(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> tuple[float, float]:
        first, second = torch.tensor([float(fleet.rank)]), torch.tensor([float(fleet.rank)])
        fleet.all_reduce(first, op="mean")
        fleet.all_reduce(second, op="mean", weight=fleet.rank)
        return float(first), float(second)

    assert run_fleets(3, body) == [(pytest.approx(1.0), pytest.approx(5 / 3))] * 3


def test_parts(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        source = torch.arange(12.0).reshape(6, 2) * (fleet.rank + 1)
        before = source.clone()
        output = torch.empty(2, 2)
        fleet.reduce_scatter(output, source)
        assert torch.equal(output, torch.arange(12.0).reshape(6, 2)[2 * fleet.rank : 2 * fleet.rank + 2] * 6)
        assert torch.equal(source, before)
        fleet.reduce_scatter(output, source, op="mean", weight=1.0)
        assert torch.equal(output, torch.arange(12.0).reshape(6, 2)[2 * fleet.rank : 2 * fleet.rank + 2] * 2)
        whole = torch.empty(6, 2, dtype=torch.bool)
        fleet.all_gather(whole, torch.full((2, 2), fleet.rank == 1))
        assert whole.any(1).tolist() == [False, False, True, True, False, False]
        strided = torch.zeros(6, 4)[:, ::2]
        fleet.all_gather(strided, torch.full((2, 2), float(fleet.rank)))
        assert strided[:, 0].tolist() == [0, 0, 1, 1, 2, 2]

    run_fleets(3, body)


def test_broadcast_barrier_and_statistics(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> torch.Tensor:
        tensor = torch.full((3, 2), fleet.rank, dtype=torch.bool).t()
        fleet.broadcast(tensor, root=1)
        fleet.barrier()
        assert fleet.statistics().fabric.rank == fleet.rank
        return tensor

    assert all(result.all() for result in run_fleets(3, body))


def test_a_barrier_joins_what_is_under_way(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        tensors = [torch.ones(4, 2)[:, 0] for _ in range(8)]
        for tensor in tensors:
            fleet.all_reduce(tensor, async_op=True)
        fleet.barrier()
        assert all(tensor.eq(3).all() for tensor in tensors)

    run_fleets(3, body)


def test_what_makes_no_sense_is_refused(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        with pytest.raises(ConfigurationError, match="mean"):
            fleet.all_reduce(torch.ones(2, dtype=torch.int32), op="mean")
        with pytest.raises(ConfigurationError, match="cannot be summed"):
            fleet.all_reduce(torch.ones(2, dtype=torch.bool))
        with pytest.raises(ConfigurationError, match="op must be"):
            fleet.all_reduce(torch.ones(2), op="median")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="no order"):
            fleet.all_reduce(torch.ones(2, dtype=torch.complex64), op="max")
        with pytest.raises(ConfigurationError, match="has no weights"):
            fleet.all_reduce(torch.ones(2), op="min", weight=2.0)
        with pytest.raises(ConfigurationError, match="convert the tensor to a float type"):
            fleet.all_reduce(torch.ones(2, dtype=torch.int32), weight=0.5)
        with pytest.raises(ConfigurationError, match="dst"):
            fleet.gather(torch.ones(3), dst=2)
        with pytest.raises(ConfigurationError, match="dst"):
            fleet.reduce(torch.ones(3), dst=-1)
        with pytest.raises(ConfigurationError, match="all_gather"):
            fleet.all_gather(torch.ones(3), torch.ones(2))
        with pytest.raises(ConfigurationError, match="root"):
            fleet.broadcast(torch.ones(3), root=2)

    run_fleets(2, body)


@pytest.mark.parametrize("is_in_shared_memory", [False, True])
def test_a_rank_that_ends_with_the_error_lets_the_others_read_it(is_in_shared_memory: bool, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        if is_in_shared_memory:
            fleet.communicator.open_segment()
        fleet.gather(torch.ones(2), dst=int(fleet.rank == 0))
        fleet.barrier()

    assert {type(error) for error in run_fleets(3, body, accept=SynclineError)} == {MismatchError}
