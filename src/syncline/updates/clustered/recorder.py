"""What one rank of a clustered update leaves in the trace: stars, exchanges, averages, and who was elected.

Spans of members are in the row ``clustered``, those of temporary servers in ``server``: a star lasts from the own
gradient to the cluster's mean, an outer round of servers from its first message to its result.
"""

from __future__ import annotations

from collections.abc import Callable

from syncline.observe import Trace
from syncline.updates.clustered.messages import Run
from syncline.updates.clustered.record_schedule import Kind, Record
from syncline.updates.clustered.view import View

_NAMES: dict[Kind, Callable[[Record], str]] = {
    Kind.MEAN: lambda record: f"star of batch {record.batch}",
    Kind.RESULT: lambda record: f"exchange of period {record.period}",
    Kind.AVERAGE: lambda record: f"average of term {record.term}",
}


class Recorder:
    """Writes to a trace what the protocol of one rank does. On the loop's thread alone."""

    def __init__(self, trace: Trace, view: View) -> None:
        self._trace = trace
        self._view = view
        self._provided_ns = 0
        self._runs: dict[int, tuple[int, int]] = {}
        self._elected: tuple[int, int] | None = None

    def provided(self) -> None:
        """Note that the own part of the next record is in place."""
        self._provided_ns = self._trace.now_ns()

    def entered(self, record: Record) -> None:
        """Note that a record is agreed."""
        self._trace.span(
            _NAMES[record.kind](record), "clustered", self._provided_ns, self._trace.now_ns(), term=record.term
        )

    def began(self, run: Run, sent_bytes: int) -> None:
        """Note that this rank, a server, begins an outer round, before which all of its exchanges had sent so much."""
        self._runs[run.record.index] = (self._trace.now_ns(), sent_bytes)

    def ended(self, run: Run, sent_bytes: int) -> None:
        """Note that it is over; ``sent_bytes`` counts as before. An outer round that was given up has no span."""
        start_ns, sent_before = self._runs.pop(run.record.index)
        servers = [server for _, server in run.participants]
        self._trace.span(
            f"{run.record.kind.value} among {len(servers)} servers",
            "server",
            start_ns,
            self._trace.now_ns(),
            term=run.record.term,
            servers=servers,
            samples=run.samples,
            sent_bytes=sent_bytes - sent_before,
        )

    def look_at_election(self, term: int) -> None:
        """Note who serves in ``term``, if that is a new term or someone has died since."""
        key = (term, len(self._view.dead))
        if self._trace.enabled and self._elected != key:
            self._elected = key
            servers = [self._view.server(cluster, term) for cluster in range(len(self._view.clusters(term)))]
            self._trace.instant("election", "clustered", term=term, servers=servers, dead=sorted(self._view.dead))
