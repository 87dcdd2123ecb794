"""What stands beside a measured time: the wire's bound, and what the cost model predicts."""

from __future__ import annotations

import os

from syncline import Fleet
from syncline.schedule import Collective, CostModel, Schedule, lower_bound, predict
from syncline.schedule.ownership import Target
from syncline.schedule.sharded_step import plan_sharded_step, predict_sharded_step


def wire_bound_s(fleet: Fleet, collective: Collective, num_bytes: int, *, target: Target = "balanced") -> float:
    """Return the least seconds on this topology's links, at what TCP/IP and Ethernet headers leave of their rates."""
    return lower_bound(fleet.topology, collective, num_bytes, target=target) / CostModel().payload_share


def predicted_s(fleet: Fleet, schedule: Schedule, num_bytes: int) -> float:
    """Return what ``predict`` says of ``schedule`` in the runtime's slices, on this machine's processors.

    An all-reduce begins with small slices. Where parts are contiguous, slices are windows on the owners' parts, and one
    round of them is as large as a slice.
    """
    is_ramped = schedule.collective is Collective.ALL_REDUCE
    return predict(
        schedule,
        fleet.topology,
        num_bytes,
        fleet.communicator.slice_bytes,
        first_slice_bytes=fleet.communicator.layout(schedule, num_bytes, 1).slices[0][-1] if is_ramped else None,
        cost=_cost(),
    ).time_s


def predicted_step_s(fleet: Fleet, num_bytes: int) -> float:
    """Return what the model says of the two halves of a sharded step, on this machine's processors."""
    slice_bytes = fleet.communicator.slice_bytes
    step = plan_sharded_step(fleet.topology, num_bytes, slice_bytes=slice_bytes)
    return predict_sharded_step(step, fleet.topology, num_bytes, slice_bytes, cost=_cost()).time_s


def _cost() -> CostModel:
    return CostModel.of_emulated_network(len(os.sched_getaffinity(0)))
