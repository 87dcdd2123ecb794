"""``syncline plan --collective sharded_step --replicate``: what each choice of replicas moves when, and who owns it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from syncline.cli.step_plan import Portions
from syncline.schedule import Prediction
from syncline.schedule.cost import predicted_slice_bytes
from syncline.schedule.replicas import Replicas, Replicate, find_replicas, levels_of
from syncline.schedule.replicated_step import ReplicaStep, choose_replicas, draft_replicas
from syncline.topology import Topology
from syncline.units import format_duration, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaResult:
    """One choice of replicas in figures."""

    name: str
    replicas: Replicas
    within: Prediction
    """Of what may run under the backward pass: the reduction to an owner in each replica."""
    after: Prediction
    """Of what follows the step: the all-gather inside each replica."""
    shares: tuple[float, ...]
    """The part of the data that each rank owns; they sum to the number of replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """What was compared for a sharded step with replicas, and which of it is taken."""

    topology: Topology
    num_bytes: int
    chosen: Replicas
    results: tuple[ReplicaResult, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "topology": self.topology.name,
            "num_ranks": self.topology.num_ranks,
            "collective": "sharded_step",
            "num_bytes": self.num_bytes,
            "replicas": self.chosen,
            "choices": [
                {
                    "name": result.name,
                    "replicas": result.replicas,
                    "under_backward_s": result.within.time_s,
                    "after_step_s": result.after.time_s,
                    "shares": result.shares,
                }
                for result in self.results
            ],
        }


def parse_replicate(text: str) -> Replicate:
    """Return what ``--replicate`` says: ``host``, ``auto``, a level, or names with commas between them."""
    if text in ("host", "auto"):
        return text
    return int(text) if text.isdecimal() else tuple(name.strip() for name in text.split(","))


def plan_replicas(
    topology: Topology, num_bytes: int, replicate: Replicate, portions: Portions = "balanced"
) -> ReplicaPlan:
    """Compare all levels of the topology as replicas, and what is asked for, for a step of ``num_bytes``.

    Raises :class:`~syncline.errors.TopologyError` for what is no choice of replicas.
    """
    slice_bytes = predicted_slice_bytes(topology)
    asked = None if replicate == "auto" else find_replicas(topology, replicate)
    chosen = asked or choose_replicas(topology, num_bytes, portions=portions, slice_bytes=slice_bytes).replicas
    choices = {
        "none" if len(replicas) == 1 else f"level {_level_of(replicas, topology)}": replicas
        for replicas in levels_of(topology)
        if max(map(len, replicas)) > 1
    }
    if chosen not in choices.values():
        choices["as asked"] = chosen
    results = [
        _result(name, draft_replicas(topology, num_bytes, replicas, portions=portions, slice_bytes=slice_bytes))
        for name, replicas in choices.items()
    ]
    return ReplicaPlan(topology=topology, num_bytes=num_bytes, chosen=chosen, results=tuple(results))


def _level_of(replicas: Replicas, topology: Topology) -> int:
    """Return the first level with these replicas: a switch with one child divides as what is below it."""
    return next(level for level in count() if find_replicas(topology, level) == replicas)


def _result(name: str, step: ReplicaStep) -> ReplicaResult:
    return ReplicaResult(name=name, replicas=step.replicas, within=step.within, after=step.after, shares=step.shares)


def show_replicas(plan: ReplicaPlan, console: Console) -> None:
    """Print what each choice moves when, and how much of the state its ranks keep."""
    console.print(
        f"[bold]sharded step[/] of {format_size(plan.num_bytes)} among {plan.topology.num_ranks} ranks with replicas: "
        "gradients are summed under the backward pass, and after the step each replica gathers inside itself\n"
    )
    console.print(choice_table(plan))


def choice_table(plan: ReplicaPlan) -> Table:
    """Lay out one row for each choice of replicas, the chosen one marked."""
    caption = (
        "most owned: of the optimizer's state, by one rank; the prediction leaves out what the backward pass hides"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=caption)
    table.add_column("replicas", no_wrap=True)
    for heading in ("ranks of each", "under backward", "after step", "both", "most owned"):
        table.add_column(heading, justify="right")
    for result in plan.results:
        is_chosen = result.replicas == plan.chosen
        seconds = (result.within.time_s, result.after.time_s, result.within.time_s + result.after.time_s)
        table.add_row(
            f"{result.name}{' (chosen)' if is_chosen else ''}",
            ", ".join(str(len(ranks)) for ranks in result.replicas),
            *(format_duration(each) for each in seconds),
            f"{max(result.shares):.1%}",
            style="bold green" if is_chosen else "",
        )
    return table
