"""``syncline plan --collective sharded_step``: reduce-scatter and all-gather with the same owners, who own what.

With ``--replicate``: what each choice of replicas moves when, and who owns it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from syncline.errors import ConfigurationError
from syncline.report.terminal import new_table
from syncline.schedule import Draft, Schedule, StepPrediction, sharded_step_bound, verify
from syncline.schedule.cost import predicted_slice_bytes
from syncline.schedule.levelled_step import Known
from syncline.schedule.outline import Outline
from syncline.schedule.replicas import Replicas, Replicate, find_replicas, levels_of
from syncline.schedule.replicated_step import ReplicaStep, choose_replicas, draft_replicas
from syncline.schedule.spares import Apart, draft_with_spares, spare_shares
from syncline.schedule.step_candidates import BALANCED, MANY_RANKS, Candidate, Cap, compare_caps
from syncline.schedule.verifier import verify_outline
from syncline.topology import Topology
from syncline.units import format_duration, format_size

WHOLE = "whole: all ranks, and all data"
Portions = Literal["balanced", "fastest"] | Cap
PAYS_FROM = 0.95
"""Both directions at once are worth it if they take no more than this part of the time."""
CAPS = (1.0, 1.25, 2.0, None)
"""Of which it is shown what each costs; None is no cap."""
MAX_ROWS = 48
"""Of the table of shares; --json has all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparePlan:
    """The chosen step with spares: what they are apart by, what each rank is the spare of, and how long it takes."""

    apart: Apart
    shares: tuple[float, ...]
    prediction: StepPrediction

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "apart": self.apart,
            "shares": list(self.shares),
            "reduce_scatter_s": self.prediction.reduce_scatter.time_s,
            "all_gather_s": self.prediction.all_gather.time_s,
            "time_s": self.prediction.time_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What was compared for a sharded step, the chosen one first, and the share of each rank in that one."""

    topology: Topology
    portions: Portions
    num_bytes: int
    bound_s: float
    capped_bound_s: float
    """The bound if no rank may own more than the one that owns most."""
    shares: tuple[float, ...]
    proof: str
    """How the chosen one is verified."""
    candidates: Sequence[Candidate]
    caps: Sequence[tuple[Cap | None, Candidate]]
    """The fastest step where no rank owns more than so many equal shares."""
    spares: SparePlan | None = None

    @property
    def overlap_pays(self) -> bool:
        """Whether it is worth it to update each bucket in the backward pass, as soon as it is reduced."""
        _, prediction = self.candidates[0]
        return prediction.time_s > 0 and prediction.overlapped_s <= PAYS_FROM * prediction.time_s

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        planners = [_candidate_json(candidate, self.bound_s) for candidate in self.candidates]
        return {
            "topology": self.topology.name,
            "num_ranks": self.topology.num_ranks,
            "collective": "sharded_step",
            "portions": self.portions,
            "num_bytes": self.num_bytes,
            "bound_s": self.bound_s,
            "capped_bound_s": self.capped_bound_s,
            "shares": list(self.shares),
            "step_in_backward_pays": self.overlap_pays,
            "winner": planners[0]["planner"],
            "verified": self.proof,
            "spares": self.spares.to_json() if self.spares is not None else None,
            "planners": planners,
            "caps": [
                {"cap": cap, "time_s": prediction.time_s, "most_owned": max(scatter.shares)}
                for cap, ((scatter, _), prediction) in self.caps
            ],
        }


def parse_portions(text: str) -> Portions:
    """Return what ``--portions`` says."""
    if text == "balanced":
        return "balanced"
    if text == "fastest":
        return "fastest"
    try:
        cap = float(text)
    except ValueError:
        cap = math.nan
    if not 1 <= cap < math.inf:
        raise ConfigurationError(
            f"--portions is balanced, fastest, or how many times its equal share a rank may own at most (1 or more), "
            f"not {text!r}"
        )
    return cap


def prove(*plans: Draft | Outline) -> str:
    """Verify what is not verified yet, and say how; of several plans, which divide the data alike, as of one."""
    said = ""
    for plan in plans:
        said = WHOLE
        if isinstance(plan, Outline):
            said = verify_outline(plan)
        elif not isinstance(plan, Schedule):
            verify(plan)
    return said


def plan_step(topology: Topology, num_bytes: int, portions: Portions, *, spares: int = 0) -> StepPlan:
    """Compare the candidates for a sharded step of ``num_bytes``."""
    slice_bytes, known = predicted_slice_bytes(topology), Known()
    caps = CAPS if topology.num_ranks <= MANY_RANKS else CAPS[1::2]
    ((scatter, gather), prediction), apart, candidates = draft_with_spares(
        topology, num_bytes, portions=portions, spares=spares, slice_bytes=slice_bytes, known=known
    )
    shares = scatter.shares
    of_spares = None
    if apart is not None and isinstance(scatter, Draft):
        of_spares = SparePlan(apart=apart, shares=spare_shares(scatter), prediction=prediction)
    return StepPlan(
        topology=topology,
        portions=portions,
        num_bytes=num_bytes,
        bound_s=sharded_step_bound(topology, num_bytes),
        capped_bound_s=sharded_step_bound(topology, num_bytes, most=[max(shares)] * topology.num_ranks),
        shares=shares,
        proof=prove(scatter, gather),
        spares=of_spares,
        caps=compare_caps(topology, num_bytes, caps, slice_bytes, known=known),
        candidates=candidates,
    )


def _candidate_json(candidate: Candidate, bound_s: float) -> dict[str, Any]:
    (scatter, gather), prediction = candidate
    return {
        "planner": scatter.planner,
        "reduce_scatter_s": prediction.reduce_scatter.time_s,
        "all_gather_s": prediction.all_gather.time_s,
        "time_s": prediction.time_s,
        "overlapped_s": prediction.overlapped_s,
        "ratio": prediction.time_s / bound_s if bound_s > 0 else None,
        "num_atoms": scatter.num_atoms,
        "num_steps": scatter.num_steps + gather.num_steps,
        "num_messages": scatter.num_messages + gather.num_messages,
        "most_owned": max(scatter.shares),
    }


def show_step(plan: StepPlan, console: Console) -> None:
    """Print the candidates, who owns what, and when both directions at once pay."""
    (winner, _), first = plan.candidates[0]
    size, bounds = format_size(plan.num_bytes), (format_duration(plan.bound_s), format_duration(plan.capped_bound_s))
    most = _percent(max(plan.shares), plan)
    limit = f"can take no less than [bold]{bounds[0]}[/], or {bounds[1]} where nobody owns more than {most}"
    console.print(
        f"[bold]sharded step[/] of {size} among {plan.topology.num_ranks} ranks, portions {plan.portions}: a "
        f"reduce-scatter (RS) and then an all-gather (AG) {limit if plan.bound_s else 'are limited by no link'}\n"
    )
    console.print(candidate_table(plan))
    console.print(f"{winner.planner} is verified {plan.proof}\n")
    console.print(share_table(plan))
    console.print(cap_table(plan))
    if plan.spares is not None:
        time_s, more = plan.spares.prediction.time_s, plan.spares.prediction.time_s / first.time_s - 1
        console.print(
            f"spares in another {plan.spares.apart}: {format_duration(time_s)} one after the other, {more:+.1%} of "
            f"what {winner.planner} takes without them"
        )
    if not first.time_s:
        return
    verdict = "pays" if plan.overlap_pays else "gains little"
    console.print(
        f"step_in_backward {verdict}: {format_duration(first.overlapped_s)} with both directions at once, "
        f"{format_duration(first.time_s)} one after the other"
    )


def candidate_table(plan: StepPlan) -> Table:
    """Lay out one row for each candidate, the winner first."""
    headings = ("planner", "RS", "AG", "both", "x bound", "messages", "most owned")
    table = new_table(*headings, padding=(0, 1, 0, 0))
    for (scatter, gather), prediction in plan.candidates:
        is_winner = prediction is plan.candidates[0][1]
        halves = (prediction.reduce_scatter.time_s, prediction.all_gather.time_s, prediction.time_s)
        table.add_row(
            f"{scatter.planner}{' (wins)' if is_winner else ''}",
            *(format_duration(seconds) for seconds in halves),
            f"{prediction.time_s / plan.bound_s:.2f}" if plan.bound_s > 0 else "-",
            f"{scatter.num_messages + gather.num_messages:,}",
            _percent(max(scatter.shares), plan),
            style="bold green" if is_winner else "",
        )
    return table


def cap_table(plan: StepPlan) -> Table:
    """Lay out what each cap costs, beside the default and no cap."""
    caption = f"a cap is in equal shares; balanced portions keep to {BALANCED:g} where that costs up to 10 %"
    headings = ("portions", "both", "longer by", "most owned")
    table = new_table(*headings, title="What caps cost", caption=caption)
    least_s = min(prediction.time_s for _, (_, prediction) in plan.caps)
    for cap, ((scatter, _), prediction) in plan.caps:
        name = "fastest" if cap is None else f"{cap:g}"
        longer = f"{prediction.time_s / least_s - 1:.1%}" if least_s else "-"
        table.add_row(name, format_duration(prediction.time_s), longer, _percent(max(scatter.shares), plan))
    return table


def _percent(part: float, plan: StepPlan) -> str:
    return f"{part:.{_digits(plan)}%}"


def _digits(plan: StepPlan) -> int:
    """Return how many places behind the point a part in per cent has: two that count, of an equal one."""
    return max(1, len(str(plan.topology.num_ranks)) - 1)


def share_table(plan: StepPlan) -> Table:
    """Lay out what each host owns, neighbours that own the same in one row."""
    digits, spares = _digits(plan), plan.spares.shares if plan.spares is not None else (0.0,) * len(plan.shares)
    rows = [
        (
            tuple(round(100 * plan.shares[rank.rank], digits) for rank in host.ranks),
            tuple(round(100 * spares[rank.rank], digits) for rank in host.ranks),
            host.name,
        )
        for host in plan.topology.hosts
    ]
    groups = [(*parts, [row[2] for row in group]) for parts, group in groupby(rows, key=lambda row: row[:2])]
    left_out = len(groups) - MAX_ROWS
    caption = f"... and {left_out} more rows: --json has all ranks" if left_out > 0 else None
    of_spares = ["its ranks are spares of"] if plan.spares is not None else []
    table = new_table("hosts", "each", "its ranks", *of_spares, title="Who owns what", caption=caption)
    for parts, spared, names in groups[:MAX_ROWS]:
        hosts = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
        of_spares = [_list(spared)] if plan.spares is not None else []
        table.add_row(hosts, f"{sum(parts):.{digits}f} %", _list(parts), *of_spares)
    return table


def _list(parts: Iterable[float]) -> str:
    return ", ".join(
        f"{part:g}" if len(same) == 1 else f"{len(same)} x {part:g}"
        for part, same in ((part, list(same)) for part, same in groupby(parts))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """What was compared for a sharded step with replicas, and which of it is taken."""

    topology: Topology
    num_bytes: int
    chosen: Replicas
    results: Mapping[str, ReplicaStep]
    """By what they are called; the prediction of each is of what may run under the backward pass, and of the rest."""

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
                    "name": name,
                    "replicas": step.replicas,
                    "under_backward_s": step.within.time_s,
                    "after_step_s": step.after.time_s,
                    "shares": step.shares,
                }
                for name, step in self.results.items()
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
    results = {
        name: draft_replicas(topology, num_bytes, replicas, portions=portions, slice_bytes=slice_bytes)
        for name, replicas in choices.items()
    }
    return ReplicaPlan(topology=topology, num_bytes=num_bytes, chosen=chosen, results=results)


def _level_of(replicas: Replicas, topology: Topology) -> int:
    """Return the first level with these replicas: a switch with one child divides as what is below it."""
    return next(level for level in count() if find_replicas(topology, level) == replicas)


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
    marks = {
        name: "chosen" if step.replicas == plan.chosen else "not by auto"
        for name, step in plan.results.items()
        if step.replicas == plan.chosen or 1 in map(len, step.replicas)
    }
    if "not by auto" in marks.values():
        caption += "; auto takes no level with a replica of one rank, which would own everything"
    headings = ("replicas", "ranks of each", "under backward", "after step", "both", "most owned")
    table = new_table(*headings, padding=(0, 1, 0, 0), caption=caption)
    for name, step in plan.results.items():
        is_chosen = step.replicas == plan.chosen
        table.add_row(
            f"{name} ({marks[name]})" if name in marks else name,
            ", ".join(str(len(ranks)) for ranks in step.replicas),
            *(format_duration(each) for each in (step.within.time_s, step.after.time_s, step.time_s)),
            f"{max(step.shares):.1%}",
            style="bold green" if is_chosen else "",
        )
    return table
