"""All-reduce of float32 tensors in place: Syncline's choice, planners by name, and gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from syncline import Fleet
from syncline.bench.ranks.link_meter import LinkMeter
from syncline.bench.ranks.timing import Timed, measure_rounds
from syncline.bench.rows import Row
from syncline.bench.task import Task
from syncline.errors import MismatchError
from syncline.runtime.call import CollectiveCall
from syncline.runtime.communicator import DEFAULT_SLICE_BYTES
from syncline.schedule import PLANNERS, Collective, Layout, Schedule, lower_bound, predict
from syncline.updates.memory import bytes_of, reduction_for

CHOSEN = "Syncline"

Reduce = Callable[[torch.Tensor], object]


def measure_collectives(task: Task, fleet: Fleet) -> list[Row]:
    """Measure every size; the rows are complete on rank 0."""
    meter = LinkMeter(fleet.rank)
    return [row for size in task.sizes_bytes for row in _measure_size(task, fleet, meter, size // 4)]


def _measure_size(task: Task, fleet: Fleet, meter: LinkMeter, num_elements: int) -> list[Row]:
    num_bytes = 4 * num_elements
    chosen = fleet.communicator.plan(Collective.ALL_REDUCE, num_bytes)
    named = {f"{CHOSEN} {name}": PLANNERS[name].plan(fleet.topology, Collective.ALL_REDUCE) for name in task.planners}
    methods: dict[str, Reduce] = {CHOSEN: fleet.all_reduce}
    methods |= {name: partial(_reduce_by, fleet, schedule) for name, schedule in named.items()}
    methods |= dict.fromkeys(task.peers, dist.all_reduce)
    tensor = torch.empty(num_elements)
    for name, reduce in methods.items():
        _check(name, reduce, tensor, fleet)
    tensor.zero_()  # its sums stay finite in any number of rounds
    timed: dict[str, Timed] = {name: partial(_time, reduce, tensor) for name, reduce in methods.items()}
    seconds = measure_rounds(timed, num_rounds=task.num_rounds, num_warm_ups=task.num_warm_ups)
    link_bytes = {name: meter.measure(partial(reduce, tensor)) for name, reduce in methods.items()}
    schedules = {CHOSEN: chosen, **named}
    return [
        Row(
            subject="all-reduce",
            order=task.order,
            size_bytes=num_bytes,
            method=name,
            seconds=seconds[name],
            bound_s=lower_bound(fleet.topology, Collective.ALL_REDUCE, num_bytes),
            predicted_s=_predict(schedules.get(name), fleet, num_bytes),
            planner=chosen.planner if name == CHOSEN else "",
            link_bytes=link_bytes[name],
        )
        for name in methods
    ]


def _time(reduce: Reduce, tensor: torch.Tensor) -> float:
    start = time.perf_counter()
    reduce(tensor)
    return time.perf_counter() - start


def _check(name: str, reduce: Reduce, tensor: torch.Tensor, fleet: Fleet) -> None:
    """Raise if the sums are wrong: then the method has no speed."""
    tensor.fill_(fleet.rank + 1)
    reduce(tensor)
    expected = fleet.world_size * (fleet.world_size + 1) / 2
    if not bool((tensor == expected).all()):
        raise MismatchError(f"all-reduce by {name} must give {expected:g} everywhere; rank {fleet.rank} got {tensor}")


def _reduce_by(fleet: Fleet, schedule: Schedule, tensor: torch.Tensor) -> None:
    """All-reduce by this schedule, in slices as the runtime would cut them."""
    reduction = reduction_for(tensor.dtype)
    call = CollectiveCall(
        stream=0,
        schedule=schedule,
        layout=Layout.build(schedule, tensor.numel(), DEFAULT_SLICE_BYTES // reduction.itemsize),
        buffer=bytes_of(tensor),
        reduction=reduction,
        label=f"all_reduce by {schedule.planner}",
        timeout_s=fleet.timeout_s,
    )
    fleet.communicator.submit(call).wait()


def _predict(schedule: Schedule | None, fleet: Fleet, num_bytes: int) -> float | None:
    if schedule is None:
        return None
    return predict(schedule, fleet.topology, num_bytes, DEFAULT_SLICE_BYTES).seconds
