"""`syncline topology`: a network as a tree, from a file, from what a job has measured, or measured now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import new_app
from syncline.discovery import discovery_folder
from syncline.errors import ConfigurationError
from syncline.topology import Topology
from syncline.variables import process_variables

app = new_app(about="The network of a job's hosts, as a tree: show it, or measure it.")


@app.command()
def show(
    topology: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPOLOGY", help="A file, or a shipped one's name.", show_default="what was measured last"
        ),
    ] = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print it as a topology file.")] = False,
) -> None:
    """Draw a topology; without a name, what a job of this user measured last from this machine."""
    loaded = Topology.load(_measured_last() if topology is None else topology)
    print(loaded.to_yaml() if as_yaml else loaded.render(), end="" if as_yaml else "\n")


@app.command()
def measure(
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there.")] = None,
) -> None:
    """Measure the network between the hosts of a job, and draw it; started on each of them by a launcher.

    Typically: srun --nodes 8 --ntasks-per-node 1 syncline topology measure -o net.yaml

    Nothing that was measured before is taken. Take no other load onto the hosts for these seconds.
    """
    import syncline

    with syncline.init("measure") as fleet:
        if fleet.rank == 0:
            if output is not None:
                output.write_text(fleet.topology.to_yaml())
            print(fleet.topology.render())


def _measured_last() -> Path:
    folder = discovery_folder(process_variables())
    files = sorted(folder.glob("*.yaml"), key=lambda file: file.stat().st_mtime) if folder is not None else []
    if not files:
        raise ConfigurationError(
            f"no network was measured from this machine yet (nothing is in {folder}); name a topology, or measure: "
            "start `syncline topology measure` on every host by your launcher"
        )
    print(f"# {files[-1]}", file=sys.stderr)
    return files[-1]
