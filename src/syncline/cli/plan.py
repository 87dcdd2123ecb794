"""``syncline plan``: what each planner puts on each link, how long that takes, and which one wins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli.commands import new_app
from syncline.cli.step_plan import (
    ReplicaPlan,
    StepPlan,
    parse_portions,
    parse_replicate,
    plan_replicas,
    plan_step,
    prove,
    show_replicas,
    show_step,
)
from syncline.errors import ConfigurationError
from syncline.observe import tell_if_long
from syncline.report import format_rates, network_links
from syncline.report.terminal import answer, new_table
from syncline.schedule import Collective, Prediction, Schedule, lower_bound, predict, with_gateways_chosen
from syncline.schedule.cost import fastest, predicted_slice_bytes
from syncline.schedule.draft import check_plannable
from syncline.schedule.outline import Outline
from syncline.schedule.ownership import Target
from syncline.schedule.planners import PLANNERS
from syncline.topology import DirectedLink, Link, Topology
from syncline.topology.tree import WAYS
from syncline.units import format_duration, format_size, parse_size

MIB = 1 << 20
MAX_ROWS = 48
"""Of the tree and of the table of links; --json has everything."""

PORTIONS_HELP = (
    "Who owns what in a sharded step: about the same, whatever is fastest, or at most so many times an equal share."
)

app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """One planner's schedule in figures."""

    planner: str
    prediction: Prediction
    ratio: float
    """Predicted time over the lower bound; infinite where no link limits."""
    num_steps: int
    num_messages: int
    link_bytes: Mapping[DirectedLink, int]
    proof: str
    """How it is verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All planners side by side, in the order of their registry."""

    topology: Topology
    collective: Collective
    num_bytes: int
    bound_s: float
    results: tuple[PlannerResult, ...]
    left_out: Mapping[str, int]
    """Planners that cannot win among so many ranks, or are not drawn, and beyond how many."""

    @property
    def winner(self) -> PlannerResult:
        """The fastest by prediction, as the library itself chooses (:func:`syncline.schedule.cost.fastest`)."""
        return fastest((result, result.prediction) for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "topology": self.topology.name,
            "num_ranks": self.topology.num_ranks,
            "collective": self.collective.value,
            "num_bytes": self.num_bytes,
            "bound_s": self.bound_s,
            "winner": self.winner.planner,
            "left_out": dict(self.left_out),
            "planners": [_result_json(result) for result in self.results],
        }


def compare_planners(
    topology: Topology, collective: Collective, num_bytes: int, *, target: Target = "balanced", root: int = 0
) -> Comparison:
    """Plan ``collective`` with every planner that serves it, and prove and predict each schedule."""
    if not 0 <= root < topology.num_ranks:
        raise ConfigurationError(f"--root must be a rank from 0 to {topology.num_ranks - 1}, got {root}")
    topology = with_gateways_chosen(topology, num_bytes)
    able = [planner for planner in PLANNERS.values() if planner.serves(topology, collective, target)]
    left_out = {
        planner.name: planner.most_ranks
        for planner in able
        if topology.num_ranks > planner.most_ranks and not planner.outlines(topology, collective, target)
    }
    if len(left_out) == len(able):
        check_plannable(topology)
    bound_s = lower_bound(topology, collective, num_bytes, target=target, root=root)
    plans: list[Schedule | Outline] = [
        planner.outline(topology, collective)
        if planner.outline is not None and planner.outlines(topology, collective, target)
        else planner.plan(topology, collective, target=target, root=root)
        for planner in able
        if planner.name not in left_out
    ]
    return Comparison(
        topology=topology,
        collective=collective,
        num_bytes=num_bytes,
        bound_s=bound_s,
        results=tuple(_judge(plan, topology, num_bytes, bound_s) for plan in plans),
        left_out=left_out,
    )


def _judge(plan: Schedule | Outline, topology: Topology, num_bytes: int, bound_s: float) -> PlannerResult:
    prediction = predict(plan, topology, num_bytes, predicted_slice_bytes(topology))
    return PlannerResult(
        planner=plan.planner,
        prediction=prediction,
        ratio=prediction.time_s / bound_s if bound_s > 0 else math.inf,
        num_steps=plan.num_steps,
        num_messages=plan.num_messages,
        link_bytes=plan.link_bytes(topology, num_bytes),
        proof=prove(plan),
    )


def _result_json(result: PlannerResult) -> dict[str, Any]:
    prediction, bottleneck = result.prediction, result.prediction.bottleneck
    links: dict[str, dict[str, int]] = {}
    for link, amount in result.link_bytes.items():
        links.setdefault(link.child, {})[link.direction] = amount
    return {
        "planner": result.planner,
        "verified": result.proof,
        "time_s": prediction.time_s,
        "ratio": result.ratio if math.isfinite(result.ratio) else None,
        "num_steps": result.num_steps,
        "num_messages": result.num_messages,
        "bottleneck": [bottleneck.child, bottleneck.direction] if bottleneck else None,
        "num_full_links": prediction.num_full_links,
        "link_bytes": links,
    }


SHARDED_STEP = "sharded_step"
_SAID_OF: Mapping[str, tuple[object, str, tuple[str, ...]]] = {
    "portions": ("balanced", "a sharded step", (SHARDED_STEP,)),
    "spares": (0, "a sharded step", (SHARDED_STEP,)),
    "replicate": (None, "a sharded step", (SHARDED_STEP,)),
    "root": (0, "a broadcast", ("broadcast",)),
    "target": ("balanced", "an all-reduce and its halves", ("all_reduce", "reduce_scatter", "all_gather")),
}
"""Options that not all collectives heed: the default, what the option is said of, and which collectives that are."""
CollectiveName = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "sharded_step"]


@app.command()
def plan(
    topology: Annotated[str, typer.Argument(metavar="TOPOLOGY", help="A topology file, or a shipped one's name.")],
    *,
    collective: Annotated[CollectiveName, typer.Option(help="What is to be achieved.")] = "all_reduce",
    size: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Size of the buffer.")] = "64MiB",
    target: Annotated[
        Target, typer.Option(help="Who owns what in between: as the tree has it, or equal parts by rank.")
    ] = "balanced",
    root: Annotated[int, typer.Option(metavar="RANK", help="Who holds the data of a broadcast.")] = 0,
    portions: Annotated[str, typer.Option(metavar="balanced|fastest|CAP", help=PORTIONS_HELP)] = "balanced",
    spares: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=1, help="How many other ranks keep each range of a sharded step, too."),
    ] = 0,
    replicate: Annotated[
        str | None,
        typer.Option(
            metavar="PARTS",
            help="Parts of the network that each own everything in a sharded step: host, auto, a level below the "
            "root, or names with commas.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures for programs.")] = False,
) -> None:
    """Show bytes and time on each link, the lower bound, and which planner wins.

    Times are predictions for an idle network; the bound is what no schedule of any kind can be faster than.
    """
    _check_heeded(collective, portions=portions, spares=spares, replicate=replicate, root=root, target=target)
    network = Topology.load(topology)
    if collective == SHARDED_STEP:
        _plan_step(network, parse_size(size), portions, spares, replicate, as_json=as_json)
        return
    with _planning(network):
        planned = Collective[collective.upper()]
        comparison = compare_planners(network, planned, parse_size(size), target=target, root=root)
    answer(comparison.to_json(), partial(show, comparison), as_json=as_json)


def _check_heeded(collective: CollectiveName, **said: object) -> None:
    for name, value in said.items():
        default, what, collectives = _SAID_OF[name]
        if value != default and collective not in collectives:
            raise ConfigurationError(
                f"--{name} {value} is said of {what}, not of {collective}; add --collective {collectives[0]}, or leave "
                f"out --{name}"
            )


def _planning(topology: Topology) -> AbstractContextManager[None]:
    return tell_if_long(f"planning for {topology.num_ranks} ranks")


def _plan_step(
    topology: Topology, num_bytes: int, portions: str, spares: int, replicate: str | None, *, as_json: bool
) -> None:
    if replicate is not None and spares:
        raise ConfigurationError("replicas are each other's spares; leave out --spares, or --replicate")
    with _planning(topology):
        found: StepPlan | ReplicaPlan = (
            plan_step(topology, num_bytes, parse_portions(portions), spares=spares)
            if replicate is None
            else plan_replicas(topology, num_bytes, parse_replicate(replicate), parse_portions(portions))
        )
    answer(found.to_json(), partial(_show_step_plan, found), as_json=as_json)


def _show_step_plan(found: StepPlan | ReplicaPlan, console: Console) -> None:
    _show_tree(found.topology, console)
    if isinstance(found, StepPlan):
        show_step(found, console)
    else:
        show_replicas(found, console)


def show(comparison: Comparison, console: Console) -> None:
    """Print the tree, the planners and the links."""
    _show_tree(comparison.topology, console)
    limit = f"nothing can take less than [bold]{format_duration(comparison.bound_s)}[/]"
    console.print(
        f"[bold]{comparison.collective}[/] of {format_size(comparison.num_bytes)} among "
        f"{comparison.topology.num_ranks} ranks: {limit if comparison.bound_s else 'no link limits it'}\n"
    )
    console.print(planner_table(comparison))
    for planner, most_ranks in comparison.left_out.items():
        console.print(f"{planner} is not considered beyond {most_ranks:,} ranks")
    for result in comparison.results:
        console.print(f"{result.planner} is verified {result.proof}")
    if network_links(comparison.topology):
        console.print(link_bytes_table(comparison))


def _show_tree(topology: Topology, console: Console) -> None:
    tree = topology.render().splitlines()
    console.print("\n".join(tree[:MAX_ROWS]), style="cyan", markup=False)
    if len(tree) > MAX_ROWS:
        console.print(f"[dim]... and {len(tree) - MAX_ROWS} more lines[/]")
    console.print()


def planner_table(comparison: Comparison) -> Table:
    """Lay out one row for each planner, the winner marked."""
    is_crowded = any(result.prediction.num_full_links > 1 for result in comparison.results)
    caption = "+n: so many other links are nearly as busy, and each delays the others" if is_crowded else None
    headings = ("planner", "predicted", "x bound", "steps", "messages")
    table = new_table(*headings, caption=caption, padding=(0, 1, 0, 0))
    table.add_column("busiest link")
    for result in comparison.results:
        is_winner = result is comparison.winner
        table.add_row(
            f"{result.planner}{' (wins)' if is_winner else ''}",
            format_duration(result.prediction.time_s),
            f"{result.ratio:.2f}" if math.isfinite(result.ratio) else "-",
            str(result.num_steps),
            f"{result.num_messages:,}",
            _busiest(result),
            style="bold green" if is_winner else "",
        )
    return table


def _busiest(result: PlannerResult) -> str:
    bottleneck, num_others = result.prediction.bottleneck, result.prediction.num_full_links - 1
    if bottleneck is None:
        return "-"
    return f"{bottleneck.child} {bottleneck.direction}" + (f" +{num_others}" if num_others else "")


def link_bytes_table(comparison: Comparison) -> Table:
    """Lay out one row for each link above a switch or a host, one column for each planner."""
    all_links = network_links(comparison.topology)
    links = _that_fit(all_links)
    left_out = len(all_links) - len(links)
    caption = f"... and {left_out} more links: --json has them all" if left_out > 0 else None
    table = new_table("link above", "rate", title="MiB on each link, up / down", caption=caption)
    for result in comparison.results:
        table.add_column(result.planner, justify="right", style="bold green" if result is comparison.winner else "")
    for name, link, depth in links:
        amounts = [_amounts(result, name) for result in comparison.results]
        table.add_row("  " * depth + name, format_rates(link), *amounts)
    return table


def _that_fit(links: Sequence[tuple[str, Link, int]]) -> Sequence[tuple[str, Link, int]]:
    """Leave the lower levels out if all links are too many to read."""
    for deepest in range(max((depth for _, _, depth in links), default=0), -1, -1):
        upper = [row for row in links if row[2] <= deepest]
        if len(upper) <= MAX_ROWS:
            return upper
    return links[:MAX_ROWS]


def _amounts(result: PlannerResult, name: str) -> str:
    up, down = (f"{result.link_bytes[DirectedLink(name, way)] / MIB:,.1f}" for way in WAYS)
    return up if up == down else f"{up} / {down}"
