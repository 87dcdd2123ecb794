"""Collectives on tensors of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.errors import ConfigurationError
from syncline.pytorch.fleet import Fleet

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 3)])
def test_sum_of_any_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...], run_fleets: Any) -> None:
    def body(fleet: Fleet) -> torch.Tensor:
        tensor = torch.full(shape, fleet.rank + 1).to(dtype)
        fleet.all_reduce(tensor)
        return tensor

    for result in run_fleets(3, body):
        assert torch.equal(result, torch.full(shape, 6).to(dtype))


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


def test_what_makes_no_sense_is_refused(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        with pytest.raises(ConfigurationError, match="mean"):
            fleet.all_reduce(torch.ones(2, dtype=torch.int32), op="mean")
        with pytest.raises(ConfigurationError, match="cannot be summed"):
            fleet.all_reduce(torch.ones(2, dtype=torch.bool))
        with pytest.raises(ConfigurationError, match="op must be"):
            fleet.all_reduce(torch.ones(2), op="max")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="all_gather"):
            fleet.all_gather(torch.ones(3), torch.ones(2))
        with pytest.raises(ConfigurationError, match="root"):
            fleet.broadcast(torch.ones(3), root=2)

    run_fleets(2, body)
