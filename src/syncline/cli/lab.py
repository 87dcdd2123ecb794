"""``syncline lab``: an emulated cluster on this machine, by hand. Each command is one function of the lab.

Annotations are evaluated here, not kept as text: a class in another module inherits the fields of :class:`LabOptions`.
"""

import sys
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli.commands import new_app, spread
from syncline.cli.launcher.scratch import shared_secret
from syncline.errors import ConfigurationError
from syncline.lab import operations
from syncline.lab.lab import LabSettings
from syncline.lab.operations import LabStatus
from syncline.lab.queues import QUEUE_KINDS
from syncline.report.terminal import new_table
from syncline.topology import DirectedLink
from syncline.units import format_rate, format_size
from syncline.variables import process_variables

app = new_app(
    about="Try it on an emulated network of this machine: namespaces, bridges and rate-limited links (Linux, root)."
)
COMMAND_SETTINGS = {"allow_interspersed_args": False}

TopologyArgument = Annotated[str, typer.Argument(metavar="TOPOLOGY", help="A topology file, or a shipped one's name.")]
CommandArgument = Annotated[list[str], typer.Argument(metavar="[--] COMMAND...", help="What to run.")]
LabOption = Annotated[str | None, typer.Option("--lab", metavar="ID", help="Which lab, if there are several.")]
PrioritiesOption = Annotated[bool, typer.Option("--priorities", help="Give ports strict-priority classes by DSCP.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions:
    """How the lab differs from the usual one: options of every command that builds one."""

    queues: Annotated[
        str, typer.Option("--queues", metavar="KIND", help=f"Kind of switches: {', '.join(QUEUE_KINDS)}.")
    ] = "default"
    congestion: Annotated[
        str | None,
        typer.Option("--congestion", metavar="NAME", help="Congestion control of all: bbr, cubic, reno."),
    ] = None
    packet_filters: Annotated[
        bool, typer.Option("--packet-filters", help="Let bridges ask the packet filters, as with Docker.")
    ] = False

    def settings(self, *, priorities: bool = False) -> LabSettings:
        """Return them as the lab takes them."""
        return LabSettings(
            priorities=priorities,
            queues=self.queues,
            congestion=self.congestion,
            packet_filters=self.packet_filters,
        )


@app.command(context_settings=COMMAND_SETTINGS)
@spread(LabOptions, into="options")
def run(
    topology: TopologyArgument,
    command: CommandArgument,
    *,
    priorities: PrioritiesOption = False,
    options: LabOptions,
) -> None:
    """Build the network, run COMMAND on every host at once, and remove the network.

    Typically: syncline lab run two-racks-5-3 -- syncline run train.py
    """
    with shared_secret(process_variables()) as environment:
        settings = options.settings(priorities=priorities)
        code = operations.run(topology, _plain(command, "TOPOLOGY"), env=environment, report=_report, **settings)
    raise typer.Exit(code)


@app.command()
@spread(LabOptions, into="options")
def up(topology: TopologyArgument, *, priorities: PrioritiesOption = False, options: LabOptions) -> None:
    """Build the network, and leave it until `lab down`."""
    lab = operations.up(topology, **options.settings(priorities=priorities))
    for note in lab.notes:
        _report(note)
    print(lab.lab_id)


@app.command()
def down(*, lab: LabOption = None) -> None:
    """Remove a network that `lab up` built."""
    _report(f"removed lab {operations.down(lab)}")


@app.command(name="exec", context_settings=COMMAND_SETTINGS)
def execute(
    host: Annotated[str, typer.Argument(metavar="HOST", help="A host of the lab.")],
    command: CommandArgument,
    *,
    lab: LabOption = None,
) -> None:
    """Run COMMAND on one host, with this terminal."""
    raise typer.Exit(operations.execute(host, _plain(command, "HOST"), lab_id=lab))


@app.command()
def status(*, lab: LabOption = None) -> None:
    """Show the labs of this machine, with the live rates of their links."""
    found = operations.status(lab_id=lab)
    if not found:
        print("no lab is up; start one with: syncline lab up TOPOLOGY")
    for each in found:
        Console(highlight=False).print(status_table(each))


@app.command()
def clean() -> None:
    """Remove what labs left behind whose owners were killed."""
    removed = operations.clean()
    _report(f"removed {', '.join(removed)}" if removed else "nothing was left behind")


def status_table(lab: LabStatus) -> Table:
    """Lay out a lab's links, a row each, with what they carry now and what they have carried."""
    record, addresses = lab.record, {host.name: host.address for host in lab.plan.hosts}
    owner_pid = record.owner[0] if record.owner else "none"
    owner = "abandoned: syncline lab clean" if record.is_abandoned else f"owner {owner_pid}"
    classes = ", priorities" if record.has_priorities else ""
    headings = ("link above", "address", "rate", "up now", "down now", "up", "down")
    title = f"lab {record.lab_id}: {lab.plan.topology.name} ({owner}{classes})"
    table = new_table(*headings, num_texts=2, title=title, no_wrap=True, padding=0)
    for each in lab.plan.links if lab.num_bytes else ():
        ways = [DirectedLink(each.child, "up"), DirectedLink(each.child, "down")]
        limits = dict.fromkeys(format_rate(each.link.bytes_per_s(way.direction)) for way in ways)
        rates = [format_rate(lab.bytes_per_s[way]) for way in ways]
        sizes = [format_size(lab.num_bytes[way]) for way in ways]
        # Two lines where directions differ: the table fits in 80 columns.
        table.add_row(each.child, addresses.get(each.child, ""), "\n".join(limits), *rates, *sizes)
    return table


def _plain(command: list[str], before: str) -> list[str]:
    """Drop the ``--`` that may part the command from what stands ``before`` it; an option is no command."""
    if command[:1] == ["--"]:
        return command[1:]
    if command[0].startswith("-"):
        raise ConfigurationError(
            f"{command[0]!r} stands where COMMAND begins; options go before {before}, and -- before a COMMAND that "
            "begins with -"
        )
    return command


def _report(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr)
