"""`syncline topology`: a network as a tree, from a file, another tool's file, or a measurement; shown and compared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import new_app
from syncline.discovery import discovery_folder, recall
from syncline.errors import ConfigurationError
from syncline.topology import Topology
from syncline.topology.comparing import LinkComparison, compare, with_rates_of
from syncline.topology.importing import FORMATS
from syncline.units import format_rate, parse_rate
from syncline.variables import process_variables

app = new_app(about="The network of a job's hosts, as a tree: show it, measure it, import it, or check a file of it.")


@app.command()
def show(
    topology: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPOLOGY", help="A file, or a shipped one's name.", show_default="what was measured last"
        ),
    ] = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print it as a topology file.")] = False,
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Print it as a Mermaid flowchart.")] = False,
) -> None:
    """Draw a topology; without a name, what a job of this user measured last from this machine."""
    loaded = Topology.load(_measured_last() if topology is None else topology)
    text = loaded.to_yaml() if as_yaml else loaded.render(as_mermaid=as_mermaid) + "\n"
    print(text, end="")


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


@app.command()
def check(
    topology: Annotated[str, typer.Argument(metavar="TOPOLOGY", help="A file, or a shipped one's name.")],
    measured: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What to compare it with.", show_default="measured last on these hosts"),
    ] = None,
) -> None:
    """Compare a topology with what was measured: what passes each link, in both directions.

    A link that only one of the two has stands for the hosts below it: what these can send to all others and receive.
    Exit code 1 if anything differs by more than a third.
    """
    file = Topology.load(topology)
    other = _measured_on(file) if measured is None else Topology.load(measured)
    if other is None:
        raise ConfigurationError(
            f"no network of the hosts of {file.name!r} was measured from this machine; start `syncline topology "
            "measure` on each of them by your launcher, or name a file (--measured)"
        )
    links = list(compare(file, other))
    width = max((len(str(each.link)) for each in links), default=0)
    print(f"{'link'.ljust(width)}  {'file':>12}  {'measured':>12}")
    for each in links:
        print(_row(each, width))
    raise typer.Exit(1 if any(each.differs for each in links) else 0)


def _row(each: LinkComparison, width: int) -> str:
    part = each.other_bytes_per_s / each.one_bytes_per_s - 1
    verdict = f"  {abs(part):.0%} {'more' if part > 0 else 'less'}" if each.differs else ""
    rates = [format_rate(rate) for rate in (each.one_bytes_per_s, each.other_bytes_per_s)]
    return f"{str(each.link).ljust(width)}  {rates[0]:>12}  {rates[1]:>12}{verdict}"


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What the other tool has written.")],
    origin: Annotated[str, typer.Option("--from", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")],
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="Of the hosts' links, of the links above, and so on, as '10 Gbit/s, 40 Gbit/s'.",
            show_default="as measured on these hosts",
        ),
    ] = None,
    ranks_per_host: Annotated[int | None, typer.Option(metavar="N", show_default="as told, else 1")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there.")] = None,
) -> None:
    """Make a topology of what Slurm, Kubernetes, topograph, InfraGraph or MPI knows of the hosts of a job.

    These know which hosts are near each other, and no rates: give them, or let a job on these hosts measure them.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    levels = [parse_rate(rate.strip()) for rate in rates.split(",")] if rates is not None else []
    tree = Topology.imported(text, origin, rates=levels, ranks_per_host=ranks_per_host, source=str(file))
    measured = _measured_on(tree) if rates is None else None
    if measured is not None:
        tree = with_rates_of(tree, measured)
    elif not tree.has_rates:
        print("# nothing was measured on these hosts and no --rates are given: no link has a rate", file=sys.stderr)
    if output is None:
        print(tree.to_yaml(), end="")
    else:
        output.write_text(tree.to_yaml())
        print(tree.render())


def _measured_on(topology: Topology) -> Topology | None:
    folder = discovery_folder(process_variables())
    return recall(folder, topology) if folder is not None else None


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
