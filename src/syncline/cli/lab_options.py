"""The options of every command that builds a lab: what kind of switches, senders and filters it has.

Annotations are evaluated here, not kept as text: classes in other modules inherit these fields.
"""

from dataclasses import dataclass
from typing import Annotated

import typer

from syncline.lab.lab import LabSettings
from syncline.lab.queues import QUEUE_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions:
    """How the lab differs from the usual one."""

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
