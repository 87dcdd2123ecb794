"""``syncline demo``: train a small byte-level GPT on Python's own source, across 4 ranks; as root, beside DDP."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from syncline.bench.rows import COMPUTE_ALONE, Row, busiest_link
from syncline.bench.running import collect_rows, run_orders
from syncline.bench.task import MIN_ROUNDS, ModelShape, Pace, Task
from syncline.cli.bench import choose_place
from syncline.cli.commands import make_folder, new_app
from syncline.cli.launcher.launch import Request, launch
from syncline.demo import CHECKPOINT, DEFAULT_STEPS, NUM_SEQUENCES, Update
from syncline.errors import CheckpointError, ConfigurationError, LabError
from syncline.report.terminal import new_console, new_table
from syncline.topology import Topology

DEMO_TOPOLOGY = "demo-1-3"
DEMO_RANKS = 4
COMPARED = {Update.SHARDED: "Syncline Sharded", Update.ALLREDUCE: "Syncline AllReduce"}
"""Rules that take DDP's steps, so that steps per second tell all."""
COMPARED_STEPS = 4
COMPARED_PACE = Pace(num_rounds=MIN_ROUNDS, num_warm_ups=0)

HOW = {
    Update.SHARDED: "updates its own shard of the parameters, and gets the rest from the others while it goes on",
    Update.ALLREDUCE: "and all step on the mean of their gradients",
    Update.OVERLAPPED: "steps on its own gradient at once, and folds in the mean of all when it comes",
    Update.CLUSTERED: "and a temporary server in each cluster of like machines makes the mean of their gradients",
    Update.LOCAL_STEPS: "each party (a rack, or a host) steps by itself, and rounds average how far they have come",
}

app = new_app()


@app.command()
def demo(
    *,
    topology: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="The network.", show_default=DEMO_TOPOLOGY)
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help=f"Number of ranks, on one switch if not {DEMO_RANKS}.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps to train in all.")] = DEFAULT_STEPS,
    update: Annotated[Update, typer.Option(help="How parameters change from gradients.")] = Update.SHARDED,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the checkpoint and the report go.")] = Path(
        "syncline-demo"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in DIR.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto.", show_default=False)
    ] = None,
    beside_ddp: Annotated[
        bool, typer.Option("--lab/--no-lab", help="As root, end in the lab: Syncline and DDP side by side.")
    ] = True,
) -> None:
    """Train a small byte-level GPT on Python's own source, across 4 ranks; a minute and a half on two cores.

    As root it then takes half a minute to show how many steps Syncline and DDP make on an emulated network.

    Ctrl-C ends it with a checkpoint; --resume goes on from there, with another number of ranks too.
    """
    if resume:
        check_resumable(output, num_steps=steps)
    make_folder(output, "--output")
    chosen, num_ranks = choose_network(topology, ranks)
    explain(chosen, num_ranks, update, output)
    names = {"--steps": str(steps), "--update": update.value, "--output": str(output)}
    command = [sys.executable, "-m", "syncline.demo", *chain.from_iterable(names.items())]
    request = Request(
        command=(*command, *(["--resume"] if resume else [])),
        topology=chosen,
        num_ranks=num_ranks,
        trace=trace,
        report=output / "report.html",
        terminal_rank=0,
    )
    status = launch(request)
    if not status and beside_ddp and update in COMPARED:
        compare(Topology.load(chosen) if chosen else Topology.flat(ranks or DEMO_RANKS), COMPARED[update])
    raise typer.Exit(status)


def check_resumable(output: Path, *, num_steps: int) -> None:
    """Say before any rank starts that there is nothing to go on from, or nothing left to do."""
    from syncline.pytorch.checkpoint.folder import find  # needs torch, which the command line does not
    from syncline.pytorch.checkpoint.manifest import read_manifest

    try:
        folder = find(output / CHECKPOINT)
    except CheckpointError:
        raise ConfigurationError(
            f"there is no checkpoint in '{output}'; start without --resume, or name its --output"
        ) from None
    num_done = read_manifest(folder).extra["step"]
    if num_done >= num_steps:
        raise ConfigurationError(
            f"the checkpoint in '{output}' has done {num_done} of {num_steps} steps already; "
            f"go on with --resume --steps {2 * num_done}, or start anew without --resume"
        )


def choose_network(topology: str | None, num_ranks: int | None) -> tuple[str | None, int | None]:
    """Choose the demo's two racks, unless the user wants another topology, or a number of ranks on one switch."""
    if topology is None and num_ranks in {None, DEMO_RANKS}:
        return DEMO_TOPOLOGY, DEMO_RANKS
    return topology, num_ranks


def explain(topology: str | None, num_ranks: int | None, update: Update, output: Path) -> None:
    """Say what is about to happen."""
    console = new_console()
    network = Topology.load(topology) if topology else Topology.flat(num_ranks or DEMO_RANKS)
    console.print(
        f"[bold]Syncline's demo[/]: {network.num_ranks} processes on this machine train one GPT, byte by byte, on the "
        "source of Python's standard library. Their traffic follows the tree of this network (its rates are planned "
        "for but not emulated here: the lab does that).\n"
    )
    console.print(network.render(), style="cyan", markup=False)
    console.print(
        f"\nEach rank takes a part of every batch, {HOW[update]}. Ctrl-C ends it with a checkpoint in {output}.\n"
    )


def compare(network: Topology, method: str, *, pace: Pace = COMPARED_PACE) -> None:
    """Let the same GPT train in the lab, by ``method`` and by DDP in turns, and show the steps per second of both.

    Where the lab cannot be built a line says why; the demo itself has ended well by then.
    """
    if not network.has_rates:
        return
    console = new_console()
    if os.geteuid() != 0:
        command = f"sudo {shlex.quote(sys.argv[0])} demo"
        console.print(
            f"[dim]with DDP beside it on an emulated network of these rates, as root: {command}[/]", soft_wrap=True
        )
        return
    console.print("\n[bold]The same GPT on an emulated network of these rates[/], by Syncline and by DDP in turns\n")
    task = Task(
        experiment="training",
        pace=pace,
        peers=("ddp",),
        methods=(method,),
        num_steps=COMPARED_STEPS,
        shape=ModelShape(is_demo=True, batch_size=max(1, NUM_SEQUENCES // network.num_ranks)),
    )
    try:
        with choose_place({}, is_on_loopback=False) as place:
            rows, broken = collect_rows([run_orders(task, network, ("topology",), place, report=_report)])
    except LabError as error:
        _report(f"the lab could not be built, so DDP is not shown beside it: {error}")
        return
    if broken:
        _report(f"DDP is not shown beside it: {broken}")
        return
    console.print(comparison_table(rows, method))


def comparison_table(rows: Sequence[Row], method: str) -> Table:
    """Lay out the steps per second of each method, and what each put on its busiest link in a step."""
    figures = {row.method: row for row in rows}
    ratio = figures["DDP"].median_s / figures[method].median_s
    title = f"Training steps in the lab; Syncline makes {ratio:.2f} times as many as DDP"
    table = new_table("", "steps per second", "seconds a step", "busiest link, a step", title=title)
    for name in (method, "DDP", COMPUTE_ALONE):
        row = figures[name]
        table.add_row(name, f"{1 / row.median_s:.2f}", f"{row.median_s:.3f}", busiest_link(row))
    return table


def _report(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr)
