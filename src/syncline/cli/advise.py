"""``syncline advise``: which update rule is the fastest for a model on a network by prediction, and what would help."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from syncline.cli.advice import Advice
from syncline.cli.commands import new_app
from syncline.errors import ConfigurationError
from syncline.priorities.forward_timing import BACKWARD_PER_FORWARD
from syncline.topology import Topology
from syncline.units import format_duration, format_size, parse_duration

app = new_app()

MAX_WIDTH = 100
LONGEST_LINE, LINK_WIDTH = 29, 10
"""Of a rule's name, and what a link needs at least, so that all fits into 80 columns."""


@app.command()
def advise(
    topology: Annotated[str, typer.Argument(metavar="TOPOLOGY", help="A topology file, or a shipped one's name.")],
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="The function (or FILE.py:FUNCTION) returns (model, batch); its forward pass is measured here.",
        ),
    ],
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="What a rank computes in a step, forward and backward. Default: 3 times the forward pass measured.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples of each rank in a step, for samples per second.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures for programs.")] = False,
) -> None:
    """Show which update rule is fastest for a model by prediction, and what would help more.

    Steps are predicted for an idle network. Left out are processors that are shared or busy, latency that the topology
    does not give, data, and the optimizer's own step.
    """
    network, compute_s = Topology.load(topology), None if compute is None else parse_duration(compute)
    if compute_s == 0:
        raise ConfigurationError(f"--compute is what a rank computes in a step, more than 0, not {compute!r}")
    if not network.has_rates or network.num_ranks == 1:
        raise ConfigurationError(
            f"topology {network.name!r} has one rank, or no link with a rate, so that nothing can be predicted; give "
            "one of several ranks, with rates, or measure it with `syncline topology measure`"
        )
    advice = _measure(network, model, compute_s)
    if as_json:
        print(json.dumps(advice.to_json(batch), indent=2))
    else:
        show(advice, batch, Console(highlight=False))


def _measure(network: Topology, model: str, compute_s: float | None) -> Advice:
    from syncline.pytorch.model_profile import measure_model
    from syncline.tensors.codec import Codec

    profile = measure_model(model)
    forward_s = profile.forward_s
    if compute_s is not None:
        part = compute_s / (1 + BACKWARD_PER_FORWARD) / sum(forward_s)
        forward_s = tuple(part * seconds for seconds in forward_s)
    coding_s = {bits: Codec(bits).measure_s_per_byte() for bits in (8, 4)}
    return Advice(topology=network, num_bytes=profile.num_bytes, forward_s=forward_s, coding_s_per_byte=coding_s)


def show(advice: Advice, batch: int | None, console: Console) -> None:
    """Print the rules, and what would help."""
    console.width = min(console.width, MAX_WIDTH)
    console.print(
        f"{format_size(sum(advice.num_bytes))} of parameters in {len(advice.num_bytes)} buckets, "
        f"{advice.topology.num_ranks} ranks; a step computes for {format_duration(advice.compute_s)}\n"
    )
    console.print(rule_table(advice, batch))
    for sentence in advice.sentences():
        console.print(sentence, markup=False)


def rule_table(advice: Advice, batch: int | None) -> Table:
    """Lay out one row for each rule, the fastest first."""
    caption = (
        "exposed: beyond computing; state: of Adam, on the rank that has most; compress= rounds what crosses slow links"
        ", and of its bytes those are shown that cross as codes"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, caption=caption)
    table.add_column("update rule", no_wrap=True)
    for heading in ("step", "exposed", "state", "busiest link", *(["samples/s"] if batch else [])):
        is_link = heading == "busiest link"
        table.add_column(heading, justify="right", no_wrap=not is_link, min_width=LINK_WIDTH if is_link else None)
    for row in advice.rows:
        samples_per_s = advice.samples_per_s(row, batch)
        table.add_row(
            row.name if len(row.name) <= LONGEST_LINE else row.name.replace(", ", ",\n  ").replace(" with", "\n  with"),
            format_duration(row.step_s),
            format_duration(row.exposed_s),
            format_size(row.state_bytes),
            f"{row.link} {format_size(row.link_bytes)}" if row.link else "-",
            *([] if samples_per_s is None else [f"{samples_per_s:,.1f}"]),
            style="bold green" if row is advice.best else "",
        )
    return table
