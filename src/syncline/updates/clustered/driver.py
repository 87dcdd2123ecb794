"""The driver: carries out what the protocol says, on the loop's thread, and hands records to the training thread.

The training thread provides what a record needs and waits until it is agreed; all else happens without it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from syncline.errors import DeadlineError, PeerLostError, SynclineError, UpdateError, accusing
from syncline.fabric import GivenUpError
from syncline.members import QuorumLostError, describe_ranks
from syncline.observe import Trace
from syncline.runtime import Communicator
from syncline.runtime.failures import AS_MANY_BATCHES, LOOK
from syncline.runtime.port import BULK_CLASS, Port
from syncline.updates.clustered.messages import (
    Abandon,
    Agreed,
    Contribution,
    Enter,
    Instruction,
    Kind,
    Measurement,
    Provided,
    Record,
    Run,
    Send,
    Stop,
    ToldMessage,
    decode,
    encode,
)
from syncline.updates.clustered.node import Node
from syncline.updates.clustered.outer_rounds import OuterRounds
from syncline.updates.flat import Vector, VectorShape, combine, shares
from syncline.updates.messaging import LOOK_S, Driver, LeftBehind, Mailbox, MessageStream
from syncline.updates.rule import Newcomers

TEXT_URGENCY, VECTOR_URGENCY = -1, 0
ANSWER_S = 5.0
"""How long the loop may take to say what it is doing."""


_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredStatistics:
    """A frozen record of one rank's part in a clustered update; bytes are those that this rank sent in messages.

    What ``within=AllReduce()`` and ``Sharded()`` move by collectives is not among them.
    """

    clusters: tuple[tuple[int, ...], ...]
    """The ranks of each cluster."""
    servers: tuple[int | None, ...]
    """The temporary server of each cluster in this term; None if the cluster is dead."""
    term: int
    period: int
    samples_of_clusters: tuple[float, ...] | None
    """Samples of each cluster in the newest outer round, its weight in the mean: 0 for one that had no part."""
    sent_bytes_inside: int
    sent_bytes_between: int
    num_replaced_servers: int
    """Temporary servers of this rank's cluster that died in their term."""
    dead: tuple[int, ...]
    state: str
    """What this rank does as a member."""
    contributions: tuple[tuple[float, ...], ...] | None = None
    """Row c, column k: what cluster k contributed to c; None unless ``literal``, which needs a table."""
    features: Mapping[str, float | str] = field(default_factory=dict, hash=False)
    """What this rank's machine measured, as the mean over its past periods."""
    history: tuple[Mapping[str, float | str], ...] = field(default=(), hash=False)
    """What it measured in each of them, oldest first; the newest 16 are kept."""

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The share of each cluster in the newest outer round, by samples; None before the first."""
        samples = self.samples_of_clusters
        if samples is None or sum(samples) <= 0:
            return None
        return tuple(amount / sum(samples) for amount in samples)

    def __str__(self) -> str:
        """One line for people."""
        servers = ", ".join("none" if server is None else str(server) for server in self.servers)
        dead = f"  dead {', '.join(map(str, self.dead))}" if self.dead else ""
        return (
            f"term {self.term}  servers {servers} of {len(self.clusters)} clusters  "
            f"sent {self.sent_bytes_inside / _MIB:.1f} MiB inside, {self.sent_bytes_between / _MIB:.1f} between{dead}"
        )


_NAMES: dict[Kind, Callable[[Record], str]] = {
    Kind.MEAN: lambda record: f"star of batch {record.batch}",
    Kind.RESULT: lambda record: f"exchange of period {record.period}",
    Kind.AVERAGE: lambda record: f"average of term {record.term}",
}
"""What a member's spans are called, from its own part of a record until that is agreed."""


def mean_of(contributions: Mapping[int, Contribution]) -> Vector | None:
    """Return the mean of the gradients, weighted by samples and added in rank order; None if there are none."""
    given = [contributions[rank] for rank in sorted(contributions) if contributions[rank].payload is not None]
    if sum(one.samples for one in given) <= 0:
        return None
    return combine([one.payload for one in given], shares([one.samples for one in given]))


class ClusterDriver(Driver):
    """Joins the protocol to the fabric and to the training thread."""

    def __init__(
        self,
        port: Port,
        job: Communicator,
        shape: VectorShape,
        node: Node,
        *,
        stream: int,
        timeout_s: float,
        trace: Trace,
        newcomers: Newcomers | None = None,
    ) -> None:
        self._topology = job.topology
        self._newcomers = newcomers
        self._node = node
        self._stream = stream
        super().__init__(port, node.view.membership, timeout_s=timeout_s)
        self._job = job
        self._began_s = 0.0
        self._has_told_wait = False
        self._sent_bytes_inside = 0
        self._trace = trace
        self._provided_ns = 0
        self._elected: tuple[int, int] | None = None
        """The term of which the trace has the servers, and the number of the dead then."""
        self._shape = shape
        self._mailbox = Mailbox(
            MessageStream(port, stream, urgency=TEXT_URGENCY),
            MessageStream(port, stream, urgency=VECTOR_URGENCY, connection_class=BULK_CLASS),
            decode=partial(decode, shape=shape),
            on_message=self._hear,
            on_lost=self._lose,
        )
        self._outer_rounds = OuterRounds(port, self._topology, stream=stream, trace=trace)
        self._entered: deque[tuple[Record, Agreed]] = deque()
        self._is_over = False
        self._last_statistics: ClusteredStatistics | None = None

    # The training thread.

    def start(self) -> None:
        """Join the first temporary server."""
        self._port.call_soon(self._begin)

    def provide(self, provided: Provided) -> None:
        """Give what the next record needs; the payload must not change any more."""
        self.raise_failure()
        self._port.call_soon(self._provide, provided)

    def measurements(self) -> dict[int, Measurement]:
        """Return what this rank heard of others if it is the one whose proposal counts in this term; else nothing."""

        def answer() -> dict[int, Measurement]:
            _, proposer = self._node.view.participants(self._node.term)[0]
            return dict(self._node.measurements) if proposer == self._port.rank else {}

        return self._port.call(answer, ANSWER_S)

    def wait(self, reason: str) -> tuple[Record, Agreed]:
        """Wait for the next record, for a ``reason``. Raises what went wrong, or DeadlineError with what is awaited."""
        self._began_s = time.monotonic()
        self._wait(lambda: bool(self._entered), reason)
        if self._entered:
            if self._has_told_wait:
                self._has_told_wait = False
                self._job.wait_beside((), "")
            return self._entered.popleft()
        self.raise_failure()
        raise self._port.call(self._late, ANSWER_S)

    def raise_first(self) -> None:
        """Raise what has gone wrong, or does within a moment."""
        self._wait_for(lambda: False, LOOK_S)
        self.raise_failure()

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that are not known to be lost; a death that comes just now may be missing."""
        return self._node.view.membership.living

    def _look(self) -> None:
        """After half the deadline, let errors of all ranks know whom this one waits for."""
        if time.monotonic() - self._began_s >= self._timeout_s / 2:
            self._has_told_wait = True
            self._port.call_soon(self._tell_wait)

    def depart(self, timeout_s: float) -> bool:
        """Tell everyone that this rank has all it needs, and wait until they all have; False if time is over."""
        self._port.call_soon(self._depart)
        with self._progress.waiting():
            return self._wait_for(lambda: self._is_over, timeout_s)

    def statistics(self) -> ClusteredStatistics:
        """Return what is known and counted here; once this rank departed, what it was then."""
        if self._last_statistics is not None:
            return self._last_statistics
        return self._port.call(self._take_statistics, ANSWER_S)

    def close(self) -> None:
        """Release everything, and hear of no loss any more; what was counted is kept."""
        with contextlib.suppress(SynclineError):  # a loop that broke or hangs has nothing to tell
            self._port.call(self._end, ANSWER_S)

    # The loop's thread.

    def _begin(self) -> None:
        self._mailbox.listen_to_all()
        self._perform(self._node.begin())
        self._watch(self._stream)

    def _provide(self, provided: Provided) -> None:
        self._provided_ns = self._trace.now_ns()
        self._perform(self._node.provide(provided))

    def _hear(self, peer: int, told: ToldMessage) -> None:
        self._mailbox.listen(peer)
        self._perform(self._node.receive(peer, *told))

    def _on_lost(self, peer: int, error: Exception) -> None:
        if self._newcomers is not None:
            self._newcomers.note_loss(peer)
        if isinstance(error, GivenUpError):
            self.membership.lose(peer, error)
            self._perform(self._node.end(peer))
        else:
            self._perform(self._node.lose(peer, error))

    def _awaited_peers(self) -> Collection[int]:
        return () if self._node.quorum is None else self._node.awaited()

    def _tell_wait(self) -> None:
        member = self._node.member
        what = f"the clusters' update ({member.state}), step {member.next_record.batch + 1}"
        self._job.wait_beside(self._node.awaited(), what)

    def _late(self) -> DeadlineError:
        """Say whom this rank waits for in the end, or who ended the training before it did."""
        who, server = self._port.describe_peer, self._node.view.own_server(self._node.term)
        member = self._node.member
        state = f"{member.state} of batch {member.next_record.batch + 1}"
        serving = "this rank serves" if server == self._port.rank else f"{who(server)} serves"
        awaited, remedy = sorted(self._node.departed), AS_MANY_BATCHES
        text = self._describe_departed()
        if not awaited:
            awaited, remedy = sorted(self._node.awaited()), LOOK
            found = self._job.find_beside(self._port.rank)
            traced = [found[0]] if found is not None else awaited
            awaited = [rank for rank in awaited if self._port.stalls.still_s(rank) > self._timeout_s / 2] or traced
            text = f"{describe_ranks(awaited, who)} did not deliver"
        return accusing(
            DeadlineError(
                f"{text}: {who(self._port.rank)} waited {self._timeout_s:g} s, {state}, for which {serving}; {remedy}"
                f"{self.membership.describe_lost(who)}"
            ),
            *awaited,
        )

    def _describe_departed(self) -> str:
        who = self._port.describe_peer
        departed = describe_ranks(sorted(self._node.departed), who)
        return f"{departed} ended the training before {who(self._port.rank)} did"

    def _find_culprits(self) -> tuple[tuple[int, ...], str] | None:
        """Return for whom those who are lost have given up, as this rank would have soon, and what these did."""
        who, departed = self._port.describe_peer, self._node.departed
        if departed and self._port.rank not in departed:
            return tuple(sorted(departed)), self._describe_departed()
        found = self._job.find_beside(self._port.rank)
        if found is None or found[0] in self.membership.lost:
            return None
        return (found[0],), f"{who(found[0])} did not deliver, and {who(found[1])} waited for it"

    def _on_note(self, peer: int, note: LeftBehind) -> None:
        if note.rank == self._port.rank and peer not in self.membership.lost:
            self._perform(self._node.end(peer))
        else:
            super()._on_note(peer, note)

    def _end(self) -> None:
        if self._last_statistics is None:
            self._last_statistics = self._take_statistics()
        self._port.close()

    def _depart(self) -> None:
        self._last_statistics = self._take_statistics()  # later, whoever departed too counts as dead
        self._perform(self._node.depart())

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                self._send(instruction)
            elif isinstance(instruction, Enter):
                self._enter(instruction.record, instruction.agreed)
            elif isinstance(instruction, Run):
                self._outer_rounds.run(instruction, self._finish)
            elif isinstance(instruction, Abandon):
                self._outer_rounds.abandon(instruction.run)
            else:
                self._stop(instruction)
        self._look_at_election()
        if self._node.is_over:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _enter(self, record: Record, agreed: Agreed) -> None:
        now_ns = self._trace.now_ns()
        self._trace.span(_NAMES[record.kind](record), "clustered", self._provided_ns, now_ns, term=record.term)
        with self._changed:
            self._entered.append((record, agreed))
            self._changed.notify_all()

    def _look_at_election(self) -> None:
        """Let the trace have who serves, if that is a new term or someone has died since."""
        view, term = self._node.view, self._node.term
        key = (term, len(view.dead))
        if self._trace.enabled and self._elected != key and self._last_statistics is None:
            self._elected = key
            servers = [view.server(cluster, term) for cluster in range(len(view.clusters(term)))]
            self._trace.instant("election", "clustered", term=term, servers=servers, dead=sorted(view.dead))

    def _send(self, send: Send) -> None:
        num_bytes = self._mailbox.send(send.peer, *encode(send.message, send.dead, self._shape))
        view, term = self._node.view, send.message.term
        if view.cluster_of(send.peer, term) == view.own_cluster(term):
            self._sent_bytes_inside += num_bytes

    def _finish(self, run: Run, payload: Vector) -> None:
        self._perform(self._node.finish_outer_round(run, payload))

    def _stop(self, stop: Stop) -> None:
        who, accused = self._port.describe_peer, stop.accused
        text = f"{who(self._port.rank)} stops: {stop.reason}"
        if self._port.rank not in accused and (culprits := self._find_culprits()) is not None:
            accused, cause = culprits
            text = f"{cause}. Therefore {text}"
        newest, error = self.membership.newest_loss or (None, None)
        text += f". Last lost: {error}" if newest is not None else ""
        failure: SynclineError = UpdateError(text)
        if stop.are_too_few:
            failure = QuorumLostError(text, missing=stop.accused)
        elif newest is not None:
            failure = PeerLostError(text, rank=newest, host=self._topology.host_of(newest).name)
        failure.__cause__ = error
        self.fail(accusing(failure, *accused))

    def _take_statistics(self) -> ClusteredStatistics:
        node, view = self._node, self._node.view
        clusters = view.clusters(node.term)
        result = node.member.result
        size = len(clusters)
        return ClusteredStatistics(
            clusters=clusters,
            servers=tuple(view.server(cluster, node.term) for cluster in range(size)),
            term=node.term,
            period=node.member.next_record.period,
            samples_of_clusters=result.samples if result is not None else None,
            sent_bytes_inside=self._sent_bytes_inside,
            sent_bytes_between=self._mailbox.sent_bytes.total()
            - self._sent_bytes_inside
            + self._outer_rounds.sent_bytes,
            num_replaced_servers=node.num_replaced,
            dead=tuple(sorted(view.dead)),
            state=node.member.state,
        )
