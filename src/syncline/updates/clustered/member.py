"""The member: every rank's part in its cluster. It contributes to one record at a time and takes what is agreed.

A member keeps the newest mean and the newest result, until the next of its kind. That is all that a cluster needs to go
on when its server dies: whoever is drawn next hears from every member which record it holds, gets the newest one if it
lacks that, and sends it to the others who do (see `server`).

A member follows the server of the term that its next record belongs to, and beside it that of its newest outer round:
until the next outer round is agreed, other clusters may still lack the last one and ask for it.
"""

from __future__ import annotations

from enum import Enum

from syncline.updates.clustered.messages import (
    Agreed,
    Contribution,
    Join,
    Message,
    Provided,
)
from syncline.updates.clustered.record_schedule import Kind, Record, RecordSchedule
from syncline.updates.clustered.view import View


class MemberState(Enum):
    """What a member does."""

    COMPUTING = "computing"
    AWAITING_MEAN = "awaiting the mean"
    AWAITING_RESULT = "awaiting the outer round's result"
    AWAITING_AVERAGE = "awaiting the average of the parameters"


_AWAITING = {
    Kind.MEAN: MemberState.AWAITING_MEAN,
    Kind.RESULT: MemberState.AWAITING_RESULT,
    Kind.AVERAGE: MemberState.AWAITING_AVERAGE,
}


class Member:
    """Decides for one rank as a member; messages come back as (receiver, message)."""

    def __init__(self, view: View, record_schedule: RecordSchedule) -> None:
        self._view = view
        self._record_schedule = record_schedule
        self.position = -1
        self.provided: dict[int, Provided] = {}
        self.mean: Agreed | None = None
        self.result: Agreed | None = None
        self._followed: dict[int, int] = {}
        self._contributed: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"<Member rank {self._view.rank}: holds record {self.position}, {self.state.value}>"

    @property
    def next_record(self) -> Record:
        """The record that this member needs."""
        return self._record_schedule.record(self.position + 1)

    @property
    def state(self) -> MemberState:
        """What it does."""
        if self.position + 1 not in self.provided:
            return MemberState.COMPUTING
        return _AWAITING[self.next_record.kind]

    @property
    def oldest_term(self) -> int:
        """The oldest term that still matters: messages of terms before it are refused."""
        if self.position < 0:
            return 0
        newest_outer_round = self._record_schedule.last_outer_round(self.position)
        held = self._record_schedule.record(self.position)
        return held.term if newest_outer_round is None else newest_outer_round.term

    def provide(self, provided: Provided) -> list[tuple[int, Message]]:
        """Contribute to the next record."""
        self.provided[self.position + 1] = provided
        return self.follow()

    def take(self, agreed: Agreed) -> bool:
        """Take a record if it is the next one; False if it is not needed."""
        if agreed.index != self.position + 1 or agreed.index not in self.provided:
            return False
        self.position = agreed.index
        if self._record_schedule.record(agreed.index).is_outer_round:
            self.result = agreed
            # Other clusters may still need what this one brought to its newest outer round, and nothing older.
            self.provided = {index: kept for index, kept in self.provided.items() if index == agreed.index}
        else:
            self.mean = agreed
            del self.provided[agreed.index]
        return True

    def follow(self) -> list[tuple[int, Message]]:
        """Join the servers that are not joined yet, and contribute to the one who needs it."""
        messages: list[tuple[int, Message]] = []
        terms = {self.oldest_term, self.next_record.term}
        self._followed = {term: server for term, server in self._followed.items() if term in terms}
        for term in sorted(terms):
            server = self._view.own_server(term)
            if self._followed.get(term) != server:
                self._followed[term] = server
                messages.append((server, Join(term=term, index=self.position)))
        return messages + self._contribute()

    def held(self, index: int) -> Agreed | None:
        """Return a record if this member still keeps it."""
        return next((agreed for agreed in (self.mean, self.result) if agreed and agreed.index == index), None)

    def _contribute(self) -> list[tuple[int, Message]]:
        record = self.next_record
        provided = self.provided.get(record.index)
        server = self._followed[record.term]
        if provided is None or self._contributed == (record.index, server):
            return []
        self._contributed = (record.index, server)
        payload = provided.payload if record.kind is Kind.MEAN else None
        message = Contribution(
            term=record.term,
            index=record.index,
            samples=provided.samples,
            measurement=provided.measurement,
            payload=payload,
        )
        return [(server, message)]
