"""What is measured of a method, and what stands beside it: times in rounds, bytes on links, the bound, a prediction.

In a round every method has its turn, with a barrier before each, and the time of the slowest rank counts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import get_args

import torch
import torch.distributed as dist

from syncline import Fleet
from syncline.bench.rows import Carried
from syncline.bench.task import Pace, Tally
from syncline.lab import Lab
from syncline.lab.records import find_record
from syncline.schedule import Collective, CostModel, Schedule, lower_bound, predict
from syncline.schedule.ownership import Target
from syncline.schedule.sharded_step import plan_sharded_step, predict_sharded_step
from syncline.topology import DirectedLink, Direction
from syncline.variables import process_variables

Timed = Callable[[], float]
"""Does the work once and returns the seconds that this rank needed."""
NOTEWORTHY_S = 2.0
"""A round that takes longer is told, so that who waits sees that it goes on, and what a broken-off benchmark saw."""


def measure_rounds(methods: Mapping[str, Timed], *, pace: Pace) -> dict[str, tuple[float, ...]]:
    """Return, for each method, the slowest rank's seconds in each round that counts.

    The methods take turns within each round, so that whatever else the machine does befalls them alike. After each the
    ranks tell each other their times, so that all agree on who needs another.
    """
    tallies = {name: Tally(pace) for name in methods}
    while due := [name for name, tally in tallies.items() if tally.wants_more]:
        begin, measured = time.perf_counter(), []
        for name in due:
            dist.barrier()
            start = time.perf_counter()
            measured_s = methods[name]()
            slowest = torch.tensor([measured_s, time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            measured_s, elapsed_s = slowest.tolist()
            tallies[name].add(measured_s, elapsed_s=elapsed_s)
            measured.append(f"{name} {measured_s:.3g} s")
        if dist.get_rank() == 0 and time.perf_counter() - begin > NOTEWORTHY_S:
            print(f"bench: a round: {', '.join(measured)}", file=sys.stderr, flush=True)
    return {name: tuple(tally.seconds) for name, tally in tallies.items()}


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


class LinkMeter:
    """Counts bytes per link, headers included; nothing outside the lab, and on other ranks than 0."""

    def __init__(self, rank: int) -> None:
        lab_id = process_variables().get("SYNCLINE_LAB")
        self._lab = Lab.attach(find_record(lab_id)) if lab_id and rank == 0 else None
        links = () if self._lab is None else self._lab.plan.links
        self._host_links = {DirectedLink(each.child, "up") for each in links if each.lower_bridge is None}
        self._rates = {
            DirectedLink(each.child, way): each.link.bytes_per_s(way) for each in links for way in get_args(Direction)
        }

    def measure(self, run: Callable[[], object]) -> Carried:
        """Run it once, on all ranks; return what the links carried for it."""
        dist.barrier()
        before, lost_before = self._read(), self._count_lost()
        dist.barrier()
        run()
        dist.barrier()
        after, lost = self._read(), self._count_lost()
        carried = {link: count - before[link] for link, count in after.items()}
        busiest_first = sorted(carried, key=lambda link: carried[link] / self._rates[link], reverse=True)
        return Carried(
            link_bytes={f"{link.child} {link.direction}": carried[link] for link in busiest_first},
            sent_bytes=sum(count for link, count in carried.items() if link in self._host_links),
            num_dropped=lost[0] - lost_before[0],
            num_resent=lost[1] - lost_before[1],
        )

    def _read(self) -> dict[DirectedLink, int]:
        return {} if self._lab is None else self._lab.link_bytes()

    def _count_lost(self) -> tuple[int, int]:
        if self._lab is None:
            return 0, 0
        return sum(self._lab.dropped_packets().values()), self._lab.resent_segments()
