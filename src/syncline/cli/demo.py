"""``syncline demo``: train a small byte-level GPT on Python's own source, across 4 ranks."""

from __future__ import annotations

import os
import sys
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli.commands import new_app
from syncline.cli.launcher.launch import Request, launch
from syncline.demo import CHECKPOINT, DEFAULT_STEPS, Update
from syncline.errors import CheckpointError, ConfigurationError
from syncline.topology import Topology

DEMO_TOPOLOGY = "demo-1-3"
DEMO_RANKS = 4
MAX_WIDTH = 100


HOW = {
    Update.SHARDED: "updates its own shard of the parameters, and gets the rest from the others while it goes on",
    Update.ALLREDUCE: "and all step on the mean of their gradients",
    Update.OVERLAPPED: "steps on its own gradient at once, and folds in the mean of all when it comes",
    Update.CLUSTERED: "and a temporary server in each cluster of like machines makes the mean of their gradients",
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
) -> None:
    """Train a small byte-level GPT on Python's own source, across 4 ranks; a minute and a half on two cores.

    Ctrl-C ends it with a checkpoint; --resume goes on from there, with another number of ranks too.
    """
    if resume:
        check_resumable(output, num_steps=steps)
    make_folder(output)
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
    raise typer.Exit(launch(request))


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


def make_folder(output: Path) -> None:
    """Make the output folder now, so that a minute of training is not lost at the first checkpoint."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"'{output}' cannot be made: {error.strerror}; give another --output") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise ConfigurationError(f"'{output}' cannot be written to; give another --output")


def choose_network(topology: str | None, num_ranks: int | None) -> tuple[str | None, int | None]:
    """Choose the demo's two racks, unless the user wants another topology, or a number of ranks on one switch."""
    if topology is None and num_ranks in {None, DEMO_RANKS}:
        return DEMO_TOPOLOGY, DEMO_RANKS
    return topology, num_ranks


def explain(topology: str | None, num_ranks: int | None, update: Update, output: Path) -> None:
    """Say what is about to happen."""
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
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
