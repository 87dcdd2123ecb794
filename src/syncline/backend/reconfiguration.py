"""``syncline.reconfigure()``: a smaller or larger default group in the same processes, after losses or for newcomers.

Nothing here decides who is a member. The ranks of such a world are a fleet that nobody sees, with an elastic job's
agreement (:class:`~syncline.pytorch.epochs.Recovery`) and an elastic job's way in for newcomers
(:class:`~syncline.pytorch.epochs.FleetGrowth`); a training takes part in both, and here the default group does.
That group is on streams of the fleet's fabric, so closing it leaves the connections open, and a smaller one opens none.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from syncline.arguments import Whole, checked
from syncline.backend import NAME
from syncline.backend.creation import check_topology, find_world
from syncline.backend.group_state import GroupState
from syncline.backend.group_streams import GroupStreams
from syncline.errors import ConfigurationError
from syncline.fabric.slice_executor import NUM_STREAMS
from syncline.last_words import tell
from syncline.members import LOSSES, Elastic
from syncline.members.job_record import NO_FLAGS, Flags
from syncline.pytorch.connecting import with_address
from syncline.pytorch.environment import Arguments, BackendOptions, Environment, read_environment
from syncline.pytorch.epochs import FabricPlace, FleetGrowth, Recovery
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.init import open_fleet
from syncline.pytorch.stores import dial_store, serve_store
from syncline.runtime.communicator import TOKEN_BYTES
from syncline.updates.control import ControlStream

NOBODY = -1
"""The steps of a rank that has no state."""
LINES = ("a process group that reconfigure() made",)
"""What newcomers must have alike: a fleet's training cannot come into a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfiguration:
    """What :func:`reconfigure` has made: the default group, and who is in it.

    >>> change = syncline.reconfigure()
    >>> change.rank, change.world_size, change.epoch
    (0, 1, 0)
    >>> torch.distributed.destroy_process_group()
    """

    rank: int
    """This process's rank in the new default group."""
    world_size: int
    """How many ranks it has."""
    epoch: int
    """How often the members have changed."""
    members: tuple[int, ...]
    """Who is in it: rank k is ``members[k]``, by numbers that stay. Those of the start are theirs then; who comes gets
    the next one."""
    lost: tuple[int, ...]
    """Who has gone since this process's last group, by the same numbers."""
    joined: tuple[int, ...]
    """Who is new."""
    step: int
    """The most steps that any member has made."""
    source: int
    """The first rank with so many, which has the state to go on from."""
    behind: tuple[int, ...]
    """Ranks that have made fewer, or have no state: give them that of :attr:`source`."""


class WorldGrowth:
    """One rank's part in a world that shrinks and grows; it owns the fleet, and makes one default group after another.

    It is the one part of the fleet's :class:`Recovery`, and what grows with its :class:`FleetGrowth`.
    """

    lines: Sequence[str] = LINES
    is_joining = False
    period = 1
    groups: Sequence[Sequence[int]] = ()
    flags: Flags = NO_FLAGS
    """What the first member has told of newcomers in the last :func:`commit`."""

    def __init__(self, fleet: Fleet, growth: FleetGrowth, settings: Elastic, environment: Environment) -> None:
        self.fleet = fleet
        self.recovery = fleet.recovery = Recovery(fleet, settings, growth)
        self.recovery.begin()
        self._growth = growth
        fleet.on_close(lambda _: self.recovery.close())
        fleet.is_elastic = True
        self._options = with_address(environment).fabric
        self._uses_shared_memory = environment.uses_shared_memory
        self._step: int | None = None
        self._members: tuple[int, ...] = ()
        self._control: ControlStream | None = None
        self._state: GroupState | None = None
        self._failure: BaseException | None = None
        self._streams = range(0)
        self._hooks: tuple[Any, Any] | None = None
        """What stood in ``sys.excepthook`` before the last group was made, and after it."""
        self.recovery.add(self)

    # What the recovery asks of a part that goes on in a new epoch, and growth of what grows.

    @property
    def iteration(self) -> int:
        """Steps that this rank has made."""
        return self._step or 0

    @property
    def streams(self) -> list[range]:
        """The streams of the group that is over."""
        return [self._streams]

    def enter(self, fleet: FabricPlace) -> None:  # noqa: ARG002 - it is this one's
        """Forget what was told of newcomers in the epoch before."""
        self.flags = NO_FLAGS

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """No call goes on in the next epoch, no signal lets a rank leave, and who lacks state gets it from the user."""

    leaving = positions = settle = finish = meet = leave = resume = give = take = _do_nothing

    # What the user calls.

    def commit(self) -> bool:
        """See :func:`commit`."""
        assert self._control is not None, "a world has a group"
        told = self._control.sum_of(self._make_flags, "commit of a step").tolist()
        self.flags = int(told[0]), int(told[1])
        if not self.flags[1]:
            self._growth.end_step()
        return bool(self.flags[1])

    def reconfigure(self, step: int | None) -> Reconfiguration:
        """Make the group of whoever is there; what it fails with ends this rank's part, and is raised again later."""
        if self._failure is not None:
            raise self._failure
        self._step = step
        try:
            cause = self._find_loss() if self._state is not None else None
            self._release()
            while isinstance(made := self._try_to_open(cause), BaseException):
                cause = made
        except BaseException as error:
            self._failure = self.fleet.error_in_flight = error  # the others are told
            self.fleet.close(is_failing=True)
            raise
        return made

    def _try_to_open(self, cause: BaseException | None) -> Reconfiguration | BaseException:
        """Go on after a loss, or with newcomers, and make the group; or return the loss that comes in between."""
        try:
            if cause is not None:
                self.recovery.recover(cause)
            elif self.flags[1]:
                self._growth.end_step()
            self.flags = NO_FLAGS
            return self._open()
        except LOSSES as error:
            return error

    def close(self, *, is_failing: bool) -> None:
        """Leave the job: the group that it has is closed."""
        self._state = None
        self.fleet.close(is_failing=is_failing)

    def _release(self) -> None:
        """Take the group away, and leave the connections."""
        state, self._state = self._state, None
        if state is not None:
            self._note_streams(state)
            state.owner = None  # which goes on
            state.close(is_failing=True)
            state.owner = self

    def _find_loss(self) -> BaseException | None:
        """Return the loss for which the group is made anew; None if all are there."""
        if self.fleet.communicator.loss is not None:
            return self.fleet.communicator.failure
        if self.flags[1]:
            return None
        try:  # a group of some ranks may have heard of a loss before the world has
            self.commit()
        except LOSSES as error:
            return error
        return None

    def _make_flags(self) -> torch.Tensor:
        return torch.tensor(self._growth.flags(), dtype=torch.float64)

    def _note_streams(self, state: GroupState) -> None:
        """Let later epochs use none of the streams that this one's groups have used."""
        assert state.streams is not None, "a world gives out streams"
        self.fleet.reserve_streams(max(0, state.streams.next_stream - self.fleet.next_stream))
        self._streams = range(self._streams.start, self.fleet.next_stream)

    def _open(self) -> Reconfiguration:
        """Make the default group on the fleet as it is; all members do so alike."""
        fleet, communicator = self.fleet, self.fleet.communicator
        own, staging, messages, number = fleet.reserve_streams(4)
        self._streams = range(own, own + 4)
        self._control = ControlStream(communicator, stream=number)
        own_steps = NOBODY if self._step is None else self._step
        told = self._control.all_gather([own_steps, not self._members], "steps that were made")
        group = communicator.open_group(range(fleet.world_size), streams=range(own, NUM_STREAMS))
        group.timeout_s = fleet.timeout_s
        try:
            group.open_segment(is_wanted=self._uses_shared_memory)
            store, token = self._open_store(self._control)
        except BaseException:
            group.abort()
            raise
        self._state = state = GroupState(
            group,
            message_stream=messages,
            staging_stream=staging,
            timeout_s=fleet.timeout_s,
            store=store,
            streams=GroupStreams(store, token=token, first=fleet.next_stream),
            uses_shared_memory=self._uses_shared_memory,
            owner=self,
        )
        communicator.watch_failure(lambda error: state.interrupt(str(error)))
        self._replace_default(state)
        return self._describe(told)

    def _open_store(self, control: ControlStream) -> tuple[Any, str]:
        """Return a store that the first rank serves, and the world's token: the launcher's may have died."""
        if control.world_size == 1:
            return HashStore(), secrets.token_hex(TOKEN_BYTES)
        served, port = serve_store(self._options) if control.rank == 0 else (None, 0)
        told = control.all_gather([self._options.address, port, secrets.token_hex(TOKEN_BYTES)], "where the store is")
        host, port, token = told[0]
        return served or dial_store(host, port, self._options), token

    def _describe(self, told: Sequence[tuple[int, bool]]) -> Reconfiguration:
        """Say who is here; each has told its steps, and whether this is its first group."""
        fleet, before = self.fleet, self._members
        self._members = members = fleet.members
        is_start = all(is_first for _, is_first in told)
        steps = [one for one, _ in told]
        newest = max(steps)
        source = steps.index(newest)
        return Reconfiguration(
            rank=fleet.rank,
            world_size=fleet.world_size,
            epoch=fleet.epoch.number,
            members=members,
            lost=tuple(one for one in before if one not in members),
            joined=() if is_start else tuple(members[rank] for rank, (_, is_first) in enumerate(told) if is_first),
            step=max(newest, 0),
            source=source,
            behind=tuple(
                rank for rank, made in enumerate(steps) if rank != source and (made < newest or made == NOBODY)
            ),
        )

    def _replace_default(self, state: GroupState) -> None:
        """Let ``torch.distributed`` have the new group; it hooks into ``sys.excepthook`` with each."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._hooks is not None and sys.excepthook is self._hooks[1]:
            sys.excepthook = self._hooks[0]
        before = sys.excepthook
        dist.init_process_group(
            NAME,
            store=state.store,
            rank=state.communicator.rank,
            world_size=state.communicator.world_size,
            timeout=timedelta(seconds=state.timeout_s),
            pg_options=state,
        )
        self._hooks = before, sys.excepthook


@checked
def reconfigure(
    *, step: Whole | None = None, options: BackendOptions | None = None, elastic: Elastic | None = None
) -> Reconfiguration:
    """Make the default process group of whoever is there, in the same processes; every rank calls it.

    The first call makes it at all, in the place of ``torch.distributed.init_process_group("syncline")``: of the ranks
    that the launcher has started, or, where this process joins a job that runs (``SYNCLINE_JOIN``, as ``syncline run
    --elastic --restarts`` and ``--join`` say), of those of that job and this one. A later call makes it anew: without
    ranks that were lost, once a call has failed for that (a ``RuntimeError`` from ``torch``, :class:`PeerLostError` or
    :class:`DeadlineError` otherwise), and with newcomers, once :func:`commit` has said that there are some. All groups
    of the old one are over, and whoever holds them makes his own anew: ``DistributedDataParallel``, device meshes.

    ``step``: how many steps the state of this rank has seen, None if it has none yet, as a newcomer's; so the result
    says who has the newest state, and who needs it. ``options`` and ``elastic`` count in the first call.

    Raises what :func:`syncline.init` raises, :class:`QuorumLostError` where this rank does not go on,
    :class:`ConfigurationError` if the default group is not one that this function has made; :class:`SystemExit` with
    status 0 in a newcomer whose job has ended well before it could come in.

    >>> change = syncline.reconfigure()
    >>> if change.behind:  # of new ranks, or of one that a loss kept from the last step
    ...     state = [model.state_dict(), optimizer.state_dict()]
    ...     torch.distributed.broadcast_object_list(state, src=change.source)
    >>> torch.distributed.destroy_process_group()
    """
    if dist.is_initialized():
        return _current_world("reconfigure()").reconfigure(step)
    return _begin(options or BackendOptions(), elastic).reconfigure(step)


def commit() -> bool:
    """Wait until all ranks have come to the end of a step; True if newcomers are ready for :func:`reconfigure`.

    Call it on every rank after the backward pass and before the optimizer's step: who was told that all have come may
    step, and no other has to take it back. It raises :class:`PeerLostError` like any other call.

    >>> change = syncline.reconfigure()
    >>> loss = model(torch.randn(2, 4)).sum(); loss.backward()
    >>> if syncline.commit():
    ...     change = syncline.reconfigure(step=0)
    >>> torch.distributed.destroy_process_group()
    """
    return _current_world("commit()").commit()


def _current_world(what: str) -> WorldGrowth:
    state = find_world()
    if state is None or not isinstance(state.owner, WorldGrowth):
        raise ConfigurationError(
            f"{what} wants a default group that syncline.reconfigure() has made; call that in the place of "
            'torch.distributed.init_process_group("syncline")'
        )
    return state.owner


def _begin(options: BackendOptions, elastic: Elastic | None) -> WorldGrowth:
    """Connect, or come into the job that this process joins."""
    environment = read_environment(given=Arguments.of_group(options))
    fleet = open_fleet(environment, is_current=False)
    try:
        check_topology(fleet.communicator)
        assert fleet.growth is not None, "every fleet that is opened may grow"
        world = WorldGrowth(fleet, fleet.growth, Elastic.choose(elastic) or Elastic(), environment)
        fleet.growth.begin(world)
        tell(goes_on=True)
    except BaseException as error:
        fleet.error_in_flight = error
        fleet.close(is_failing=True)
        raise
    return world
