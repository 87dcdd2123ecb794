"""Collectives of fleets that have a segment: the tensors of those that have none, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.pytorch.fleet import Fleet
from syncline.runtime.shared_memory.opening import can_share

pytestmark = pytest.mark.skipif(not can_share(2), reason="this platform has no segment")

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", KINDS)
def test_every_call_has_the_bits_of_the_engine(dtype: torch.dtype, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> tuple[list[torch.Tensor], int]:
        source = torch.Generator().manual_seed(fleet.rank)
        results: list[torch.Tensor] = []
        for size in (0, 1, 5, 1001):
            whole = (torch.randn(3 * size, generator=source) * 50).abs().to(dtype)
            results += [_reduced(fleet, whole, op="sum"), *_scattered_and_gathered(fleet, whole)]
            if dtype.is_floating_point:
                results.append(_reduced(fleet, whole, op="mean"))
                results.append(_reduced(fleet, whole, op="mean", weight=fleet.rank + 0.5))
        fleet.barrier()
        return results, fleet.statistics().calls["all_reduce"]

    def with_shared_memory(fleet: Fleet) -> tuple[list[torch.Tensor], int]:
        assert fleet.communicator.open_segment()
        return body(fleet)

    for (ours, num_ours), (theirs, num_theirs) in zip(
        run_fleets(3, with_shared_memory), run_fleets(3, body), strict=True
    ):
        assert num_ours == num_theirs + 2, "two to agree over shared memory"
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _reduced(fleet: Fleet, whole: torch.Tensor, **settings: Any) -> torch.Tensor:
    tensor = whole.clone()
    fleet.all_reduce(tensor, **settings)
    return tensor


def _scattered_and_gathered(fleet: Fleet, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    before = whole.clone()
    part, gathered, sent = torch.empty_like(whole[: len(whole) // 3]), torch.empty_like(whole), whole.clone()
    fleet.reduce_scatter(part, whole)
    assert torch.equal(whole, before), "the input stays as it is"
    fleet.all_gather(gathered, part)
    fleet.broadcast(sent, root=2)
    return part, gathered, sent
