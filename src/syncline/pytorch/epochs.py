"""How a fleet goes from epoch to epoch: without ranks that are lost, and with newcomers.

After a loss all that are left regroup, open the new epoch's communicator on the same fabric, and let each training go
on there; a loss may be met anywhere in a step, also in the middle of a backward pass.

To grow, members and newcomers switch to the larger job's fabric between two steps, in the same way. A newcomer begins
as a job of one rank, whose ``distribute()`` puts its model into training on itself. Then all that are in the larger job
do the same: go over to the new fabric, meet there, take the training away, give the newcomers what they lack, put the
model into training anew, and divide state that has owners.

Until all have met, the members can go back: the old fabric stays open and the training in place, and what fails is an
attempt. After that a loss is one of the new epoch. As long as nothing is committed there, those go on who have the
quorum of the old members: a member that could not meet has gone back, and the others may have as well.

From the meeting on no rank waits for all others before the new training is in place, where it can go on after losses:
so wherever they meet a loss, all that are left have the same to go on with.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from syncline.arguments import Whole, checked
from syncline.endpoints import format_endpoint
from syncline.errors import FabricClosedError, MismatchError, UpdateError, escape_text, name_ranks
from syncline.fabric.slice_executor import NUM_STREAMS
from syncline.last_words import tell
from syncline.members import (
    LOSSES,
    Elastic,
    Epoch,
    Membership,
    MembershipChange,
    Quorum,
    QuorumLostError,
    describe_ranks,
)
from syncline.observe import say
from syncline.runtime import Communicator, joining
from syncline.topology import Topology
from syncline.updates.control import ControlStream

if TYPE_CHECKING:
    from syncline.members.agreement import Go
    from syncline.members.job_record import Flags, JobRecord
    from syncline.runtime.regroup import Regroup

SEVERAL = "it trains several models, or one with several optimizers, whose states are not of the same step"
Watcher = Callable[[MembershipChange], None]


@dataclass(eq=False, kw_only=True)
class FabricPlace:
    """Where this rank makes its calls: which fabric and epoch it is in, and which streams are free there."""

    base: Communicator
    """The communicator of all ranks, on whose fabric later epochs are."""
    communicator: Communicator
    """That of the current epoch."""
    epoch: Epoch
    numbers: tuple[int, ...]
    """By rank of :attr:`base`, what ``members`` calls it: who comes later has the next number."""
    next_stream: int = 1
    """The first stream that is free."""
    recovery: Recovery | None = None
    """What takes the job from epoch to epoch, if its models are elastic."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def numbers_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return what the job calls these ranks of :attr:`base`."""
        return tuple(self.numbers[rank] for rank in ranks)

    @checked
    def reserve_streams(self, number: Whole) -> range:
        """Take streams for the calls of a model; every rank takes as many, in the same order."""
        with self._lock:
            first = self.next_stream
            self.next_stream += number
        return range(first, first + number)

    def enter_epoch(self, epoch: Epoch, *, first_stream: int) -> None:
        """Go on with the members of ``epoch``, on streams that no rank has used before; every member does so alike."""
        group = self.base.open_group(epoch.members, streams=range(first_stream, NUM_STREAMS))
        before, self.communicator = self.communicator, group
        self.epoch, self.next_stream = epoch, first_stream + 1
        self._on_move()
        if before is not self.base:
            before.close()

    def enter_fabric(self, place: FabricPlace) -> FabricPlace:
        """Go on with the communicator of another fabric; ``place`` is then where this rank was, which stays open."""
        before = self.base, self.communicator, self.epoch, self.numbers, self.next_stream
        self.base, self.communicator, self.epoch = place.base, place.communicator, place.epoch
        self.numbers, self.next_stream = place.numbers, place.next_stream
        place.base, place.communicator, place.epoch, place.numbers, place.next_stream = before
        self._on_move()
        return place

    def close(self) -> None:
        """Leave it in good order, and for good."""
        self.leave()

    def leave(self, why: str = "") -> None:
        """Leave it: in good order, if its ranks do so too, or at once, and say ``why``.

        After a failure of a communicator itself, its ``close()`` gives the others time to read of that.
        """
        for communicator in dict.fromkeys((self.communicator, self.base)):
            if why and communicator.loss is None:
                communicator.abort(why)
            else:
                communicator.close()

    def _on_move(self) -> None:
        """Do what follows where the communicator is another one."""


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

    def enter(self, fleet: FabricPlace) -> None:
        """Make calls on the fleet's communicator from now on, on streams that are reserved anew; no call is made."""

    def settle(self, told: Sequence[Any], control: ControlStream) -> None:
        """Take over what others have done, and begin again what nobody has; positions were ``told`` in rank order.

        What is under way in between must be begun so that a later epoch can begin it again.
        """


class Recovery:
    """One rank's way from epoch to epoch; until :meth:`begin` by growth alone: trainings survive losses themselves."""

    def __init__(self, fleet: FabricPlace, settings: Elastic, growth: FleetGrowth | None) -> None:
        self.settings = settings
        self._fleet = fleet
        self._growth = growth
        self._parts: list[ElasticPart] = []
        self._watchers: list[Watcher] = []
        self._unsettled: list[MembershipChange] = []
        self._settled: list[MembershipChange] = []
        self._confirming = range(0)
        """The stream of the first calls in this epoch."""
        self._regroup: Regroup | None = None

    def begin(self) -> None:
        """Agree with the others after losses from now on; every rank calls this, and twice is once."""
        if self._regroup is None:
            self._regroup = self._open_regroup()

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
        """Go on in a new epoch after ``error``, or raise it if it is no loss: ``recover`` of every setting.

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
        assert self._regroup is not None, "it takes note of whoever leaves"
        self._regroup.expect_leave(rank)

    def end_step(self, iteration: int) -> None:
        """Tell watchers of changes, if the step that has ended here is the first with the new members."""
        while self._settled and self._settled[0].iteration <= iteration:
            self.tell(self._settled.pop(0))

    def go_back(self, before: int, iteration: int) -> None:
        """Tell that training goes on from a checkpoint, and let watchers be told at once."""
        self._settled = [replace(change, iteration=iteration) for change in self._settled]
        if self._fleet.communicator.rank == 0:
            say(f"state of lost ranks is gone; training goes back from step {before} to the checkpoint of {iteration}")

    def enter_fabric(self) -> Regroup | None:
        """Agree on the fleet's new fabric from now on; return who agreed on the one before, for its owner to close."""
        self._confirming = range(0)  # streams of another fabric
        before, self._regroup = self._regroup, None
        if before is not None:
            self.begin()
        return before

    def return_to(self, regroup: Regroup | None) -> None:
        """Go back to the fabric before."""
        _close(self._regroup)
        self._regroup = regroup

    def tell(self, change: MembershipChange) -> None:
        """Tell watchers of what has changed at the end of a step that all have made."""
        for watcher in tuple(self._watchers):
            watcher(change)

    def flags(self) -> Flags:
        """Return what this rank tells of newcomers in a commit."""
        from syncline.members.job_record import NO_FLAGS

        return NO_FLAGS if self._growth is None else self._growth.flags()

    def close(self) -> None:
        """Take part in no further agreement."""
        with contextlib.suppress(FabricClosedError):  # a newcomer that was not let in has left already
            _close(self._regroup)

    def _open_regroup(self) -> Regroup:
        from syncline.runtime.regroup import Regroup  # of elastic jobs alone

        fleet = self._fleet
        (stream,) = fleet.reserve_streams(1)
        return Regroup(
            fleet.communicator,
            fleet.epoch,
            stream=stream,
            min_ranks=self.settings.min_ranks,
            timeout_s=fleet.communicator.timeout_s,
        )

    def _agree(self, cause: BaseException) -> Go:
        fleet = self._fleet
        for part in self._parts:
            if (leaving := part.leaving()) is not None:
                self.expect_leave(leaving)
        assert self._regroup is not None, "who survives losses by itself does not recover"
        fleet.communicator.interrupt(str(cause))
        go = self._regroup.agree(first_free=fleet.next_stream)
        if self._growth is not None:
            self._growth.check(go.epoch)
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
        if self._growth is not None:
            self._growth.regroup(go.epoch)
        fleet.enter_epoch(go.epoch, first_stream=go.first_stream)
        assert self._regroup is not None, "it has agreed"
        self._regroup.enter(fleet.communicator, over=over)
        self._confirming = fleet.reserve_streams(1)
        (stream,) = self._confirming
        control = ControlStream(fleet.communicator, stream=stream)
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
        fleet.communicator.trace.instant(
            f"epoch {go.epoch.number}", "communication", members=list(go.epoch.members), cause=str(cause)
        )
        if lost and fleet.base.rank == go.epoch.members[0]:
            steps = f" in step {self._parts[0].iteration + 1}" if self._parts else ""
            left = f"{go.epoch.world_size} ranks go on" if go.epoch.world_size > 1 else "one rank goes on"
            verb = "left" if all(loss.has_left for loss in go.lost.values()) else "lost"
            say(f"{names} {verb}{steps}; {left} in epoch {go.epoch.number} ({escape_text(str(cause))})")


def _close(regroup: Regroup | None) -> None:
    if regroup is not None:
        regroup.close()


class Growing(Protocol):
    """What a job does that may grow: all methods but the last two are called on every rank of the larger job."""

    @property
    def period(self) -> int:
        """Of so many steps one, at least, may let newcomers in."""

    @property
    def lines(self) -> Sequence[str]:
        """What a newcomer must have alike."""

    @property
    def iteration(self) -> int:
        """Steps that were made when it was put in place last."""

    @property
    def is_joining(self) -> bool:
        """Whether nobody can be let in just now."""

    @property
    def flags(self) -> Flags:
        """What the first member has told of newcomers last."""

    def finish(self) -> None:
        """End what is under way among the members as they are."""

    def meet(self, control: ControlStream, topology: Topology, num_old: int) -> None:
        """Agree on how to go on, as one of all ranks of the larger job; the first ``num_old`` are no newcomers."""

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """Ranks of the larger job that have the same to give, as was agreed."""

    def leave(self) -> None:
        """Take away what makes calls in the old epoch."""

    def resume(self) -> None:
        """Make calls in the new one."""

    def give(self, control: ControlStream) -> None:
        """Give newcomers what they lack, as the first rank of ``control``."""

    def take(self, control: ControlStream) -> None:
        """Take what :meth:`give` gives."""


class FleetGrowth:
    """One rank's part; ``listen`` begins to let newcomers in, ``entry`` is the way in of one."""

    def __init__(
        self,
        fleet: FabricPlace,
        *,
        machine: str,
        listen: Callable[[], joining.Growth],
        service: joining.Growth | None = None,
        entry: joining.Entry | None = None,
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
        self._epoch, self._numbers = fleet.epoch, fleet.numbers
        """That of the record; its members are ranks of the training's fabric, which have these numbers."""
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
        self._open(self._first_record() if self._job is None else self._job)

    def refuse(self, why: str) -> None:
        """Let nobody in from now on: a training was begun that cannot take part; every rank calls this.

        Raises :class:`UpdateError` in a process that is to come into a running job, or did.
        """
        if self._is_newcomer:
            raise UpdateError(
                f"This process comes into a running job (join=), which is not possible if {why}; its only training is "
                "distribute(..., elastic=True)"
            )
        self._why_not = self._why_not or why
        if self._job is not None:
            self._open(self._job)
        elif self._service is not None:
            self._service.refuse(self._why_not)

    def flags(self) -> Flags:
        """Return what this rank tells in a commit."""
        from syncline.members.job_record import NO_FLAGS

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

    @property
    def elders(self) -> tuple[int, ...]:
        """The ranks that were members before the switch, as long as nothing is committed after it."""
        return tuple(range(self._num_old or 0))

    def note_loss(self, rank: int) -> None:
        """Let nobody in until the record is without ``rank`` of the fabric; from any thread."""
        if self._service is not None:
            self._service.note_loss(self._numbers[rank])

    def lose(self, lost: Collection[int], iteration: int) -> bool:
        """Go on without these ranks of the fabric, as all members do alike after that step; whether there were any.

        Raises :class:`QuorumLostError` where this rank is among them.
        """
        members, own = self._epoch.members, self._fleet.base.rank
        if own in lost:
            others = tuple(rank for rank in members if rank != own)
            raise QuorumLostError("This rank was left behind: the others hold it lost; start it again", missing=others)
        if set(lost).isdisjoint(members):
            return False
        self._num_old = None
        left = tuple(rank for rank in members if rank not in lost)
        self.regroup(replace(self._epoch, members=left))  # calls of the fleet go on in the epoch with them
        if self._growing is not None and self._job is not None:
            numbers = tuple(self._numbers[rank] for rank in members if rank in lost)
            epoch, stay = self._epoch.number, self._job.numbers
            change = MembershipChange(epoch=epoch, members=stay, lost=numbers, joined=(), iteration=iteration + 1)
            self._recovery.tell(change)
        return True

    def regroup(self, epoch: Epoch) -> None:
        """Go on without ranks that are lost: ``epoch`` is what the fleet is about to enter."""
        before, self._epoch = self._epoch, epoch
        if self._job is not None:
            lost = {rank for rank, one in enumerate(before.members) if one not in epoch.members}
            self._open(self._job.without(lost, epoch=epoch.number))

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

    @property
    def _recovery(self) -> Recovery:
        assert self._fleet.recovery is not None, "a training that may grow is elastic"
        return self._fleet.recovery

    def _first_record(self) -> JobRecord:
        from syncline.members.job_record import JobRecord  # of jobs that grow alone

        fleet = self._fleet
        assert self._service is not None, "it listens"
        (stream,) = fleet.reserve_streams(1)
        control = ControlStream(fleet.communicator, stream=stream)
        told = control.all_gather([self._machine, *self._service.join_address], "where members listen")
        return JobRecord.first(
            fleet.communicator.topology,
            machines=[machine for machine, _, _ in told],
            join_addresses=[(host, port) for _, host, port in told],
        )

    def _open(self, job: JobRecord) -> None:
        assert self._service is not None, "it listens"
        assert self._growing is not None, "a job that can grow has a training"
        self._job = job
        rank = self._epoch.rank_of(self._fleet.base.rank)
        self._service.open(job, rank, lines=self._growing.lines, why_not=self._why_not)

    def _enter(self, entry: joining.Entry, growing: Growing) -> None:
        """Come into the running job, from a job of one rank; :class:`SystemExit` with status 0 where it is over."""
        try:
            admitted = entry.enter(growing.lines, growing.period * self._fleet.communicator.timeout_s)
        except EOFError:
            where = ", ".join(format_endpoint(*address) for address in entry.addresses)
            say(f"the job at {where} ended before this process could join it")
            self._fleet.close()
            raise SystemExit(0) from None
        entry.close()
        self._entry = None
        try:
            self._switch(growing, admitted)
        except BaseException:  # the members are told at once
            self._fleet.base.interrupt("this newcomer does not take part")
            self._fleet.base.close()
            raise

    def _switch(self, growing: Growing, larger: joining.Admitted) -> None:
        """Go over to the larger job's fabric with all of its ranks, or stay if they do not meet there."""
        fleet, job, rank = self._fleet, larger.job, larger.rank
        is_newcomer, num_old = self._job is None, job.world_size - larger.num_newcomers
        if rank == 0 and self._service is not None:
            self._service.switched()
        before = fleet.enter_fabric(_place_of(larger, fleet))
        regroup = self._recovery.enter_fabric()
        try:
            self._meet(job, growing, num_old)
        except BaseException as error:
            if is_newcomer or not isinstance(error, (*LOSSES, MismatchError)):
                growing.leave()
                _close(regroup)
                before.leave(f"it could not switch to the larger job: {error}")
                raise
            left = fleet.enter_fabric(before)
            self._recovery.return_to(regroup)
            self._leave(left, f"it went back from the larger job: {error}")
            self._open(self._job or job)
            return
        growing.leave()
        _close(regroup)
        self._leave(before)
        self._num_old = num_old
        self._epoch, self._numbers = fleet.epoch, fleet.numbers
        if is_newcomer:
            tell(met=True, number=job.numbers[rank])
        self._open(job)
        self._transfer(growing, job, num_old)
        growing.resume()
        self._tell(growing, job.numbers[num_old:])

    def _meet(self, job: JobRecord, growing: Growing, num_old: int) -> None:
        """Make the first calls in the new epoch, which show that all are in it."""
        communicator = self._fleet.communicator
        control = ControlStream(communicator, stream=self._fleet.reserve_streams(1).start)
        told = control.all_gather(job.epoch, "epoch of the larger job")
        if set(told) != {job.epoch}:
            raise MismatchError(f"Ranks have met in different epochs: {told}")
        growing.meet(control, communicator.topology, num_old)

    def _transfer(self, growing: Growing, job: JobRecord, num_old: int) -> None:
        """Let every newcomer have what it lacks from its source."""
        fleet = self._fleet
        sources = choose_sources(job.topology, range(num_old), range(num_old, job.world_size), groups=growing.groups)
        first = fleet.reserve_streams(2 * len(sources)).start
        for place, (source, served) in enumerate(sources.items()):
            if fleet.communicator.rank not in (source, *served):
                continue
            streams = range(first + 2 * place, first + 2 * place + 2)
            with fleet.communicator.open_group((source, *served), streams=streams) as group:
                control = ControlStream(group, stream=streams[1])
                if fleet.communicator.rank == source:
                    self._give(growing, control)
                else:
                    growing.take(control)

    @staticmethod
    def _give(growing: Growing, control: ControlStream) -> None:
        with contextlib.suppress(*LOSSES):  # a newcomer is lost again: the next call of all ranks finds that
            growing.give(control)

    def _leave(self, place: FabricPlace, why: str = "") -> None:
        """Leave another fabric, beside the training: that takes as long as its slowest rank."""
        thread = threading.Thread(target=partial(place.leave, why), name="syncline-leave", daemon=True)
        thread.start()
        self._leaving = [*(one for one in self._leaving if one.is_alive()), thread]

    def _tell(self, growing: Growing, joined: tuple[int, ...]) -> None:
        fleet, step = self._fleet, growing.iteration
        members = fleet.numbers_of(fleet.epoch.members)
        joined = tuple(number for number in joined if number in members)
        if not joined:  # lost again meanwhile
            return
        fleet.communicator.trace.instant(f"epoch {fleet.epoch.number}", "communication", members=list(members))
        if fleet.communicator.rank == 0:
            come = f"{name_ranks(joined)} came in after step {step}"
            say(f"{come}; {len(members)} ranks go on in epoch {fleet.epoch.number}")
        epoch = fleet.epoch.number
        change = MembershipChange(epoch=epoch, members=members, lost=(), joined=joined, iteration=step + 1)
        self._recovery.tell(change)


def _place_of(larger: joining.Admitted, fleet: FabricPlace) -> FabricPlace:
    job = larger.job
    larger.fabric.progress = fleet.communicator.progress
    communicator = Communicator(
        larger.loop,
        larger.fabric,
        larger.topology,
        trace=fleet.communicator.trace,
        timeout_s=fleet.communicator.timeout_s,
        on_close=larger.loop.stop,
    )
    epoch = Epoch(number=job.epoch, members=tuple(range(job.world_size)))
    return FabricPlace(base=communicator, communicator=communicator, epoch=epoch, numbers=job.numbers)


def choose_sources(
    topology: Topology, holders: Collection[int], lacking: Sequence[int], *, groups: Sequence[Sequence[int]] = ()
) -> dict[int, tuple[int, ...]]:
    """Return whom each source gives to: the holder below the lowest node above both, the first of several.

    Newcomers below one link have the same nearest holders outside, and so the same source: what they need crosses that
    link in one broadcast. Those of one of the ``groups`` take from a holder in it; if there is none all take from one.

    >>> choose_sources(Topology.load("two-racks-5-3"), holders=(0, 1, 5), lacking=(4, 6, 7))
    {0: (4,), 5: (6, 7)}
    """
    served: dict[int, list[int]] = defaultdict(list)
    for group in groups or [range(topology.num_ranks)]:
        inside = [rank for rank in lacking if rank in group]
        near = [holder for holder in holders if holder in group]
        for rank in inside:
            source = _nearest(topology, near, rank) if near else _nearest(topology, holders, inside[0])
            served[source].append(rank)
    return {source: tuple(sorted(ranks)) for source, ranks in sorted(served.items())}


def _nearest(topology: Topology, holders: Collection[int], rank: int) -> int:
    """Return the holder with which ``rank`` has the most nodes above both."""
    above = {id(node) for node in topology.path(rank)}
    return max(holders, key=lambda holder: (sum(id(node) in above for node in topology.path(holder)), -holder))
