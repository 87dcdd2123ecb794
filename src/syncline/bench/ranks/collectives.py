"""Collectives of float32 tensors: Syncline's choice, planners by name for an all-reduce, and gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist

from syncline import Fleet
from syncline.bench.ranks.timing import LinkMeter, Timed, measure_rounds, predicted_s, wire_bound_s
from syncline.bench.rows import Row
from syncline.bench.task import CollectiveName, Task
from syncline.errors import MismatchError
from syncline.schedule import PLANNERS, Collective, Schedule
from syncline.schedule.ownership import Target
from syncline.tensors.memory import summands_of

CHOSEN = "Syncline"

Run = Callable[[torch.Tensor, torch.Tensor], object]
"""Works on the whole tensor and on this rank's part of it, of which one is the source and the other the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A collective, and how this library and gloo are asked for it."""

    collective: Collective
    target: Target
    """Who must own what: PyTorch's collectives of equal chunks want them in rank order."""
    ours: Callable[[Fleet], Run]
    gloo: Run


SUBJECTS: Mapping[CollectiveName, Subject] = MappingProxyType(
    {
        "all-reduce": Subject(
            collective=Collective.ALL_REDUCE,
            target="balanced",
            ours=lambda fleet: lambda whole, _: fleet.all_reduce(whole),
            gloo=lambda whole, _: dist.all_reduce(whole),
        ),
        "reduce-scatter": Subject(
            collective=Collective.REDUCE_SCATTER,
            target="rank_order",
            ours=lambda fleet: lambda whole, part: fleet.reduce_scatter(part, whole),
            gloo=lambda whole, part: dist.reduce_scatter_tensor(part, whole),
        ),
        "all-gather": Subject(
            collective=Collective.ALL_GATHER,
            target="rank_order",
            ours=lambda fleet: fleet.all_gather,
            gloo=dist.all_gather_into_tensor,
        ),
    }
)


def measure_collectives(task: Task, fleet: Fleet) -> Iterator[list[Row]]:
    """Measure every collective in every size, one after the other; the rows are complete on rank 0."""
    meter = LinkMeter(fleet.rank)
    for name in task.collectives:
        for size in task.sizes_bytes:
            yield _measure(task, fleet, meter, name, size)


def _measure(task: Task, fleet: Fleet, meter: LinkMeter, name: CollectiveName, size_bytes: int) -> list[Row]:
    subject = SUBJECTS[name]
    whole = torch.empty(max(1, size_bytes // 4 // fleet.world_size) * fleet.world_size)
    part = torch.empty(whole.numel() // fleet.world_size)
    num_bytes = 4 * whole.numel()
    chosen = fleet.communicator.plan(subject.collective, num_bytes, target=subject.target)
    named = _named_schedules(task, fleet, name)
    methods: dict[str, Run] = {CHOSEN: subject.ours(fleet)}
    methods |= {method: partial(_reduce_by, fleet, schedule) for method, schedule in named.items()}
    methods |= dict.fromkeys(task.peers, subject.gloo)
    carried = {
        method: meter.measure(partial(_check, f"{name} by {method}", run, whole, part, fleet))
        for method, run in methods.items()
    }
    whole.zero_()  # its sums stay finite in any number of rounds
    part.zero_()
    timed: dict[str, Timed] = {method: partial(_time, run, whole, part) for method, run in methods.items()}
    seconds = measure_rounds(timed, pace=task.pace)
    schedules = {CHOSEN: chosen, **named}
    bound_s = wire_bound_s(fleet, subject.collective, num_bytes, target=subject.target)
    return [
        Row(
            subject=name,
            size_bytes=num_bytes,
            method=method,
            times_s=seconds[method],
            bound_s=bound_s,
            predicted_s=predicted_s(fleet, schedules[method], num_bytes) if method in schedules else None,
            planner=chosen.planner if method == CHOSEN else "",
            **asdict(carried[method]),
        )
        for method in methods
    ]


def _named_schedules(task: Task, fleet: Fleet, name: CollectiveName) -> dict[str, Schedule]:
    if name != "all-reduce":
        return {}
    return {f"{CHOSEN} {each}": PLANNERS[each].plan(fleet.topology, Collective.ALL_REDUCE) for each in task.planners}


def _time(run: Run, whole: torch.Tensor, part: torch.Tensor) -> float:
    start = time.perf_counter()
    run(whole, part)
    return time.perf_counter() - start


def _check(name: str, run: Run, whole: torch.Tensor, part: torch.Tensor, fleet: Fleet) -> None:
    """Raise if the result is wrong: then the method has no speed. One that only gathers is given the sums."""
    total = fleet.world_size * (fleet.world_size + 1) / 2
    whole.fill_(fleet.rank + 1)
    part.fill_(total)
    run(whole, part)
    result = part if name.startswith("reduce-scatter") else whole
    if not bool((result == total).all()):
        raise MismatchError(f"{name} must give {total:g} everywhere; rank {fleet.rank} got {result}")


def _reduce_by(fleet: Fleet, schedule: Schedule, whole: torch.Tensor, _: torch.Tensor) -> None:
    """All-reduce by this schedule, in slices as the runtime would cut them."""
    label = f"all_reduce by {schedule.planner}"
    fleet.communicator.start(schedule, *summands_of(whole), label=label).wait()
