"""``syncline plan --model``: which parameters go on which connection class, and what that is worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from syncline.priorities.forward_timing import (
    ForwardPrediction,
    ForwardProfile,
    assumed_issue_s,
    divide_by_proportions,
    predict_forward,
    search_classes,
)
from syncline.priorities.settings import Priorities
from syncline.report.terminal import new_table
from syncline.runtime.plans import Plans
from syncline.schedule import Collective, predict
from syncline.topology import Topology
from syncline.units import format_duration, format_rate, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPlan:
    """A model's layers on a topology, and the forward pass under each way to divide them."""

    names: tuple[str, ...]
    profile: ForwardProfile
    chosen: ForwardPrediction
    times_s: dict[str, float]
    """The forward pass with one class, equal and geometric proportions, and as searched."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures for programs."""
        return asdict(self)


def plan_classes(
    topology: Topology, names: tuple[str, ...], num_bytes: tuple[int, ...], forward_s: tuple[float, ...]
) -> ClassPlan:
    """Search the classes of a model that nobody has trained yet on this topology.

    The transfer rate is the predicted all-gather's of all bytes; times of issue are those that the model assumes.
    """
    priorities = topology.priorities or Priorities()
    total = max(1, sum(num_bytes))
    plans = Plans(topology, slice_bytes=None)
    schedule = plans.schedule(Collective.ALL_GATHER, total)
    bytes_per_s = total / max(predict(schedule, topology, total, plans.slice_bytes).time_s, 1e-9)
    profile = ForwardProfile(
        num_bytes=num_bytes,
        forward_s=forward_s,
        issued_s=assumed_issue_s(num_bytes, forward_s, bytes_per_s),
        bytes_per_s=bytes_per_s,
        backlog_bytes=plans.inflight_bytes,
    )
    number = priorities.num_classes
    divisions = {"one class": (1.0,)} | {
        name: Priorities(num_classes=number, search=name).proportions for name in ("equal", "geometric")
    }
    fixed = {
        name: predict_forward(profile, divide_by_proportions(num_bytes, shares)) for name, shares in divisions.items()
    }
    found = search_classes(profile, number)
    seconds = {name: prediction.time_s for name, prediction in fixed.items()} | {"searched": found.time_s}
    return ClassPlan(names=names, profile=profile, chosen=found, times_s=seconds)


def show_classes(plan: ClassPlan, console: Console) -> None:
    """Print the layers, and the forward pass under each division."""
    table = new_table("bucket, by its first parameter", "bytes", "forward", "class", "arrives")
    rows = zip(
        plan.names,
        plan.profile.num_bytes,
        plan.profile.forward_s,
        plan.chosen.classes,
        plan.chosen.arrivals_s,
        strict=True,
    )
    for name, size, seconds, number, arrival_s in rows:
        table.add_row(name, format_size(size), format_duration(seconds), str(number), format_duration(arrival_s))
    console.print(table)
    console.print(
        f"all-gather at {format_rate(plan.profile.bytes_per_s)}, times counted from the end of the backward pass"
    )
    one_s = plan.times_s["one class"]
    for name, seconds in plan.times_s.items():
        gain = f", {1 - seconds / one_s:.1%} less than one class" if seconds < one_s else ""
        console.print(f"  {name:10} forward pass {format_duration(seconds)}{gain}")
