"""What a cluster agrees on, one record after the other: the order is fixed before the first batch.

    term 0: period 0: mean, mean, ... (one each batch), result | period 1: mean, ..., result | ... | average
    term 1: ...

A *mean* is that of a cluster's gradients of one batch. A *result* is what the clusters' exchange at the end of a period
gave. An *average*, at the end of a term if asked for, is that of all clusters' parameters. With one cluster there is
nothing to exchange, and the records are means alone.

Every record needs something from every live member of the cluster, so no two members are ever more than one record
apart; the whole protocol stands on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
    has_outer_rounds: bool = True
    averages: bool = False

    @property
    def records_of_period(self) -> int:
        """Number of records of a period, its average apart."""
        return self.period + self.has_outer_rounds

    @property
    def records_of_term(self) -> int:
        """Number of records of a term."""
        return self.reelect_every * self.records_of_period + self.averages

    def record(self, index: int) -> Record:
        """Return the record of that number."""
        assert index >= 0
        term, within = divmod(index, self.records_of_term)
        if self.averages and within == self.records_of_term - 1:
            period = (term + 1) * self.reelect_every - 1
            return Record(
                index=index, kind=Kind.AVERAGE, term=term, period=period, batch=(period + 1) * self.period - 1
            )
        period_in_term, batch = divmod(within, self.records_of_period)
        period = term * self.reelect_every + period_in_term
        kind = Kind.RESULT if batch == self.period else Kind.MEAN
        return Record(
            index=index,
            kind=kind,
            term=term,
            period=period,
            batch=period * self.period + min(batch, self.period - 1),
        )

    def last_of_term(self, term: int) -> int:
        """Return the number of a term's last record."""
        return (term + 1) * self.records_of_term - 1

    def last_outer_round(self, index: int) -> Record | None:
        """Return the newest outer round up to record ``index``, itself included; None before the first."""
        if not self.has_outer_rounds:
            return None
        newest = (self.record(number) for number in range(index, max(-1, index - self.records_of_period - 1), -1))
        return next((record for record in newest if record.is_outer_round), None)
