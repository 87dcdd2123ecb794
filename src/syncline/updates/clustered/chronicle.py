"""What one rank of a clustered update leaves in the trace: stars, exchanges, averages, and who was elected.

Spans of members are in the row ``clustered``, those of temporary servers in ``server``: a star lasts from the own
gradient to the cluster's mean, an exchange of servers from its first message to its result.
"""

from __future__ import annotations

from collections.abc import Callable

from syncline.observe import Trace
from syncline.updates.clustered.agenda import Entry, Kind
from syncline.updates.clustered.instructions import Run
from syncline.updates.clustered.view import View

_NAMES: dict[Kind, Callable[[Entry], str]] = {
    Kind.MEAN: lambda entry: f"star of batch {entry.batch}",
    Kind.RESULT: lambda entry: f"exchange of period {entry.period}",
    Kind.AVERAGE: lambda entry: f"average of term {entry.term}",
}


class Chronicle:
    """Writes to a trace what the protocol of one rank does. On the loop's thread alone."""

    def __init__(self, trace: Trace, view: View) -> None:
        self._trace = trace
        self._view = view
        self._provided_ns = 0
        self._runs: dict[int, tuple[int, int]] = {}
        self._elected: tuple[int, int] | None = None

    def provided(self) -> None:
        """Note that the own part of the next entry is in place."""
        self._provided_ns = self._trace.now_ns()

    def entered(self, entry: Entry) -> None:
        """Note that an entry is agreed."""
        self._trace.span(
            _NAMES[entry.kind](entry), "clustered", self._provided_ns, self._trace.now_ns(), term=entry.term
        )

    def began(self, run: Run, sent_bytes: int) -> None:
        """Note that this rank, a server, begins an exchange, before which all of its exchanges had sent so much."""
        self._runs[run.entry.index] = (self._trace.now_ns(), sent_bytes)

    def ended(self, run: Run, sent_bytes: int) -> None:
        """Note that it is over; ``sent_bytes`` counts as before. An exchange that was given up has no span."""
        start_ns, sent_before = self._runs.pop(run.entry.index)
        servers = [server for _, server in run.participants]
        self._trace.span(
            f"{run.entry.kind.value} among {len(servers)} servers",
            "server",
            start_ns,
            self._trace.now_ns(),
            term=run.entry.term,
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
