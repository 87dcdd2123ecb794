"""What a cluster agrees on, what members and servers say to one another, and what they tell their driver to do.

The records that a cluster agrees on come one after the other, in an order that is fixed before the first batch:

    term 0: period 0: mean, mean, ... (one each batch), result | period 1: mean, ..., result | ... | average
    term 1: ...

A *mean* is that of a cluster's gradients of one batch. A *result* is what the clusters' exchange at the end of a period
gave. An *average*, at the end of a term if asked for, is that of all clusters' parameters. With one cluster there is
nothing to exchange, and the records are means alone. Where collectives make the means, records are all else. Every
record needs something from every live member of the cluster, so no two members are ever more than one record apart; the
whole protocol stands on that.

The protocol itself does no I/O and no arithmetic. A message may have a payload: vectors, which it never opens.
Every message names its term; one of a term that is over is refused. On its way it carries whom its sender takes for
dead: it is heard once these are known to be dead here too. The fabric tells all ranks of each loss, and of two that
lose each other the higher one is lost for all: what such a rank does before it learns that is heard by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, get_args

from syncline.updates.flat import Vector, VectorShape
from syncline.updates.messaging import decode_record, encode_record


class Kind(Enum):
    """What a record is."""

    MEAN = "mean"
    RESULT = "result"
    AVERAGE = "average"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One thing that is agreed on. ``batch`` counts all batches from the first; for an outer round, the last."""

    index: int
    kind: Kind
    term: int
    period: int
    batch: int

    @property
    def is_outer_round(self) -> bool:
        """Whether the clusters' servers agree on it together."""
        return self.kind is not Kind.MEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSchedule:
    """The order of records: ``period`` batches to an outer round, ``reelect_every`` periods to a term."""

    period: int
    reelect_every: int
    has_means: bool = True
    has_outer_rounds: bool = True
    averages: bool = False

    @property
    def records_of_period(self) -> int:
        """Number of records of a period, its average apart."""
        return self.period * self.has_means + self.has_outer_rounds

    @property
    def records_of_term(self) -> int:
        """Number of records of a term."""
        return self.reelect_every * self.records_of_period + self.averages

    def record(self, index: int) -> Record:
        """Return the record of that number."""
        assert index >= 0
        term, within = divmod(index, self.records_of_term)
        period_in_term, batch = divmod(within, self.records_of_period)
        kind = Kind.RESULT if batch == self.period * self.has_means else Kind.MEAN
        if self.averages and within == self.records_of_term - 1:
            kind, period_in_term = Kind.AVERAGE, self.reelect_every - 1
        period = term * self.reelect_every + period_in_term
        batch = period * self.period + (batch if kind is Kind.MEAN else self.period - 1)
        return Record(index=index, kind=kind, term=term, period=period, batch=batch)

    def last_of_term(self, term: int) -> int:
        """Return the number of a term's last record."""
        return (term + 1) * self.records_of_term - 1

    def levels(self, record: Record) -> bool:
        """Whether all ranks have the same parameters once they have stepped on what this record brought."""
        return record.kind is (Kind.AVERAGE if self.averages else Kind.RESULT)

    def last_outer_round(self, index: int) -> Record | None:
        """Return the newest outer round up to record ``index``, itself included; None before the first."""
        if not self.has_outer_rounds:
            return None
        newest = (self.record(number) for number in range(index, max(-1, index - self.records_of_period - 1), -1))
        return next((record for record in newest if record.is_outer_round), None)


Payload = Any
"""A vector to those who reckon with it, and nothing but a thing to hand on here."""

Participants = tuple[tuple[int, int], ...]
"""(cluster, its server's rank) for each cluster that is alive, by cluster."""

Clusters = tuple[tuple[int, ...], ...]
"""The ranks of each cluster."""

Measurement = tuple[tuple[str, Any], ...]
"""What a rank tells of itself, by name, so that clusters can be made anew; the protocol hands it on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provided:
    """What a rank has in place for the record that it needs next."""

    samples: float
    payload: Payload = field(default=None, repr=False)
    measurement: Measurement = ()
    clusters: Clusters = ()
    """Those that it proposes for the next term, none to keep the old ones."""
    told: tuple[int, ...] = ()
    """What it tells of the job's members with an outer round, itself first, if it tells anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A member to a server: I follow you in this term; the newest record that I hold is ``index`` (-1: none)."""

    term: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A member to its server: my part of record ``index``. For a mean the payload is my gradient.

    For an outer round there is no payload, and it says: I hold all that my cluster brings to it.
    """

    term: int
    index: int
    samples: float
    measurement: Measurement = ()
    told: tuple[int, ...] = ()
    payload: Payload = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """A record itself, to a member, or to a server of another cluster that lacks it.

    ``samples`` are those of the cluster (a mean) or of each cluster (an outer round; 0 for one that had no part in it).
    A payload of None means that there is nothing to change: no other cluster had a part.
    """

    term: int
    index: int
    samples: tuple[float, ...]
    clusters: Clusters = ()
    """After a term: the clusters of the next one, if they are others."""
    told: tuple[int, ...] = ()
    """What the lowest rank that had a part in the outer round told of the job's members."""
    payload: Payload = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """A server to a member that holds record ``index``: send it to me, for I do not."""

    term: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A server to the other servers: my cluster is ready for exchange ``index`` among ``participants``."""

    term: int
    index: int
    cluster: int
    participants: Participants
    samples: float
    has_result: bool
    measurements: tuple[tuple[int, Measurement], ...] = ()
    clusters: Clusters = ()
    """What this server proposes; that of the first participant is agreed, with the outer round itself."""
    told: tuple[int, ...] = ()
    """What its cluster's lowest rank tells of the job's members; that of the lowest of all is agreed likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """To everyone: I have all that I need, and everybody has all that I had to send."""

    term: int


Message = Join | Contribution | Agreed | Supply | Ready | Farewell


NUM_VECTORS = "num_vectors"
"""What goes beside a message with a payload."""


ToldMessage = tuple[Message, frozenset[int]]
"""A message, and whom its sender took for dead."""


def encode(message: Message, dead: Iterable[int], shape: VectorShape) -> tuple[bytes, list[memoryview]]:
    """Return it as text and payloads; its vectors are of ``shape``."""
    payload: Vector | None = getattr(message, "payload", None)
    size = {} if payload is None else {NUM_VECTORS: payload.shape.num_bytes // shape.num_bytes}
    return encode_record(message, dead=sorted(dead), **size), [] if payload is None else [payload.memory]


def decode(text: bytes, shape: VectorShape) -> tuple[ToldMessage, list[memoryview]]:
    """Return what :func:`encode` wrote, and where its payload is to land; ValueError if it is anything else."""
    message, beside = decode_record(text, get_args(Message), "the clustered update")
    dead, memory = frozenset(map(int, beside.get("dead", ()))), []
    if NUM_VECTORS in beside and isinstance(message, Contribution | Agreed):
        vector = shape.times(beside[NUM_VECTORS]).empty()
        message, memory = replace(message, payload=vector), [vector.memory]
    return (message, dead), memory


# --- what the protocol tells the one who drives it ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message, with its payload if it has one."""

    peer: int
    message: Message
    dead: frozenset[int]
    """Whom this rank takes for dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """This rank now holds ``agreed``: apply it, and provide what the next record needs."""

    record: Record
    agreed: Agreed = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Exchange ``payload`` with the other participants, and report :meth:`Node.finish_outer_round`."""

    record: Record
    participants: Participants
    samples: tuple[float, ...]
    """Of each participant, in their order."""
    payload: Payload = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Give up the outer round that runs: its participants are no longer those that are alive."""

    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """This rank cannot go on; ``accused`` are the ranks at fault."""

    reason: str
    accused: tuple[int, ...]
    are_too_few: bool = False
    """Whether it is for want of a quorum."""


Instruction = Send | Enter | Run | Abandon | Stop

Mean = Callable[[Mapping[int, Contribution]], Payload]
"""Returns the mean of gradients, by ranks; passed in, so that tests can reckon with symbols."""
