"""How a fleet grows: members and newcomers switch to the larger job's fabric between two steps, in the same way.

A newcomer begins as a job of one rank, whose ``distribute()`` puts its model into training on itself. Then all that are
in the larger job do the same: take the training away, go over to the new fabric, meet there, give the newcomers what
they lack, and put the model into training anew.

Until all have met, the members can go back: the old fabric stays open, and what fails is an attempt. After that a loss
is one of the new epoch. As long as nothing is committed there, those go on who have the quorum of the old members: a
member that could not meet has gone back, and the others may have as well.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from syncline.elastic.calls import LOSSES
from syncline.elastic.entry import Entry
from syncline.elastic.epoch import Epoch
from syncline.elastic.growth import Growth, LargerFabric
from syncline.elastic.job_record import JobRecord
from syncline.elastic.reports import NO_FLAGS, Flags
from syncline.elastic.sources import choose_sources
from syncline.endpoints import format_endpoint
from syncline.errors import MismatchError, UpdateError, name_ranks
from syncline.pytorch.checkpoint_group import CheckpointGroup
from syncline.pytorch.elastic_training import Recovery
from syncline.pytorch.fabric_place import FabricPlace
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.installation import Installation
from syncline.pytorch.newcomer_state import Position, give_state, take_state
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.runtime import Communicator
from syncline.updates.control import ControlStream
from syncline.updates.membership import Membership, Quorum

SEVERAL = "it trains several models, or one with several optimizers, whose states are not of the same step"


class GrowingTraining:
    """The training of a job that may grow."""

    def __init__(self, installation: Installation, optimizer: DistributedOptimizer) -> None:
        self.extra: Any = None
        self.offer: Callable[[], Any] | None = None
        self.lines = installation.describe()
        """What a newcomer's training must have alike."""
        self._installation = installation
        self._optimizer = optimizer
        self._iteration = 0
        optimizer.grow_with(self)

    @property
    def iteration(self) -> int:
        """Steps that were made before the training was taken away last."""
        return self._iteration

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

    def end_step(self) -> None:
        """Take in who is connected; every member comes here at the end of the same step."""
        growth, training = self._installation.fleet.growth, self._installation.elastic_training
        if growth is not None and training is not None:
            growth.end_step(training.flags)

    def leave(self) -> int:
        """Take the training away, and return the steps that it has made."""
        training = self._installation.training
        assert training is not None, "a training that was taken away makes no steps"
        self._iteration = self.recovery.num_steps = training.updater.iteration
        self._installation.end(is_failing=False)
        return self._iteration

    def resume(self) -> None:
        """Put the model into training on the fleet as it is now, without ranks that are lost meanwhile."""
        while True:
            try:
                training = self._installation.install(has_values=True)
            except LOSSES as error:
                self.recovery.recover(error)
            else:
                break
        training.updater.step_number = self._iteration
        self._optimizer.go_on(training, self._installation.elastic_training)

    def give(self, control: ControlStream) -> None:
        """Give newcomers the state, as the first rank of ``control``."""
        extra = self.offer() if self.offer is not None else None
        model, group = self._installation.model, self._group()
        give_state(model, group, control, Position(iteration=self._iteration, extra=extra))

    def take(self, control: ControlStream) -> None:
        """Take what :meth:`give` gives."""
        position = take_state(self._installation.model, self._group(), control)
        self._iteration, self.extra = position.iteration, position.extra
        self.recovery.num_steps = position.iteration

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
        self._growing: GrowingTraining | None = None
        self._job: JobRecord | None = None
        self._why_not = ""
        self._num_old: int | None = None
        """How many of the first ranks were members before the switch, as long as nothing is committed after it."""
        self._leaving: list[threading.Thread] = []

    @property
    def join_address(self) -> str | None:
        """Where this rank lets newcomers in; None if it does not yet."""
        return format_endpoint(*self._service.join_address) if self._service is not None else None

    def begin(self, growing: GrowingTraining) -> None:
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
                "distribute(..., AllReduce(), elastic=True)"
            )
        self._why_not = self._why_not or why
        if self._job is not None:
            self._open(self._job, self._fleet.rank)

    def flags(self) -> Flags:
        """Return what this rank tells in a commit."""
        if self._job is None or self._service is None or (self._growing is not None and self._growing.is_joining):
            return NO_FLAGS
        return self._service.flags()

    def regroup(self, epoch: Epoch) -> None:
        """Go on without ranks that are lost: ``epoch`` is what the fleet is about to enter.

        Raises :class:`QuorumLostError` where members may have gone back to the fabric before, and go on there.
        """
        if self._num_old is not None:
            old = Membership(tuple(range(self._num_old)))
            for rank in set(old.members).difference(epoch.members):
                old.lose(rank)
            if (shortage := old.shortage(Quorum())) is not None:
                raise shortage
        if self._job is not None:
            lost = {rank for rank, one in enumerate(self._fleet.epoch.members) if one not in epoch.members}
            self._open(self._job.without(lost, epoch=epoch.number), epoch.rank_of(self._fleet.base.rank))

    def end_step(self, flags: Flags) -> None:
        """Do what the last commit said; where it said so, switch."""
        if self._service is None or self._job is None or self._growing is None:
            return
        self._num_old = None
        if not flags[1]:
            self._service.follow(*flags)
            return
        epoch = self._job.epoch
        self._growing.leave()
        if self._job.epoch != epoch or (larger := self._service.follow(*flags)) is None:
            self._growing.resume()  # a rank was lost meanwhile, and the attempt with it
            return
        self._switch(self._growing, larger)

    def close(self) -> None:
        """Listen no more, and wait for nobody."""
        if self._entry is not None:
            self._entry.close()
            self._entry.loop.stop()
        if self._service is not None:
            self._service.close()
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

    def _enter(self, entry: Entry, growing: GrowingTraining) -> None:
        """Come into the running job, from a job of one rank."""
        admitted = entry.enter(growing.lines, self._fleet.timeout_s)
        entry.close()
        self._entry = None
        growing.leave()
        try:
            self._switch(growing, LargerFabric(admitted=admitted, loop=entry.loop))
        except BaseException:  # the members are told at once
            self._fleet.base.interrupt("this newcomer does not take part")
            self._fleet.base.close()
            raise

    def _switch(self, growing: GrowingTraining, larger: LargerFabric) -> None:
        """Go over to the larger job's fabric with all of its ranks, or stay if they do not meet there."""
        fleet, job, rank = self._fleet, larger.admitted.job, larger.admitted.rank
        is_newcomer, num_old = self._job is None, job.world_size - larger.admitted.num_newcomers
        if rank == 0 and self._service is not None:
            self._service.switched()
        before = fleet.enter_fabric(_place_of(larger, fleet))
        regroup = growing.recovery.enter_fabric()
        try:
            self._meet(job)
        except (*LOSSES, MismatchError):
            if is_newcomer:
                regroup.close()
                before.close()
                raise
            left = fleet.enter_fabric(before)
            growing.recovery.return_to(regroup)
            left.base.abort()
            self._open(self._job or job, fleet.rank)
            growing.resume()
            return
        regroup.close()
        self._leave(before)
        self._num_old = num_old
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

    def _transfer(self, growing: GrowingTraining, job: JobRecord, num_old: int) -> None:
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
    def _give(growing: GrowingTraining, control: ControlStream) -> None:
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

    def _tell(self, growing: GrowingTraining, joined: tuple[int, ...]) -> None:
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
