"""How a fleet grows: members and newcomers switch to the larger job's fabric between two steps, in the same way.

A newcomer begins as a job of one rank, whose ``distribute()`` puts its model into training on itself. Then all that are
in the larger job do the same: go over to the new fabric, meet there, take the training away, give the newcomers what
they lack, put the model into training anew, and divide state that has owners.

Until all have met, the members can go back: the old fabric stays open and the training in place, and what fails is an
attempt. After that a loss is one of the new epoch. As long as nothing is committed there, those go on who have the
quorum of the old members: a member that could not meet has gone back, and the others may have as well.

From the meeting on no rank waits for all others before the new training is in place, where it can go on after losses:
so wherever they meet a loss, all that are left have the same to go on with.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from syncline.endpoints import format_endpoint
from syncline.errors import MismatchError, UpdateError, name_ranks
from syncline.last_words import tell_number
from syncline.members import LOSSES, Epoch, Membership, Quorum
from syncline.members.job_record import NO_FLAGS, Flags, JobRecord
from syncline.pytorch.checkpoint.group import CheckpointGroup
from syncline.pytorch.elastic_training import Recovery
from syncline.pytorch.fabric_place import FabricPlace
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.installation import Installation
from syncline.pytorch.newcomer_state import Position, give_state, take_state
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.pytorch.training import Training
from syncline.runtime import Communicator
from syncline.runtime.joining import Entry, Growth, LargerFabric
from syncline.topology import Topology
from syncline.updates import Updater
from syncline.updates.control import ControlStream
from syncline.updates.elastic_sharded import ElasticShardedUpdater
from syncline.updates.peer_state import HeldState

SEVERAL = "it trains several models, or one with several optimizers, whose states are not of the same step"


class Growing(Protocol):
    """What a job does that may grow: all methods but the last two are called on every rank of the larger job."""

    lines: Sequence[str]
    """What a newcomer must have alike."""

    @property
    def iteration(self) -> int:
        """Steps that were made when it was put in place last."""

    @property
    def recovery(self) -> Recovery:
        """What takes the job from epoch to epoch."""

    @property
    def is_joining(self) -> bool:
        """Whether nobody can be let in just now."""

    @property
    def flags(self) -> Flags:
        """What the first member has told of newcomers last."""

    def finish(self) -> None:
        """End what is under way among the members as they are."""

    def leave(self) -> None:
        """Take away what makes calls in the old epoch."""

    def resume(self) -> None:
        """Make calls in the new one."""

    def give(self, control: ControlStream) -> None:
        """Give newcomers what they lack, as the first rank of ``control``."""

    def take(self, control: ControlStream) -> None:
        """Take what :meth:`give` gives."""


class GrowingTraining:
    """The training of a job that may grow."""

    def __init__(self, installation: Installation, optimizer: DistributedOptimizer) -> None:
        self.extra: Any = None
        self.offer: Callable[[], Any] | None = None
        self.parts: Mapping[str, str] = {}
        self.offer_parts: Callable[[], Mapping[str, str]] | None = None
        self.lines = installation.describe()
        """What a newcomer's training must have alike."""
        self._installation = installation
        self._optimizer = optimizer
        self._iteration = 0
        self._came_at: int | None = None
        """The steps that were made when this rank came in, if it did."""
        self._held: list[HeldState] = []
        """What this rank has of a divided state, while the training is taken away."""
        self._before: Updater | None = None
        """What worked on the model before it was taken away."""
        optimizer.grow_with(self)

    @property
    def iteration(self) -> int:
        """Steps that were made when the training was put in place last."""
        return self._iteration

    @property
    def has_just_come(self) -> bool:
        """Whether this rank has come into the running job, and has made no step in it yet."""
        return self._came_at is not None and self._came_at == self._training.updater.iteration

    @property
    def recovery(self) -> Recovery:
        """What takes the job from epoch to epoch."""
        recovery: Recovery = self._installation.fleet.recovery
        return recovery

    @property
    def is_joining(self) -> bool:
        """Whether it is within ``join()``."""
        training = self._installation.training
        return training is not None and training.is_joining

    @property
    def flags(self) -> Flags:
        """What the first member has told of newcomers with the last pass."""
        training = self._installation.elastic_training
        return NO_FLAGS if training is None else training.flags

    def end_step(self) -> None:
        """Take in who is connected; every member comes here at the end of the same step."""
        if self._installation.fleet.growth is not None:
            self._installation.fleet.growth.end_step()

    def finish(self) -> None:
        """End what is under way of the last step, among the members as they are."""
        self._training.finish()

    def leave(self) -> None:
        """Take the training away, and keep what it has."""
        updater = self._training.updater
        self._iteration, self._before = updater.iteration, updater
        self._held = updater.held_state() if isinstance(updater, ElasticShardedUpdater) else []
        self._installation.remove()

    def resume(self) -> None:
        """Put the model into training on the fleet as it is now; each rank gets its part of a divided state."""
        training = self._installation.install(has_values=True)
        training.updater.go_on_from(self._iteration)
        self._optimizer.go_on(training, self._installation.elastic_training)
        held, self._held = self._held, []
        if isinstance(training.updater, ElasticShardedUpdater):
            training.updater.admit(held)
        if self._before is not None:
            self._before.release()
            self._before = None
            gc.collect()  # a training refers to its parts and they to it, and they have as much memory as the model

    def give(self, control: ControlStream) -> None:
        """Give newcomers the state, as the first rank of ``control``."""
        position = Position(
            iteration=self._iteration,
            extra=self.offer() if self.offer is not None else None,
            parts=self.offer_parts() if self.offer_parts is not None else {},
        )
        give_state(self._installation.model, self._group(), control, position)

    def take(self, control: ControlStream) -> None:
        """Take what :meth:`give` gives."""
        position = take_state(self._installation.model, self._group(), control)
        self._iteration = self._came_at = position.iteration
        self.extra, self.parts = position.extra, position.parts
        self._held = []  # what this rank had alone counts no more

    @property
    def _training(self) -> Training:
        training = self._installation.training
        assert training is not None, "a training that was taken away makes no steps"
        return training

    def _group(self) -> CheckpointGroup:
        return CheckpointGroup(self._installation.model, self._installation.optimizer)


class FleetGrowth:
    """One rank's part; ``listen`` begins to let newcomers in, ``entry`` is the way in of one."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        machine: str,
        listen: Callable[[], Growth],
        service: Growth | None = None,
        entry: Entry | None = None,
    ) -> None:
        self._fleet = fleet
        self._machine = machine
        self._listen = listen
        self._service = service
        self._entry = entry
        self._is_newcomer = entry is not None
        self._growing: Growing | None = None
        self._job: JobRecord | None = None
        self._why_not = ""
        self._num_old: int | None = None
        """How many of the first ranks were members before the switch, as long as nothing is committed after it."""
        self._leaving: list[threading.Thread] = []

    @property
    def join_address(self) -> str | None:
        """Where this rank lets newcomers in; None if it does not yet."""
        return format_endpoint(*self._service.join_address) if self._service is not None else None

    def begin(self, growing: Growing) -> None:
        """Let a training grow; every rank calls this at the end of its ``distribute()``. A newcomer comes in here."""
        if self._growing is not None:
            self.refuse(SEVERAL)
            return
        self._growing = growing
        if self._service is None:
            self._service = self._listen()
        if self._entry is not None:
            self._enter(self._entry, growing)
            return
        self._open(self._first_record() if self._job is None else self._job, self._fleet.rank)

    def refuse(self, why: str) -> None:
        """Let nobody in from now on: a training was begun that cannot take part; every rank calls this.

        Raises :class:`UpdateError` in a process that is to come into a running job, or did.
        """
        if self._is_newcomer:
            raise UpdateError(
                f"This process comes into a running job (join=), which is not possible if {why}; its only training is "
                "distribute(..., elastic=True), with AllReduce() or Sharded()"
            )
        self._why_not = self._why_not or why
        if self._job is not None:
            self._open(self._job, self._fleet.rank)
        elif self._service is not None:
            self._service.refuse(self._why_not)

    def flags(self) -> Flags:
        """Return what this rank tells in a commit."""
        if self._job is None or self._service is None or (self._growing is not None and self._growing.is_joining):
            return NO_FLAGS
        return self._service.flags()

    def check(self, epoch: Epoch) -> None:
        """Raise :class:`QuorumLostError` where members of ``epoch`` must not go on in it.

        Others may have gone back to the fabric before, and go on there.
        """
        if self._num_old is not None:
            old = Membership(tuple(range(self._num_old)))
            for rank in set(old.members).difference(epoch.members):
                old.lose(rank)
            if (shortage := old.shortage(Quorum())) is not None:
                raise shortage

    def regroup(self, epoch: Epoch) -> None:
        """Go on without ranks that are lost: ``epoch`` is what the fleet is about to enter."""
        if self._job is not None:
            lost = {rank for rank, one in enumerate(self._fleet.epoch.members) if one not in epoch.members}
            self._open(self._job.without(lost, epoch=epoch.number), epoch.rank_of(self._fleet.base.rank))

    def end_step(self) -> None:
        """Do what the last commit said; where it said so, switch."""
        growing = self._growing
        if self._service is None or self._job is None or growing is None:
            return
        self._num_old = None
        if growing.flags[1]:
            growing.finish()  # where ranks may be lost, and the attempt with them
        larger = self._service.follow(*growing.flags)
        if larger is not None:
            self._switch(growing, larger)

    def close(self, *, is_over: bool = False) -> None:
        """Listen no more, and wait for nobody; newcomers that wait here are told whether the job ``is_over``."""
        if self._entry is not None:
            self._entry.close()
            self._entry.loop.stop()
        if self._service is not None:
            self._service.close(is_over=is_over)
        for thread in self._leaving:
            thread.join()

    def _first_record(self) -> JobRecord:
        fleet = self._fleet
        assert self._service is not None, "it listens"
        (stream,) = fleet.reserve_streams(1)
        control = ControlStream(fleet.communicator, stream=stream, timeout_s=fleet.timeout_s)
        told = control.all_gather([self._machine, *self._service.join_address], "where members listen")
        return JobRecord.first(
            fleet.topology,
            machines=[machine for machine, _, _ in told],
            join_addresses=[(host, port) for _, host, port in told],
        )

    def _open(self, job: JobRecord, rank: int) -> None:
        assert self._service is not None, "it listens"
        assert self._growing is not None, "a job that can grow has a training"
        self._job = job
        self._service.open(job, rank, lines=self._growing.lines, why_not=self._why_not)

    def _enter(self, entry: Entry, growing: Growing) -> None:
        """Come into the running job, from a job of one rank; :class:`SystemExit` with status 0 where it is over."""
        try:
            admitted = entry.enter(growing.lines, self._fleet.timeout_s)
        except EOFError:
            where = ", ".join(format_endpoint(*address) for address in entry.addresses)
            print(f"syncline: the job at {where} ended before this process could join it", file=sys.stderr, flush=True)
            self._fleet.close()
            raise SystemExit(0) from None
        entry.close()
        self._entry = None
        try:
            self._switch(growing, LargerFabric(admitted=admitted, loop=entry.loop))
        except BaseException:  # the members are told at once
            self._fleet.base.interrupt("this newcomer does not take part")
            self._fleet.base.close()
            raise

    def _switch(self, growing: Growing, larger: LargerFabric) -> None:
        """Go over to the larger job's fabric with all of its ranks, or stay if they do not meet there."""
        fleet, job, rank = self._fleet, larger.admitted.job, larger.admitted.rank
        is_newcomer, num_old = self._job is None, job.world_size - larger.admitted.num_newcomers
        if rank == 0 and self._service is not None:
            self._service.switched()
        before = fleet.enter_fabric(_place_of(larger, fleet))
        regroup = growing.recovery.enter_fabric()
        try:
            self._meet(job)
        except BaseException as error:
            if is_newcomer or not isinstance(error, (*LOSSES, MismatchError)):
                growing.leave()
                regroup.close()
                before.abort()
                raise
            left = fleet.enter_fabric(before)
            growing.recovery.return_to(regroup)
            left.abort()
            self._open(self._job or job, fleet.rank)
            return
        growing.leave()
        regroup.close()
        self._leave(before)
        self._num_old = num_old
        if is_newcomer:
            tell_number(job.numbers[rank])
        self._open(job, rank)
        self._transfer(growing, job, num_old)
        growing.resume()
        self._tell(growing, job.numbers[num_old:])

    def _meet(self, job: JobRecord) -> None:
        """Make the first call in the new epoch, which shows that all are in it."""
        control = self._control(self._fleet.communicator, self._fleet.reserve_streams(1).start)
        told = control.all_gather(job.epoch, "epoch of the larger job")
        if set(told) != {job.epoch}:
            raise MismatchError(f"Ranks have met in different epochs: {told}")

    def _transfer(self, growing: Growing, job: JobRecord, num_old: int) -> None:
        """Let every newcomer have what it lacks from its source."""
        fleet = self._fleet
        sources = choose_sources(job.topology, range(num_old), range(num_old, job.world_size))
        first = fleet.reserve_streams(2 * len(sources)).start
        for place, (source, served) in enumerate(sources.items()):
            if fleet.rank not in (source, *served):
                continue
            streams = range(first + 2 * place, first + 2 * place + 2)
            with fleet.communicator.open_group((source, *served), streams=streams) as group:
                control = self._control(group, streams[1])
                if fleet.rank == source:
                    self._give(growing, control)
                else:
                    growing.take(control)

    @staticmethod
    def _give(growing: Growing, control: ControlStream) -> None:
        try:
            growing.give(control)
        except LOSSES:
            return  # a newcomer is lost again: the next call of all ranks finds that

    def _control(self, communicator: Communicator, stream: int) -> ControlStream:
        return ControlStream(communicator, stream=stream, timeout_s=self._fleet.timeout_s)

    def _leave(self, place: FabricPlace) -> None:
        """Leave the old fabric, beside the training: that takes as long as its slowest rank."""
        thread = threading.Thread(target=place.close, name="syncline-leave", daemon=True)
        thread.start()
        self._leaving = [*(one for one in self._leaving if one.is_alive()), thread]

    def _tell(self, growing: Growing, joined: tuple[int, ...]) -> None:
        fleet, step = self._fleet, growing.iteration
        joined = tuple(number for number in joined if number in fleet.members)
        if not joined:  # lost again meanwhile
            return
        fleet.trace.instant(f"epoch {fleet.epoch.number}", "communication", members=list(fleet.members))
        if fleet.rank == 0:
            come = f"{name_ranks(joined)} came in after step {step}"
            print(
                f"syncline: {come}; {fleet.world_size} ranks go on in epoch {fleet.epoch.number}",
                file=sys.stderr,
                flush=True,
            )
        growing.recovery.tell_joined(joined, step + 1)


def _place_of(larger: LargerFabric, fleet: Fleet) -> FabricPlace:
    admitted = larger.admitted
    job = admitted.job
    communicator = Communicator(
        larger.loop,
        admitted.fabric,
        job.topology,
        trace=fleet.trace,
        timeout_s=fleet.timeout_s,
        on_close=larger.loop.stop,
    )
    epoch = Epoch(number=job.epoch, members=tuple(range(job.world_size)))
    return FabricPlace(base=communicator, communicator=communicator, epoch=epoch, numbers=job.numbers)


def choose_sources(topology: Topology, holders: Collection[int], lacking: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return whom each source gives to: the holder below the lowest node above both, the first of several.

    Newcomers below one link have the same nearest holders outside, and so the same source: what they need crosses that
    link in one broadcast.

    >>> choose_sources(Topology.load("two-racks-5-3"), holders=(0, 1, 5), lacking=(4, 6, 7))
    {0: (4,), 5: (6, 7)}
    """
    served: dict[int, list[int]] = defaultdict(list)
    for rank in lacking:
        source = min(holders, key=lambda holder: (-_shared(topology, holder, rank), holder))
        served[source].append(rank)
    return {source: tuple(ranks) for source, ranks in sorted(served.items())}


def _shared(topology: Topology, first: int, second: int) -> int:
    """Return how many nodes below the root are above both."""
    above = zip(reversed(topology.path(first)), reversed(topology.path(second)), strict=False)
    count = 0
    for one, other in above:
        if one is not other:
            break
        count += 1
    return count
