"""Parties: groups of ranks that make each step together by a synchronous rule, and meet the others once a period.

The synchronous rule's updater does all but what goes between parties, which is a subclass's. All ranks of a party have
the same state, or a part each of one; a checkpoint has it once for each party.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from syncline.errors import ConfigurationError, PeerLostError
from syncline.runtime.communicator import Communicator
from syncline.updates.allreduce import AllReduceUpdater
from syncline.updates.bucket import Bucket
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketSchedule, plan_bucket_schedules
from syncline.updates.control import ControlStream
from syncline.updates.ownership import most_shares
from syncline.updates.report import LocalReports, PendingReport, StepReports
from syncline.updates.rule import Setting, Updater, UpdateRule, WholeRule, WholeUpdater
from syncline.updates.sharded import Sharded
from syncline.updates.state import VELOCITY, ChosenState, StateEntry, StateOfRank, StateSource, key_of_rank

_PLAIN = Sharded()
_NOT_WITHIN = {
    "overlap_forward": "whose parameters a round takes as soon as step() returns",
    "step_in_backward": "which would have new parameters before a round is merged",
    "replicate": "which has everything once: the parties are the replicas",
    "spares": "of which no rank may be lost",
}
"""What of ``Sharded()`` a party has no use for, and why."""
_HEARS_S = 0.5
"""Within which all ranks hear of a loss."""


class PartyRule(WholeRule):
    """What rules have in common whose parties make each step by the synchronous rule ``within``."""

    __slots__ = ()
    within: Any

    def check_within(self, party: str, compress_elsewhere: str) -> None:
        """Raise :class:`ConfigurationError` for what does not suit a ``party``, as the rule calls it."""
        name, within = type(self).__name__, self.within
        if getattr(within, "compress", "off") != "off":
            raise ConfigurationError(
                f"{name}: within={type(within).__name__}(compress={within.compress!r}) would code what moves inside of "
                f"a {party}, and slow links are between them; {compress_elsewhere}"
            )
        if not self.divides:
            return
        for setting, why in _NOT_WITHIN.items():
            if (value := getattr(within, setting)) != getattr(_PLAIN, setting):
                raise ConfigurationError(
                    f"{name}: within=Sharded({setting}={value!r}) does not suit a {party}, {why}; leave out {setting}"
                )
        if isinstance(within.portions, Mapping):
            raise ConfigurationError(
                f"{name}: within=Sharded(portions=) of hosts are those of a whole job, and each {party} divides all; "
                "give a number, or leave out portions"
            )

    @property
    def divides(self) -> bool:
        """Whether each rank of a party keeps its part of the state alone."""
        return isinstance(self.within, Sharded)

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket, about: that of ``within``."""
        found: int = self.within.bucket_bytes
        return found

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` if the optimizer wants a closure, or cannot step on what it is given within."""
        WholeRule.check(self, optimizer)
        self.within.check(optimizer)


class LoneUpdater(AllReduceUpdater):
    """That of a party of one rank, whatever larger ones do: nothing is combined."""

    def make_reports(self) -> LocalReports:
        """Tell nobody."""
        return LocalReports()

    def reduce(self, bucket: Bucket) -> None:
        """Leave the gradients as they are."""

    @property
    def saves_state(self) -> bool:
        """It is nobody else's."""
        return True

    def close(self) -> None:
        """There is nothing under way."""


class PartyUpdater(WholeUpdater):
    """Works on one model in parties, by the updater that the rule ``within`` starts on this rank's."""

    is_synchronous = False
    keeps_own_state = True
    parties: tuple[tuple[int, ...], ...]
    _ranks: tuple[int, ...]
    _party: Updater

    def __init__(self, setting: Setting, within: Any) -> None:
        super().__init__(setting)
        self._setting = setting
        self._within: UpdateRule = within
        self._beside: dict[torch.Tensor, Any] = {}
        """What every rank keeps whole where its party divides the state."""

    def _start_parties(self, parties: tuple[tuple[int, ...], ...], *, num_beside: int) -> None:
        """Open that of this rank; every rank calls it alike. Each keeps so many copies of the parameters beside."""
        self.parties, self._num_beside = parties, num_beside
        self._ranks = next(ranks for ranks in parties if self.collectives.rank in ranks)
        self._num_group_streams = 2 + len(self.buckets) if max(map(len, parties)) > 1 else 0
        """Of a party's communicator; every rank takes as many, also one that is a party by itself."""
        streams = self._reserve(self._num_group_streams)
        self._party = self._open_party(streams) if len(self._ranks) > 1 else LoneUpdater(self._setting)
        self.divides_gradients = self._party.divides_gradients

    @property
    def reporting_ranks(self) -> Sequence[int]:
        """The ranks of this one's party, which tell each other of every pass."""
        return self._ranks

    def make_reports(self) -> StepReports | LocalReports:
        """Return what tells the party of each pass."""
        return self._party.make_reports()

    @property
    def dividing(self) -> Updater:
        """The party's."""
        return self._party

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The party's, and what is kept beside it."""
        return {**self._beside, **self._party.state} if self.divides_gradients else self._party.state

    @property
    def whole_state(self) -> MutableMapping[torch.Tensor, Any]:
        """What is beside it alone where the party divides: a user's optimizer would take that for its own state."""
        return self._beside if self.divides_gradients else self.optimizer.state

    def begin_backward(self) -> None:
        """Let the party combine gradients."""
        self._party.step_number = self.step_number
        self._party.begin_backward()

    def reduce(self, bucket: Bucket) -> None:
        """Combine a bucket's gradients in the party."""
        self._party.reduce(bucket)

    def finish_backward(self, report: PendingReport) -> Sequence[bool] | None:
        """Take the party's gradients; the report is there on return."""
        with self._blaming_the_first():
            present = self._party.finish_backward(report)
            if present is None:  # a party that divides waits in its step
                report.wait()
        return present

    def synchronize(self) -> None:
        """Raise what went wrong in the party."""
        with self._blaming_the_first():
            self._party.synchronize()

    def step_party(self) -> None:
        """Let the party make its step, to the end."""
        with self._blaming_the_first():
            self._party.step()
            self._party.synchronize()

    def raise_first(self, error: PeerLostError) -> None:
        """Raise what has ended the job's calls where that is another one's fault than the ``error`` of a party's."""
        job, has_ended = self.collectives.communicator, threading.Event()
        job.watch_failure(lambda _: has_ended.set())
        if has_ended.wait(_HEARS_S) and (first := job.failure) and first.ranks_at_fault != error.ranks_at_fault:
            raise first from error

    def state_entries(self) -> list[StateEntry]:
        """Return what this rank saves of its party's state: that of the first under plain keys; a velocity once."""
        entries, number = self._party.state_entries(), self._party_number
        if self.divides_gradients:
            entries += super().state_entries()
        return [
            replace(entry, key=key_of_rank(entry.key, number))
            for entry in entries
            if number == 0 or entry.key != VELOCITY
        ]

    def load_state(self, source: StateSource) -> None:
        """Take the state that this party had; what all have alike, or a party of a smaller job, where it is new."""
        own: StateSource = StateOfRank(source, self._party_number)
        if self.divides_gradients:
            super().load_state(ChosenState(own, lambda key: key == VELOCITY))
            own = ChosenState(own, lambda key: key != VELOCITY)
        self._party.load_state(own)

    @contextlib.contextmanager
    def _blaming_the_first(self) -> Iterator[None]:
        """Within this, where a rank of the party has left because of another one's loss, that one is named.

        Of that this rank hears by itself, perhaps a moment later.
        """
        try:
            yield
        except PeerLostError as error:
            self.raise_first(error)
            raise

    @property
    def _party_number(self) -> int:
        return self.parties.index(tuple(self._ranks))

    def close(self) -> None:
        """Give up what is under way."""
        self._party.close()
        if self._party.collectives is not self.collectives:
            self._party.collectives.communicator.close()
        self.collectives.close()

    def _open_party(self, streams: range) -> Updater:
        """Return what makes the steps of this rank's party."""
        group, schedules = self._open_group(streams)
        control = ControlStream(group, stream=group.user_stream + 1)
        collectives = BucketCollectives(group, control=control, bucket_schedules=schedules)
        return self._within.start(replace(self._setting, collectives=collectives))

    def _open_group(self, streams: range) -> tuple[Communicator, tuple[BucketSchedule, ...]]:
        """Return a communicator of this rank's party, and how buckets move there; its second stream is free."""
        group = self.collectives.communicator.open_group(self._ranks, streams=streams)
        plans, options = [bucket.plan for bucket in self.buckets], self._within.schedule_options
        most = None
        if options.is_divided:
            most = most_shares(
                group.topology,
                plans,
                self.optimizer,
                num_copies=options.num_copies,
                num_beside=self._num_beside,
                tells=group.rank == 0,
            )
        return group, plan_bucket_schedules(group, plans, options, first_stream=streams[2], most=most, is_together=True)

    def _reserve(self, number: int) -> range:
        return self._setting.reserve_streams(number)
