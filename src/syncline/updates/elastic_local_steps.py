"""Local steps in a job that outlives the loss of ranks, and takes newcomers in.

When a round is over, what it makes of the global parameters (``starts``) is the same on all ranks, however far each has
drifted from them. So rounds are what such a job commits. Who begins a round has merged the one before; therefore, when
ranks are lost,

- of all rounds at most the last one is over on some ranks and not on others: those get its result, and merge it in the
  step in which they would have;
- a round that is over on none begins again among those that are left, with the moves that each has sent. A rank that
  has not begun it does so in its own step, as always.

A party stays together as a job with ``AllReduce()`` does: the gradients of a pass are those of all its ranks, or of
those that are left, on all of them. It is smaller then; what it has moved keeps its weight.

Newcomers need only what all have alike. A round in which the lowest rank tells that they are connected is the last one
of the smaller job, on all ranks; members keep what they have moved since. While a rank ends its period nobody comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from syncline.members.job_record import NO_FLAGS, Flags
from syncline.runtime.communicator import Communicator
from syncline.updates.allreduce import ElasticAllReduceUpdater
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketSchedule
from syncline.updates.control import ControlStream
from syncline.updates.elastic_calls import ElasticControlStream, ElasticReports, recovering
from syncline.updates.local_steps_updater import LocalStepsUpdater, spread
from syncline.updates.rounds import Round
from syncline.updates.rule import MemberNews, Setting, Updater


class ElasticLocalStepsUpdater(LocalStepsUpdater):
    """Local steps at work on one model of an elastic job."""

    def __init__(self, setting: Setting, **settings: Any) -> None:
        assert setting.recover is not None and setting.note_calls is not None, "the job is elastic"  # noqa: PT018
        self._recover_job, self._note_calls = setting.recover, setting.note_calls
        self._newcomers = setting.newcomers
        self._reserved: list[range] = []
        self._party_control: ElasticControlStream | None = None
        super().__init__(setting, **settings)
        members = self.collectives.communicator.members
        self._party_members = tuple(tuple(members[rank] for rank in ranks) for ranks in self.parties)
        """The ranks of each party, as the fabric numbers them."""
        self._num_begun = 0
        """Rounds that were begun here: as many as all ranks count that were in this epoch's first one."""
        self._landed: Round | None = None
        """The last round that was merged, which others may lack."""
        self._forget_calls = self._note_calls()
        self._drifted: list[torch.Tensor] = []
        """This rank's own parameters, after :meth:`withdraw`."""

    @property
    def streams(self) -> list[range]:
        """The streams of rounds and of the party."""
        return self._reserved

    def step(self) -> None:
        """Step as ever; where others have found a loss, regroup before, so that they do not wait for a round."""
        job = self.collectives.communicator
        if job.loss is not None and (failure := job.failure) is not None:
            self._recover_job(failure)
        super().step()

    def resume(self) -> None:
        """Go on in a new epoch: let all have the round that some have, and begin again what nobody has."""
        self._enter()
        flight = self._flight
        num_over = self._num_begun - (flight is not None and not flight.has_result)
        told = self._control.gather_numbers(num_over, "rounds that are over")
        newest = int(max(told))
        assert newest - min(told) <= 1, f"who begins a round has merged the one before: {told}"
        if min(told) < newest:
            last = flight if flight is not None and self._num_begun == newest else self._landed
            assert last is not None, "who has merged a round keeps it until all have"
            last.share(self._control, told.index(newest))
        if flight is not None and self._num_begun > newest:
            number = (self._next_round - 1) % len(self._fragments)
            said = (*flight.told[: -len(NO_FLAGS)], *self._flags())
            self._flight = self._begin_round(number, flight.moves, weight=flight.weight, told=said)
            self._told_party = self._ranks
        streams = self._reserve(self._num_group_streams)
        if isinstance(self._party, ElasticAllReduceUpdater) and self._party_control is not None:
            self._resume_party(self._party, self._party_control, streams)

    def end_period(self) -> None:
        """Follow the others' rounds until all ranks have called this."""
        super().end_period()
        self._news = None

    def withdraw(self) -> None:
        """Let parameters be what all ranks have alike; this rank's own are kept for who goes on."""
        if not self._is_equal:
            self._drifted = [bucket.parameters.clone() for bucket in self.buckets]
            for start, bucket in zip(self._starts, self.buckets, strict=True):
                bucket.parameters.copy_(start)

    def alike(self) -> list[torch.Tensor]:
        """Return the velocities of the outer optimizer."""
        return [one.velocity for one in self._outer]

    def go_on_after(self, before: Updater, *, has_come: bool) -> None:
        """Go on as ``before`` did, with the first fragment."""
        assert isinstance(before, ElasticLocalStepsUpdater), "it is of the same rule"
        self._first_step = self.step_number if self._is_free else self._first_step
        self._next_round, self._num_ahead = 0, -self._num_sends(self.step_number)
        for own, given in zip(self.alike(), before.alike(), strict=True):
            own.copy_(given)
        if has_come:
            return
        self._unsent, self._is_equal = spread(before._unsent, len(self._fragments)), before._is_equal
        self._counts = replace(before._counts, period=self._period.own_steps, parties=self.parties)
        for values, bucket in zip(before._drifted, self.buckets, strict=False):
            bucket.parameters.copy_(values)

    def _meet(self) -> None:
        self._land()
        if self._news is None or not self._news.flags[1]:  # else the larger job begins the next one
            super()._meet()

    def _send(self, *, ends: bool) -> None:
        self._forget_calls = self._note_calls()
        super()._send(ends=ends)
        self._num_begun += 1

    def _told(self, num_steps: int, *, ends: bool) -> Sequence[float]:
        return (*super()._told(num_steps, ends=ends), *self._flags())

    def _flags(self) -> Flags:
        return NO_FLAGS if self._newcomers is None else self._newcomers.flags()

    def _arrive(self, flight: Round) -> tuple[Round, list[torch.Tensor]]:
        means = None
        while means is None:
            with recovering(self._recover_job):
                means = flight.wait()
            assert self._flight is not None, "it is under way until it is merged"
            flight = self._flight
        return flight, means

    def _note_merged(self, flight: Round) -> None:
        flight.moves = ()
        self._landed = flight
        self._forget_calls()
        told, self._news = flight.wait_told(), None
        if flight.control is self._control and not bool(told[:, 0].any()):
            begun, decided = told[0, -len(NO_FLAGS) :].tolist()
            self._news = MemberNews((int(begun), int(decided)), ())

    # The ways of an epoch.

    def _reserve(self, number: int) -> range:
        streams = super()._reserve(number)
        if number:
            self._reserved.append(streams)
        return streams

    def _open_ways(self) -> tuple[ControlStream, BucketCollectives]:
        """Return ways of this epoch alone: a thread may still begin sums of a round that is over with the last one."""
        control = ControlStream(self.collectives.communicator, stream=self._reserve(1).start)
        return control, self._open_parts()

    def _open_party(self, streams: range) -> ElasticAllReduceUpdater:
        job = self.collectives.communicator
        group, schedules = self._open_group(streams)
        control = ElasticControlStream(
            group,
            stream=streams[1],
            num_places=1 + max(job.members),
            recover=self._recover_in_party,
            job=job,
        )
        self._party_control = control
        reports = ElasticReports(control, lambda commit: control.forget(before=commit.number), lambda: NO_FLAGS)
        collectives = BucketCollectives(group, control=control, bucket_schedules=schedules)
        setting = replace(self._setting, collectives=collectives, recover=self._recover_in_party, reports=reports)
        return ElasticAllReduceUpdater(setting)

    def _open_group(self, streams: range) -> tuple[Communicator, tuple[BucketSchedule, ...]]:
        group, schedules = super()._open_group(streams)
        self.collectives.communicator.watch_failure(lambda error: group.interrupt(str(error)))
        return group, schedules

    def _recover_in_party(self, error: BaseException) -> None:
        """Recover from what a call of the party has ended with: calls of the job end with it."""
        self.collectives.communicator.end_with(self._party.collectives.communicator)
        self._recover_job(error)

    def _enter(self) -> None:
        """Make rounds on the job's new communicator, with parties of those that are left."""
        job = self.collectives.communicator
        self._reserved = []
        self._part_collectives.close()
        self._control, self._part_collectives = self._open_ways()
        left = (tuple(member for member in ranks if member in job.members) for ranks in self._party_members)
        self._party_members = tuple(ranks for ranks in left if ranks)
        self.parties = tuple(tuple(map(job.members.index, ranks)) for ranks in self._party_members)
        self._counts = replace(self._counts, parties=self.parties)
        ranks = next(ranks for ranks in self.parties if job.rank in ranks)
        factor, self._ranks = len(self._ranks) / len(ranks), ranks
        self._weight *= factor
        self._unsent = [(samples * factor, steps) for samples, steps in self._unsent]
        if self._flight is not None:
            self._flight.weight *= factor

    def _resume_party(self, party: ElasticAllReduceUpdater, control: ElasticControlStream, streams: range) -> None:
        """Go on in a party of those that are left; its calls are ended as those of a job are."""
        before, job = party.collectives.communicator, self.collectives.communicator
        before.interrupt("the members of the job change")
        before.close()
        own = control.positions()
        group, schedules = self._open_group(streams)
        control.enter(group, stream=streams[1], num_places=1 + max(job.members), job=job)
        party.collectives.enter(group, schedules)
        calls = ControlStream(group, stream=streams[0])
        control.settle(calls.all_gather(own, "calls of the party"), calls)
        control.begin_again()
        party.resume()
