"""What is behind the calls on one group: its communicator, its messages, the threads that complete futures.

A group of some ranks of a world comes about on the world's connections, by its members alone.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from syncline.backend.call_work import CallWork, CompletionThreads
from syncline.backend.group_streams import GroupStreams
from syncline.backend.hierarchical import HierarchicalCollectives, Layers, open_layers
from syncline.backend.inner_groups import NcclBackend
from syncline.backend.point_to_point import PointToPoint, Receive
from syncline.fabric.progress import ELSEWHERE, STEP
from syncline.last_words import note, tell_end
from syncline.pytorch.metrics import publish
from syncline.runtime import Communicator
from syncline.runtime.control import Tally
from syncline.tensors.collectives import TensorCollectives, check_tensors
from syncline.tensors.device_copies import CudaCopier, DeviceCopier
from syncline.tensors.memory import ScratchPool, bytes_of, host_memory_of, is_ordinary, landing_memory_of, put_back
from syncline.tensors.staging import StagedCollectives, Staging
from syncline.tensors.work import OVER, PendingCalls, TensorWork
from syncline.updates.private_torch import backward_pass

if TYPE_CHECKING:
    from syncline.backend.coded_reductions import CodedReductions
    from syncline.updates.compression import Compress


class ReceiveWork(TensorWork):
    """A receive under way."""

    def __init__(self, receive: Receive, finish: Callable[[], object] | None) -> None:
        super().__init__([receive.work], finish)
        self._receive = receive

    @property
    def source(self) -> int | None:
        """The rank of the group that it is from; None before it is over."""
        return self._receive.source if self._receive.work.is_over else None


class GroupOwner(Protocol):
    """What has the connections of a world that is one of several on them."""

    def close(self, *, is_failing: bool) -> None:
        """Leave the job; its world is closed."""


class GroupState:
    """One rank's part in a group, from its creation until it is closed; ``world`` is that of the group it is part of.

    A group without a world owns its connections, and ``streams`` tell its own groups apart. ``copier`` is that of the
    devices whose tensors are staged, ``inner`` what joins those of one host; GPUs' by default. ``owner`` has the
    connections in the place of a world that is one of several on them; it is closed with the world.
    """

    coded: CodedReductions | None = None
    """The large sums in codes, if there are to be any."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        message_stream: int,
        staging_stream: int,
        timeout_s: float,
        store: Any,
        copier: DeviceCopier | None = None,
        inner: NcclBackend | None = None,
        streams: GroupStreams | None = None,
        world: GroupState | None = None,
        uses_shared_memory: bool = True,
        owner: GroupOwner | None = None,
    ) -> None:
        self.communicator, self.streams = communicator, streams
        self.world = world or self
        """What has the connections."""
        self._inner = inner or NcclBackend()
        self._staging = Staging(communicator, copier or CudaCopier())
        self._layered = HierarchicalCollectives(communicator, self._staging.copier, self._find_layers)
        staged = StagedCollectives(communicator, self._staging, stream=staging_stream, layered=self._layered.all_reduce)
        self.scratch: ScratchPool = ScratchPool() if world is None else world.scratch
        """Shared by all groups of a world: each would keep as much as its largest call took."""
        self.collectives = TensorCollectives(communicator, self.scratch, staged=staged)
        self.completions = CompletionThreads()
        self.uses_shared_memory = uses_shared_memory
        """Whether groups of ranks of one machine may make small calls in memory that they share."""
        self.timeout_s = timeout_s
        """How long a call may take that names no timeout of its own."""
        self.store = store
        """Where the group's ranks met, for whoever wants to meet there too."""
        self.num_calls = 0
        """Collectives that this rank has begun; the same number on all ranks, unlike that of messages."""
        self.under_way = PendingCalls()
        """What a barrier joins."""
        communicator.count_by(lambda: Tally(count=self.num_calls, unit="collective"))
        communicator.watch_failure(note)  # DistributedDataParallel raises its text alone
        self.coalesced: list[TensorWork] | None = None
        self.owner = owner
        self._message_stream = message_stream
        self._messages: PointToPoint | None = None
        self._parts: weakref.WeakSet[GroupState] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.is_closed = False
        if world is not None:
            world._parts.add(self)
            return
        atexit.register(self._close_at_exit)
        self._stop_metrics = _watch(self)

    @cached_property
    def met(self) -> CallWork:
        """What a barrier returns that is over."""
        return CallWork(OVER, [], self.completions)

    @property
    def messages(self) -> PointToPoint:
        """The group's point-to-point messages, opened when this rank first sends or receives one."""
        with self._lock:
            if self._messages is None:
                self._messages = PointToPoint(self.communicator, stream=self._message_stream)
            return self._messages

    def _find_layers(self, device: torch.device) -> Layers | None:
        """Ask the other ranks whether hosts of this group have several devices each; all do, at the same call."""
        world, streams = self.world.communicator, self.world.streams
        if streams is None or self.communicator.world_size == 1:
            return None
        return open_layers(
            device,
            group=self.communicator,
            world=world,
            streams=streams,
            copier=self._staging.copier,
            backend=self._inner,
            timeout_s=self.timeout_s,
        )

    def compress(self, wish: Compress) -> None:
        """Let large sums of float32 cross slow links in codes from now on, or no more; every rank calls it alike."""
        from syncline.backend.coded_reductions import CODING_GROUPS, CodedReductions  # where codes are asked for

        world = self.world
        if self.coded is not None:
            self.coded.close()
        self.coded = self.collectives.other_way = None
        if self.communicator.world_size > 1:
            assert world.streams is not None, "a world gives out streams"
            streams = world.streams.take(
                self.communicator.members,
                rank=world.communicator.rank,
                timeout_s=self.timeout_s,
                is_lost=world.communicator.is_lost,
                purpose=f"codes of {self.communicator.user_stream} ",
                num_groups=CODING_GROUPS,
            )
            self.coded = self.collectives.other_way = CodedReductions.open(self.communicator, streams, wish)

    def choose_timeout_s(self, given: timedelta) -> float:
        """Return how long a call may take: what it says, else what the group says."""
        return given.total_seconds() if given > timedelta(0) else self.timeout_s

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> TensorWork:
        """Send ``tensor`` to a rank of the group."""
        host, messages = tensor, self._messages or self.messages
        if not is_ordinary(tensor):
            check_tensors("send", [tensor])
            host = host_memory_of(tensor)
        if messages.put(host.data_ptr(), host.nbytes, peer, tag):
            return OVER
        return TensorWork([messages.send(bytes_of(host), peer, tag, timeout_s=self.timeout_s)])

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> ReceiveWork:
        """Receive ``tensor`` from a rank of the group, or from anyone."""
        host = tensor
        if not is_ordinary(tensor):
            check_tensors("recv", [tensor])
            host = landing_memory_of(tensor)
        received = (self._messages or self.messages).receive(bytes_of(host), source, tag, timeout_s=self.timeout_s)
        return ReceiveWork(received, None if host is tensor else lambda: put_back(host, tensor))

    def interrupt(self, why: str) -> None:
        """End all calls of this group and of those of its world, because the members change; from any thread."""
        with self._lock:
            if self.is_closed:
                return
        for each in (self, *tuple(self._parts)):
            each.communicator.interrupt(why)

    def close(self, *, is_failing: bool = False) -> None:
        """Say goodbye and release everything, or do so at once; a second call does nothing.

        The groups of a world are closed with it.
        """
        with self._lock:
            if self.is_closed or self.communicator.is_of_parent:
                return
            self.is_closed = True
        atexit.unregister(self._close_at_exit)
        if self.world is self:
            self._stop_metrics()
        for part in tuple(self._parts):
            part.close(is_failing=is_failing)
        try:
            self._layered.close(is_failing=is_failing)
            if self.coded is not None:
                self.coded.close()
            if is_failing:
                self.communicator.abort(tell_end(getattr(sys, "last_value", None)))
            else:
                self.communicator.close()
        finally:
            self._staging.close()
            self.completions.close()
            if self.owner is not None:
                self.owner.close(is_failing=is_failing)

    def _close_at_exit(self) -> None:
        """After an exception, others must not wait for this rank, nor it for them."""
        self.close(is_failing=getattr(sys, "last_value", None) is not None and self.communicator.failure is None)


_worlds: weakref.WeakSet[GroupState] = weakref.WeakSet()


def _watch(world: GroupState) -> Callable[[], None]:
    """Count the steps of all optimizers as those of ``world``, and let it be seen; return what ends its metrics."""
    _worlds.add(world)
    _register()
    world.communicator.watch_ranks()
    return publish(world.communicator.statistics, lambda: world.communicator)


@cache
def _register() -> None:
    """Hear of steps, once in a process; what an optimizer steps within its own step, or a backward pass, is no more."""
    stepping: list[int] = []

    def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        worlds = [world.communicator.progress for world in tuple(_worlds) if not world.is_closed]
        if backward_pass() == -1 and any(progress.phase != STEP for progress in worlds):
            stepping[:] = [id(optimizer)]
            for progress in worlds:
                progress.enter(STEP)

    def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if stepping == [id(optimizer)]:
            stepping.clear()
            for world in tuple(_worlds):
                world.communicator.progress.enter(ELSEWHERE)
                world.communicator.progress.end_step(is_next_begun=True)

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)


def open_part(world: GroupState, ranks: Sequence[int], store: Any, timeout_s: float) -> GroupState:
    """Return what is behind a group of some ranks of a world; they alone call it."""
    assert world.streams is not None, "a world gives out streams"
    own = world.communicator
    streams = world.streams.take(ranks, rank=own.rank, timeout_s=timeout_s, is_lost=own.is_lost)
    communicator = own.open_group(ranks, streams=streams)
    communicator.timeout_s = timeout_s
    try:
        communicator.open_segment(is_wanted=world.uses_shared_memory)
    except BaseException:
        communicator.abort()
        raise
    return GroupState(
        communicator,
        message_stream=streams[-1],
        staging_stream=streams[-2],
        timeout_s=timeout_s,
        store=store,
        world=world,
    )
