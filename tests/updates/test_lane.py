"""How buckets are cut, without a network."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.schedule import Collective, Schedule, plan_tree
from syncline.topology import Topology
from syncline.updates.bucket import BucketPlan, ParameterEntry, plan_buckets
from syncline.updates.lane import LaneOptions, plan_lanes

TOPOLOGY = Topology.flat(3, rate=1e9)


class Planner:
    """Stands for a communicator."""

    def __init__(self, *, slice_bytes: int = 1000) -> None:
        self.rank, self.topology, self.slice_bytes = 0, TOPOLOGY, slice_bytes

    def plan(self, collective: Collective, _: int) -> Schedule:
        return plan_tree(TOPOLOGY, collective)


def plans(*num_elements: int) -> tuple[BucketPlan, ...]:
    """Return a bucket for each number."""
    cpu = torch.device("cpu")
    entries = [
        ParameterEntry(name="p", group=0, shape=(number,), stride=(1,), dtype=torch.float32, device=cpu)
        for number in num_elements
    ]
    return plan_buckets(entries, bucket_bytes=4)


@pytest.mark.parametrize("is_divided", [True, False])
def test_a_bucket_has_as_many_slices_as_come_nearest_to_the_wanted_size(is_divided: bool) -> None:
    communicator: Any = Planner(slice_bytes=1000)
    lanes = plan_lanes(
        communicator, plans(10, 250, 270, 370, 380, 630, 5000), LaneOptions(is_divided=is_divided), first_stream=1
    )
    assert [len(lane.layout.slices) for lane in lanes] == [1, 1, 1, 1, 2, 3, 20]


def test_a_size_that_the_user_wants_goes_before_the_runtime_s() -> None:
    communicator: Any = Planner(slice_bytes=1000)
    options = LaneOptions(is_divided=True, slice_bytes=400)
    (lane,) = plan_lanes(communicator, plans(330), options, first_stream=1)
    assert [4 * (offsets[-1] - offsets[0]) for offsets in lane.layout.slices] == [440, 440, 440]
