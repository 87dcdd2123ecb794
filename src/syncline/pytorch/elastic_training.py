"""What an elastic job does after a loss: regroup, open the new epoch's communicator, and let each training go on there.

A training's hooks, buckets and optimizer stay as they are. What moves is what it makes collectives with: its control
streams (:class:`~syncline.updates.elastic_calls.ElasticControlStream`) and its bucket collectives, which all other
parts ask for rank, world size and members. So a loss may be met anywhere in a step, also in the middle of a backward
pass.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from syncline.errors import FabricClosedError, MismatchError, UpdateError, escape_text
from syncline.members import LOSSES, Elastic, Epoch, MembershipChange, describe_ranks
from syncline.members.agreement import Go
from syncline.members.job_record import NO_FLAGS, Flags
from syncline.pytorch.fleet import Fleet
from syncline.runtime.regroup import Regroup
from syncline.updates import Clustered, Overlapped, Setting, Updater, UpdateRule
from syncline.updates.bucket_schedule import BucketSchedule
from syncline.updates.control import ControlStream
from syncline.updates.elastic_calls import ElasticCall, ElasticControlStream, ElasticReports, Positions
from syncline.updates.elastic_sharded import ElasticShardedUpdater

Watcher = Callable[[MembershipChange], None]


class ElasticPart(Protocol):
    """What goes on in a new epoch: a training, in the order in which they were distributed."""

    @property
    def iteration(self) -> int:
        """Steps that this rank has made."""

    @property
    def streams(self) -> list[range]:
        """The streams that it uses in this epoch."""

    def leaving(self) -> int | None:
        """Return who leaves at the end of this step, as all have told with it; None if nobody, or none knows yet."""

    def positions(self) -> Any:
        """Return what this rank has done of the calls that others may miss, as JSON says it; nothing is under way."""

    def enter(self, fleet: Fleet) -> None:
        """Make calls on the fleet's communicator from now on, on streams that are reserved anew; no call is made."""

    def settle(self, told: Sequence[Any], control: ControlStream) -> None:
        """Take over what others have done, and begin again what nobody has; positions were ``told`` in rank order.

        What is under way in between must be begun so that a later epoch can begin it again.
        """


class Recovery:
    """One rank's way from epoch to epoch."""

    def __init__(self, fleet: Fleet, settings: Elastic) -> None:
        self.settings = settings
        self._fleet = fleet
        self._parts: list[ElasticPart] = []
        self._watchers: list[Watcher] = []
        self._unsettled: list[MembershipChange] = []
        self._settled: list[MembershipChange] = []
        self._confirming = range(0)
        """The stream of the first calls in this epoch."""
        self._regroup = self._open_regroup()

    @property
    def epoch(self) -> Epoch:
        """The current epoch."""
        return self._fleet.epoch

    def add(self, part: ElasticPart) -> None:
        """Let a training go on after losses; every rank adds the same ones in the same order."""
        self._parts.append(part)

    def remove(self, part: ElasticPart) -> None:
        """Forget a training that has ended."""
        if part in self._parts:
            self._parts.remove(part)

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` of every change, at the end of the first step with the new members."""
        self._watchers.append(watcher)

    def recover(self, error: BaseException) -> None:
        """Go on in a new epoch after ``error``, or raise it if it is no loss; see :data:`~syncline.updates.Recover`.

        Raises :class:`QuorumLostError` where this rank does not go on.
        """
        if not isinstance(error, LOSSES) or self._fleet.communicator.loss is None:
            raise error
        cause: BaseException = error
        while True:
            go = self._agree(cause)
            try:
                self._enter(go)
            except LOSSES as another:  # of the new epoch
                cause = another
            else:
                return

    def expect_leave(self, rank: int) -> None:
        """Take note that ``rank`` of the fabric leaves at the end of this step, as all members know."""
        self._regroup.expect_leave(rank)

    def end_step(self, iteration: int) -> None:
        """Tell watchers of changes, if the step that has ended here is the first with the new members."""
        while self._settled and self._settled[0].iteration <= iteration:
            change = self._settled.pop(0)
            for watcher in tuple(self._watchers):
                watcher(change)

    def go_back(self, before: int, iteration: int) -> None:
        """Tell that training goes on from a checkpoint, and let watchers be told at once."""
        self._settled = [replace(change, iteration=iteration) for change in self._settled]
        if self._fleet.rank == 0:
            line = (
                f"state of lost ranks is gone; training goes back from step {before} to the checkpoint of {iteration}"
            )
            print(f"syncline: {line}", file=sys.stderr, flush=True)

    def enter_fabric(self) -> Regroup:
        """Agree on the fleet's new fabric from now on; return who agreed on the one before, for its owner to close."""
        self._confirming = range(0)  # streams of another fabric
        before, self._regroup = self._regroup, self._open_regroup()
        return before

    def return_to(self, regroup: Regroup) -> None:
        """Go back to the fabric before."""
        self._regroup.close()
        self._regroup = regroup

    def tell_joined(self, joined: tuple[int, ...], iteration: int) -> None:
        """Tell watchers that ranks have come in, at the end of a step."""
        fleet = self._fleet
        change = MembershipChange(
            epoch=fleet.epoch.number, members=fleet.members, lost=(), joined=joined, iteration=iteration
        )
        for watcher in tuple(self._watchers):
            watcher(change)

    def flags(self) -> Flags:
        """Return what this rank tells of newcomers in a commit."""
        return NO_FLAGS if self._fleet.growth is None else self._fleet.growth.flags()

    def close(self) -> None:
        """Take part in no further agreement."""
        with contextlib.suppress(FabricClosedError):  # a newcomer that was not let in has left already
            self._regroup.close()

    def _open_regroup(self) -> Regroup:
        fleet = self._fleet
        (stream,) = fleet.reserve_streams(1)
        return Regroup(
            fleet.communicator,
            fleet.epoch,
            stream=stream,
            min_ranks=self.settings.min_ranks,
            timeout_s=fleet.timeout_s,
        )

    def _agree(self, cause: BaseException) -> Go:
        fleet = self._fleet
        for part in self._parts:
            if (leaving := part.leaving()) is not None:
                self.expect_leave(leaving)
        communicator, loss = fleet.communicator, fleet.communicator.loss
        accused = [] if loss is None or loss.is_hearsay else [communicator.members[loss.rank]]
        communicator.interrupt(str(cause))
        go = self._regroup.agree(accused, first_free=fleet.next_stream)
        if fleet.growth is not None:
            fleet.growth.check(go.epoch)
        lost = tuple(sorted(set(fleet.epoch.members).difference(go.epoch.members)))
        self._tell(go, lost, cause)
        members, lost = fleet.numbers_of(go.epoch.members), fleet.numbers_of(lost)
        change = MembershipChange(epoch=go.epoch.number, members=members, lost=lost, joined=(), iteration=0)
        self._unsettled.append(change)
        return go

    def _enter(self, go: Go) -> None:
        """Open the new epoch's communicator, and let all parts go on there."""
        fleet = self._fleet
        user = fleet.communicator.user_stream
        over = [range(user, user + 1), self._confirming, *(streams for part in self._parts for streams in part.streams)]
        if fleet.growth is not None:
            fleet.growth.regroup(go.epoch)
        fleet.enter_epoch(go.epoch, first_stream=go.first_stream)
        self._regroup.enter(fleet.communicator, over=over)
        self._confirming = fleet.reserve_streams(1)
        (stream,) = self._confirming
        control = ControlStream(fleet.communicator, stream=stream, timeout_s=fleet.timeout_s)
        own = [[part.iteration, part.positions()] for part in self._parts]
        told = control.all_gather([go.epoch.number, own], "epoch and positions")
        if {number for number, _ in told} != {go.epoch.number}:
            raise MismatchError(f"Ranks have met in different epochs: {[number for number, _ in told]}")
        for place, part in enumerate(self._parts):
            part.enter(fleet)
            part.settle([parts[place][1] for _, parts in told], control)
        iteration = 1 + max(parts[0][0] for _, parts in told)
        self._settled += [replace(change, iteration=iteration) for change in self._unsettled]
        self._unsettled.clear()

    def _tell(self, go: Go, lost: Sequence[int], cause: BaseException) -> None:
        """Write the change into the trace, and from one rank into the log."""
        fleet = self._fleet
        hosts = fleet.base.topology
        names = describe_ranks(lost, lambda rank: f"rank {fleet.numbers[rank]} (host {hosts.host_of(rank).name})")
        fleet.trace.instant(
            f"epoch {go.epoch.number}", "communication", members=list(go.epoch.members), cause=str(cause)
        )
        if lost and fleet.base.rank == go.epoch.members[0]:
            steps = f" in step {self._parts[0].iteration + 1}" if self._parts else ""
            left = f"{go.epoch.world_size} ranks go on" if go.epoch.world_size > 1 else "one rank goes on"
            verb = "left" if all(loss.has_left for loss in go.lost.values()) else "lost"
            line = f"{names} {verb}{steps}; {left} in epoch {go.epoch.number} ({escape_text(str(cause))})"
            print(f"syncline: {line}", file=sys.stderr, flush=True)


class ElasticTraining:
    """One training that goes on after losses: its streams and its bucket collectives move, the rest stays.

    ``plan`` returns the schedules of its buckets on the fleet's communicator, on streams from the given one on.
    """

    def __init__(self, recovery: Recovery, plan: Callable[[int], tuple[BucketSchedule, ...]]) -> None:
        self.recovery = recovery
        self._plan = plan
        self.load: Callable[[], None] | None = None
        """Loads the newest checkpoint on all ranks, where the settings name a folder."""
        self.leaving: Callable[[], int | None] = lambda: None
        """Returns who leaves at the end of this step; set by who knows the reports."""
        self._streams: list[ElasticControlStream] = []
        self._updater: Updater | None = None
        self._reports: ElasticReports | None = None

    def recover(self, error: BaseException) -> None:
        """Go on after a loss; before the training has begun it is an error, as in any job."""
        if self._updater is None:
            raise error
        self.recovery.recover(error)

    def open_stream(self, fleet: Fleet) -> ElasticControlStream:
        """Return a control stream that goes on in later epochs; every rank opens as many, in the same order."""
        (number,) = fleet.reserve_streams(1)
        stream = ElasticControlStream(
            fleet.communicator,
            stream=number,
            timeout_s=fleet.timeout_s,
            num_places=fleet.base.world_size,
            recover=self.recover,
        )
        self._streams.append(stream)
        return stream

    def extend(self, setting: Setting) -> Setting:
        """Return what a rule is given to work with in an elastic job."""
        self._reports = ElasticReports(self._streams[0], self._forget, self.recovery.flags)
        return replace(
            setting,
            recover=self.recover,
            reports=self._reports,
            start_commit=lambda label: self._streams[0].start_commit(lambda: torch.zeros(1), label),
            has_checkpoints=self.recovery.settings.checkpoint is not None,
        )

    def begin(self, updater: Updater) -> None:
        """Take part from now on."""
        self._updater = updater
        self.recovery.add(self)

    @property
    def iteration(self) -> int:
        """Steps that this rank has made."""
        return self._begun.iteration

    @property
    def streams(self) -> list[range]:
        """The streams that it uses in this epoch."""
        buckets = [range(one.stream, one.stream + 1) for one in self._begun.collectives.bucket_schedules]
        return [*(range(stream.number, stream.number + 1) for stream in self._streams), *buckets]

    def positions(self) -> list[Positions]:
        """Return what this rank has of each stream's calls."""
        return [stream.positions() for stream in self._streams]

    def enter(self, fleet: Fleet) -> None:
        """Move all to the fleet's communicator."""
        for stream in self._streams:
            (number,) = fleet.reserve_streams(1)
            stream.enter(fleet.communicator, stream=number, num_places=fleet.base.world_size)
        collectives = self._begun.collectives
        first = fleet.reserve_streams(len(self._begun.buckets)).start
        collectives.enter(fleet.communicator, self._plan(first))

    def settle(self, told: Sequence[list[Positions]], control: ControlStream) -> None:
        """Share results that some have and others not, then begin again what nobody has."""
        for place, stream in enumerate(self._streams):
            stream.settle([positions[place] for positions in told], control)
        for stream in self._streams:
            stream.begin_again()
        self._begun.resume()

    def end_step(self) -> None:
        """Take note that a step has ended, with the same parameters on all members."""
        if isinstance(self._begun, ElasticShardedUpdater) and self._begun.must_go_back():
            self._go_back(self._begun)
        self.recovery.end_step(self.iteration)

    @property
    def flags(self) -> Flags:
        """What the first member has told of newcomers with the last pass."""
        return self._reports.flags if self._reports is not None else NO_FLAGS

    def end(self) -> None:
        """Take part no more: the fleet closes."""
        self.recovery.remove(self)

    def _go_back(self, updater: ElasticShardedUpdater) -> None:
        """Go on from the newest checkpoint, since what the step has left is not whole."""
        assert self.load is not None, "without checkpoints the loss of state is an error"
        before = updater.iteration
        updater.go_back(self.load)
        self.recovery.go_back(before + 1, updater.iteration)

    @property
    def _begun(self) -> Updater:
        assert self._updater is not None, "a training takes part once it has begun"
        return self._updater

    def _forget(self, commit: ElasticCall) -> None:
        for stream in self._streams:
            stream.forget(before=commit)


def begin_elastic(
    fleet: Fleet, rule: UpdateRule, settings: Elastic | None, plan: Callable[[int], tuple[BucketSchedule, ...]]
) -> ElasticTraining | None:
    """Return how a training with ``rule`` goes on after losses; None if it does not, or does so by itself.

    Raises :class:`UpdateError` for models of one job of which not all can.
    """
    if fleet.is_elastic is not None and fleet.is_elastic != (settings is not None):
        raise UpdateError(
            "Either all models of a job are elastic or none is: give distribute() the same elastic= for each"
        )
    fleet.is_elastic = settings is not None
    if settings is None:
        return None
    if isinstance(rule, Overlapped | Clustered):  # which survive by themselves
        return None
    if fleet.recovery is None:
        fleet.recovery = recovery = Recovery(fleet, settings)
        fleet.on_close(lambda _: recovery.close())
    elif fleet.recovery.settings != settings:
        raise UpdateError(
            f"All models of a job have the same settings, here {fleet.recovery.settings!r}, not {settings!r}"
        )
    return ElasticTraining(fleet.recovery, plan)
