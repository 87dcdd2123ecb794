"""`syncline topology`: a network as a tree, from a file, another tool's file, or a measurement; shown and compared.

Links of two topologies cannot be compared one with the other, since one tree may have switches that the other has not:
a measured one leaves out what was never full. So each link stands for the hosts below it, and what is compared is how
much these can send to all others at once, and receive.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import new_app, writing
from syncline.cli.launcher.scratch import check_place
from syncline.discovery import discovery_folder, recall
from syncline.errors import ConfigurationError, TopologyError
from syncline.topology import Topology
from syncline.topology.importing import FORMATS
from syncline.topology.tree import WAYS, DirectedLink, Host, Switch, relinked, walk
from syncline.units import format_rate, parse_rate
from syncline.variables import process_variables

DIFFERS = 1 / 3
"""Rates differ if one is larger than the other by more than this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkComparison:
    """What passes one direction of a link of either topology: by the one, by the other, in bytes per second.

    Where a root has two sides, what the link of one side sends is what that of the other receives: ``links`` has both.
    """

    links: tuple[DirectedLink, ...]
    one_bytes_per_s: float
    other_bytes_per_s: float

    @property
    def differs(self) -> bool:
        """Whether one is larger by more than :data:`DIFFERS`."""
        least, most = sorted((self.one_bytes_per_s, self.other_bytes_per_s))
        return most > least * (1 + DIFFERS)


def compare(one: Topology, other: Topology) -> Iterator[LinkComparison]:
    """Compare what passes each link of ``one``, and each of ``other`` that divides hosts as none of ``one`` does.

    Raises :class:`TopologyError` if their hosts are not the same.

    >>> racks = syncline.Topology.load("two-racks-5-3")
    >>> any(each.differs for each in compare(racks, racks))
    False
    """
    names = [{host.name for host in each.hosts} for each in (one, other)]
    if names[0] != names[1]:
        odd = ", ".join(sorted(names[0] ^ names[1])[:8])
        raise TopologyError(f"topologies {one.name!r} and {other.name!r} do not have the same hosts: {odd} is in one")
    everyone = frozenset(names[0])
    seen: set[frozenset[str]] = set()
    for topology in (one, other):
        above: dict[frozenset[str], str] = {}
        for node, below in _divisions(topology):
            above.setdefault(below, node.name)
        for below in above:
            others = everyone - below
            if below in seen or not others:
                continue
            seen |= {below, others}
            for direction, opposite in (WAYS, WAYS[::-1]):
                sending = below if direction == "up" else others
                sides = ((below, direction), (others, opposite))
                yield LinkComparison(
                    links=tuple(DirectedLink(above[side], way) for side, way in sides if side in above),
                    one_bytes_per_s=most_between(one, sending),
                    other_bytes_per_s=most_between(other, sending),
                )


def _divisions(topology: Topology) -> Iterator[tuple[Switch | Host, frozenset[str]]]:
    for node in topology.walk():
        if isinstance(node, Switch | Host) and node.link is not None:
            yield node, frozenset(below.name for below in walk(node) if isinstance(below, Host))


def most_between(topology: Topology, sending: frozenset[str]) -> float:
    """Return how much the hosts of these names can send to all others at once, in bytes per second.

    In a tree what can be matched below a switch is best matched there.

    >>> most_between(syncline.Topology.load("two-racks-5-3"), frozenset({"h5", "h6", "h7"})) * 8 / 1e6
    200.0
    """
    total = 0.0

    def visit(node: Switch | Host) -> tuple[float, float]:
        """Return what can leave ``node`` upward, and what it can take, beyond what was matched below it."""
        nonlocal total
        if isinstance(node, Host):
            sent, taken = (math.inf, 0.0) if node.name in sending else (0.0, math.inf)
        else:
            parts = [visit(child) for child in node.children]
            sent, taken = (sum(amounts) for amounts in zip(*parts, strict=True))
            matched = min(sent, taken)
            total += matched
            if not math.isinf(matched):
                sent, taken = sent - matched, taken - matched
        if node.link is None:
            return 0.0, 0.0
        return min(sent, node.link.up_bytes_per_s), min(taken, node.link.down_bytes_per_s)

    visit(topology.root)
    return total


def with_rates_of(structure: Topology, measured: Topology) -> Topology:
    """Return ``structure`` with a rate for each of its links between hosts: what passes it in ``measured``."""
    everyone = frozenset(host.name for host in structure.hosts)
    links = {}
    for node, below in _divisions(structure):
        rates = (
            most_between(measured, hosts) if below != everyone else math.inf for hosts in (below, everyone - below)
        )
        up, down = rates
        assert node.link is not None, "a division is a link"
        links[node.name] = replace(node.link, up_bytes_per_s=up, down_bytes_per_s=down)
    root = relinked(structure.root, links)
    return Topology(name=structure.name, root=root, source=structure.source)


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
    as_svg: Annotated[bool, typer.Option("--svg", help="Print it as a picture, for browsers.")] = False,
) -> None:
    """Draw a topology; without a name, what a job of this user measured last from this machine."""
    if as_yaml + as_mermaid + as_svg > 1:
        raise ConfigurationError("--yaml, --mermaid and --svg exclude each other; give one of them")
    loaded = Topology.load(_measured_last() if topology is None else topology)
    text = loaded.to_yaml() if as_yaml else loaded.render(as_mermaid=as_mermaid, as_svg=as_svg) + "\n"
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
    from syncline.pytorch.launchers import find_place

    if output is not None and find_place(process_variables()).rank == 0:  # other machines may not have the folder
        check_place(output, "--output")
    with syncline.init("measure") as fleet:
        if fleet.rank == 0:
            if len(fleet.topology.hosts) == 1:
                print("# all ranks are on one host: nothing was measured; start it on several at once", file=sys.stderr)
            print(fleet.topology.render())
            if output is not None:
                _write(fleet.topology, output)


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
    width = max((len(_names(each)) for each in links), default=0)
    print(f"{'link'.ljust(width)}  {'file':>12}  {'measured':>12}")
    for each in links:
        print(_row(each, width))
    raise typer.Exit(1 if any(each.differs for each in links) else 0)


def _names(each: LinkComparison) -> str:
    return ", ".join(map(str, each.links))


def _row(each: LinkComparison, width: int) -> str:
    part = each.other_bytes_per_s / each.one_bytes_per_s - 1
    verdict = f"  {abs(part):.0%} {'more' if part > 0 else 'less'}" if each.differs else ""
    rates = [format_rate(rate) for rate in (each.one_bytes_per_s, each.other_bytes_per_s)]
    return f"{_names(each).ljust(width)}  {rates[0]:>12}  {rates[1]:>12}{verdict}"


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
    ranks_per_host: Annotated[
        int | None, typer.Option(metavar="N", help="Of every host.", show_default="as the file tells, else 1")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there.")] = None,
) -> None:
    """Make a topology of what Slurm, Kubernetes, topograph, InfraGraph or MPI knows of the hosts of a job.

    These know which hosts are near each other, and no rates: give them, or let a job on these hosts measure them.
    """
    if output is not None:
        check_place(output, "--output")
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
        _write(tree, output)
        print(tree.render())


def _write(topology: Topology, output: Path) -> None:
    with writing(output, "--output"):
        output.write_text(topology.to_yaml())


def _measured_on(topology: Topology) -> Topology | None:
    folder = discovery_folder(process_variables())
    return recall(folder, topology) if folder is not None else None


def _measured_last() -> Path:
    folder = discovery_folder(process_variables())
    files = sorted(folder.glob("*.yaml"), key=lambda file: file.stat().st_mtime) if folder is not None else []
    if not files:
        where = f"nothing is in {folder}" if folder is not None else "it is kept below HOME, which is not set"
        raise ConfigurationError(
            f"no network was measured from this machine yet ({where}); name a topology, or measure: "
            "start `syncline topology measure` on every host by your launcher"
        )
    print(f"# {files[-1]}", file=sys.stderr)
    return files[-1]
