"""``syncline advise``: asks what a model takes on this machine, or what a job's trace tells, and shows what is advised.

The predictions are those of :mod:`syncline.cli.advice`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from syncline.cli.advice import Advice, measure_coding
from syncline.cli.commands import new_app, parse_compute, spread
from syncline.cli.processors import Processors
from syncline.errors import ConfigurationError
from syncline.priorities.forward_timing import BACKWARD_PER_FORWARD
from syncline.report.job_trace import read_job_trace
from syncline.report.step_profile import TracedSteps, read_steps
from syncline.report.terminal import answer
from syncline.topology import Topology
from syncline.units import counted, format_duration, format_size

app = new_app()
LONGEST_LINE, LINK_WIDTH, FITS_WIDTH = 29, 10, 80
"""Of a rule's name, and what a link needs at least, so that all fits into so many columns."""


def _processor_options(
    *,
    cores: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="N", help="Cores of each host, shared by its ranks. Default: this machine's."),
    ] = None,
    one_machine: Annotated[
        bool, typer.Option("--one-machine", help="All hosts share these cores, as in the lab and the demo.")
    ] = False,
    gpus: Annotated[
        bool,
        typer.Option(
            "--gpus", help="Ranks compute and step on GPUs, which takes no cores. Default: if the model does."
        ),
    ] = False,
) -> dict[str, Any]:
    """Return what they say of :class:`Processors`, in place of what is measured here."""
    told: dict[str, Any] = {"is_one_machine": one_machine}
    told |= {"num_cores": cores} if cores is not None else {}
    return told | ({"computing": 0.0, "stepped_s_per_byte": 0.0} if gpus else {})


@app.command()
@spread(_processor_options, into="processors")
def advise(
    topology: Annotated[
        str | None,
        typer.Argument(metavar="[TOPOLOGY]", help="A topology file, or a shipped one's name. Default: the trace's."),
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="The function (or FILE.py:FUNCTION) returns (model, batch); its forward pass is measured here.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="In place of --model: a job's trace, which tells its buckets and how long ranks compute.",
        ),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="What a rank computes in a step. Default: 3 times the forward pass measured, or as in the trace.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples of each rank in a step, for samples per second.")
    ] = None,
    processors: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="Print figures for programs.")] = False,
) -> None:
    """Show which update rule is fastest for a model by prediction, and what would help more.

    Steps are predicted for an idle network, and for cores that nothing else uses. What ranks take of these to compute,
    move and code is measured here, and Adam's step as well. Left out are latency that the topology does not give, data,
    and what an emulated network takes of the same cores. In a trace the ranks computed as long as it says: what they
    lacked of cores is in that.
    """
    compute_s = None if compute is None else parse_compute(compute)
    network = None if topology is None else Topology.load(topology)
    if model is not None and trace is None:
        advice, traced = _measure(_check(network), model, compute_s), None
    elif trace is not None and model is None:
        advice, traced = _take(trace, network, compute_s)
    else:
        raise ConfigurationError("give one of --model and --trace: the model that is to be trained, or a job's trace")
    advice = replace(advice, processors=replace(advice.processors, **processors))
    shown = advice.to_json(batch) | {"traced": None if traced is None else asdict(traced)}
    answer(shown, partial(show, advice, batch, traced), as_json=as_json)


def _check(network: Topology | None) -> Topology:
    """Return a network of which something can be predicted, or raise :class:`ConfigurationError`."""
    if network is None:
        raise ConfigurationError("name a TOPOLOGY: only a trace tells one by itself, in rank 0's part of it")
    if not network.has_rates or network.num_ranks == 1:
        raise ConfigurationError(
            f"topology {network.name!r} has one rank, or no link with a rate, so that nothing can be predicted; give "
            "one of several ranks, with rates, or measure it with `syncline topology measure`"
        )
    return network


def _measure(network: Topology, model: str, compute_s: float | None) -> Advice:
    from syncline.pytorch.model_profile import measure_model

    profile = measure_model(model)
    return Advice(
        topology=network,
        num_bytes=profile.num_bytes,
        forward_s=_stretched(profile.forward_s, compute_s),
        coding_s_per_byte=measure_coding(),
        processors=_processors(profile.num_busy_cores),
        stages=profile.stages,
    )


def _take(trace: Path, network: Topology | None, compute_s: float | None) -> tuple[Advice, TracedSteps]:
    """Take a model from a trace: its ranks computed beside each other, so what that takes of cores is in their time."""
    job = read_job_trace(trace)
    traced = read_steps(job)
    advice = Advice(
        topology=_check(network or job.topology),
        num_bytes=traced.num_bytes,
        forward_s=_stretched(traced.forward_s, compute_s),
        coding_s_per_byte=measure_coding(),
        processors=replace(_processors(1.0), computing=0.0),
    )
    return advice, traced


def _stretched(forward_s: tuple[float, ...], compute_s: float | None) -> tuple[float, ...]:
    """Return the parts of a forward pass for a step that computes for ``compute_s``, if that is given."""
    part = 1.0 if compute_s is None else compute_s / (1 + BACKWARD_PER_FORWARD) / sum(forward_s)
    return tuple(part * seconds for seconds in forward_s)


def _processors(num_busy_cores: float) -> Processors:
    """Return this machine's, where a rank keeps so many busy; with none its optimizer's step takes none either."""
    from syncline.machines.measurement import read_limits, usable_cores
    from syncline.pytorch.model_profile import measure_moving, measure_stepping

    return Processors(
        num_cores=usable_cores(read_limits()),
        computing=num_busy_cores,
        moved_s_per_byte=measure_moving(),
        stepped_s_per_byte=measure_stepping() if num_busy_cores else 0.0,
    )


def show(advice: Advice, batch: int | None, traced: TracedSteps | None, console: Console) -> None:
    """Print what the trace told, the rules, and what would help."""
    busy = advice.processors.computing
    how = f"a rank that computes alone keeps {f'{busy:.2g}' if busy else 'none'} of them busy"
    if traced is not None:
        how = f"in the trace a step took {format_duration(traced.step_s)}, and rank {traced.rank} computed longest"
    console.print(
        f"{format_size(sum(advice.num_bytes))} of parameters in {counted(len(advice.num_bytes), 'bucket')}, "
        f"{advice.topology.num_ranks} ranks; a step computes for {format_duration(advice.compute_s)}\n"
        f"{advice.processors}; {how}\n"
    )
    console.print(_rule_table(advice, batch, is_narrow=console.width < FITS_WIDTH))
    for sentence in (*advice.notes(), *advice.sentences()):
        console.print(sentence, markup=False)


def _rule_table(advice: Advice, batch: int | None, *, is_narrow: bool) -> Table:
    """Lay out one row for each rule, the fastest first; where it does not fit, cells are folded and none is cut."""
    caption = (
        "exposed: beyond computing; memory: of parameters, gradients and Adam, where it is most; compress= rounds what "
        "crosses slow links, and of its bytes those are shown that cross as codes"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, caption=caption)
    table.add_column("update rule", no_wrap=not is_narrow, overflow="fold")
    for heading in ("step", "exposed", "memory", "busiest link", *(["samples/s"] if batch else [])):
        is_link = heading == "busiest link"
        least = LINK_WIDTH if is_link and not is_narrow else None
        table.add_column(heading, justify="right", no_wrap=not (is_link or is_narrow), min_width=least, overflow="fold")
    for row in advice.rows:
        samples_per_s = advice.samples_per_s(row, batch)
        table.add_row(
            row.name if len(row.name) <= LONGEST_LINE else row.name.replace(", ", ",\n  "),
            format_duration(row.step_s),
            format_duration(row.exposed_s),
            format_size(row.memory_bytes),
            f"{row.link} {format_size(row.link_bytes)}" if row.link else "-",
            *([] if samples_per_s is None else [f"{samples_per_s:,.1f}"]),
            style="bold green" if row is advice.best else "",
        )
    return table
