"""Checkpoints that are written while training goes on: a snapshot in memory that is kept, and a thread that writes it.

A model has one save under way at a time, so that memory is bounded by one snapshot: the next save waits for it. The
ranks of a save tell each other how it goes on calls of their own, so that training neither waits for them nor ends with
what goes wrong there.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import torch

from syncline.arguments import Bounds, checked
from syncline.errors import CheckpointError, DeadlineError, PeerLostError
from syncline.fabric.rendezvous import begin_on_thread
from syncline.pytorch.checkpoint.state import Chunk, SavedState
from syncline.pytorch.fleet import Fleet
from syncline.runtime.communicator import DEFAULT_TIMEOUT_S, Communicator
from syncline.runtime.worker_thread import JOIN_S
from syncline.tensors.memory import PAGE_BYTES, aligned, zeros_in_large_pages
from syncline.updates.control import ControlStream, every_rank

_log = logging.getLogger(__name__)
_known: WeakKeyDictionary[object, BackgroundWriter] = WeakKeyDictionary()
_lock = threading.Lock()


class CheckpointWork:
    """A checkpoint that is being written in the background: what ``save_checkpoint(..., wait=False)`` returns.

    Any thread may wait for it. ``path`` is where it will be, once it is whole.

    >>> work = syncline.save_checkpoint("run1", model, optimizer, wait=False)
    >>> work.wait()
    >>> work.done()
    True
    """

    def __init__(self, path: Path, written: Future[None], *, limit_s: float) -> None:
        self.path = path
        self._limit_s = limit_s
        self._written = written
        self._is_told = False

    def __repr__(self) -> str:
        error = self._written.exception() if self.done() else None
        state = "being written" if not self.done() else "written" if error is None else f"failed: {error}"
        return f"<CheckpointWork {self.path}: {state}>"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._written.done()

    @checked
    def wait(self, timeout_s: Annotated[float, Bounds(0)] | None = None) -> None:
        """Wait until the checkpoint is on the disk, whole; raises :class:`CheckpointError` if it could not be written.

        Raises :class:`DeadlineError` if it is not over within ``timeout_s`` (default: that of the fleet's collectives);
        it goes on then.
        """
        limit_s = self._limit_s if timeout_s is None else timeout_s
        if not self.settle(limit_s):
            raise DeadlineError(
                f"The checkpoint {self.path} is still being written after {limit_s:g} s; is the disk slow?"
            )
        self._is_told = True
        self._written.result()

    def settle(self, timeout_s: float) -> bool:
        """Wait until it has ended, or for so long; return whether it has, and raise nothing."""
        return bool(wait([self._written], timeout_s).done)

    def raise_untold(self) -> None:
        """Wait, and raise what nobody was told yet."""
        if not (self.done() and self._is_told):
            self.wait()


class BackgroundWriter:
    """Writes the checkpoints of one model, each on a thread of its own; on the training thread but for that."""

    def __init__(self) -> None:
        self._limit_s = DEFAULT_TIMEOUT_S
        self._is_registered = False
        self._memory: torch.Tensor | None = None
        self._touching = threading.Lock()
        self._is_memory_used = False
        """Whether a snapshot lies in it, or it is given up: nothing is written to it ahead any more."""
        self._last: CheckpointWork | None = None
        self._channel: ControlStream | None = None
        self._close_channel: Callable[[], None] | None = None
        self._communicator: Communicator | None = None
        """On which the channel was opened, unless it has failed; another has other members."""

    def register(self, fleet: Fleet | None) -> None:
        """See that the fleet, or a process without one, does not end before a save does."""
        if self._is_registered:
            return
        self._is_registered = True
        if fleet is None:
            atexit.register(self.close)
            return
        self._limit_s = fleet.timeout_s
        fleet.on_close(self.close)

    def is_connected(self, fleet: Fleet) -> bool:
        """Whether the ranks that are there now can tell each other how a save goes."""
        return self._communicator is fleet.communicator

    def connect(self, fleet: Fleet) -> None:
        """Open calls of their own for what ranks tell each other; every rank does, also where one alone must."""
        self._disconnect()
        streams = fleet.reserve_streams(1)
        group = fleet.communicator.open_group(range(fleet.world_size), streams=streams)
        self._channel = ControlStream(group, stream=streams.start)
        self._close_channel = group.close
        self._communicator = fleet.communicator

    def exchange(self, value: Any, call: str) -> list[Any]:
        """Return every rank's value, in rank order; on the thread that writes."""
        assert self._channel is not None, "connected before the first save"
        try:
            return self._channel.all_gather(value, every_rank(call))
        except Exception:
            self._communicator = None  # a call that failed ends all calls of its group
            raise

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Let a thread touch the memory that a snapshot of such chunks takes: the kernel finds and clears it then."""
        if self._memory is not None:
            return
        memory = self._room_for(sum(_places(chunks)))

        def touch() -> None:
            for start in range(0, memory.numel(), PAGE_BYTES):
                with self._touching:
                    if self._is_memory_used:
                        return
                    memory[start : start + PAGE_BYTES : mmap.PAGESIZE].zero_()  # in which other threads run

        threading.Thread(target=touch, name="syncline-checkpoint", daemon=True).start()

    def snapshot(self, state: SavedState) -> SavedState:
        """Copy what is to be written into host memory, which is kept for the next time."""
        with self._touching:
            self._is_memory_used = True
        sizes = _places(state.chunks)
        memory = self._room_for(sum(sizes))
        taken = []
        for chunk, start in zip(state.chunks, accumulate(sizes, initial=0), strict=False):
            source = chunk.tensor.detach()
            flat = memory[start : start + source.nbytes].view(source.dtype)
            taken.append(replace(chunk, tensor=flat.view(source.shape).copy_(source)))
        return SavedState(taken, deepcopy(state.values))

    def _room_for(self, num_bytes: int) -> torch.Tensor:
        """Return memory of so many bytes at least, that of the last time if it is large enough."""
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = None  # before there is more: two at once would be one too many
            (self._memory,) = zeros_in_large_pages([max(1, num_bytes)])
        return self._memory

    def start(self, path: Path, write: Callable[[], None]) -> CheckpointWork:
        """Let ``write`` run on a thread; one at a time."""
        assert self._last is None or self._last.done(), "finish() comes first"

        def run() -> None:
            try:
                write()
            except CheckpointError:
                raise
            except Exception as error:  # whatever it is, whoever waits must know
                raise CheckpointError(f"The checkpoint {path} was not written in the background: {error}") from error

        _, written = begin_on_thread(run, "syncline-checkpoint")
        self._last = CheckpointWork(path, written, limit_s=self._limit_s)
        return self._last

    def finish(self) -> None:
        """Wait for the save that is under way, and raise what nobody was told of the last one.

        One that was broken off by the loss of a rank is only logged: if training has survived that, so does this.
        """
        if self._last is None:
            return
        try:
            self._last.raise_untold()
        except CheckpointError as error:
            if not isinstance(error.__cause__, PeerLostError):
                raise
            _log.warning("%s", error)

    def close(self, is_failing: bool = False) -> None:
        """Wait for the save that is under way, so that it is whole; raises as :meth:`finish`, unless all fails."""
        with self._touching:
            last, self._memory, self._is_memory_used = self._last, None, True
        try:
            if last is None:
                return
            if not is_failing:
                last.raise_untold()
            else:
                last.settle(JOIN_S)
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        close, self._close_channel, self._channel = self._close_channel, None, None
        if close is not None:
            close()


def _places(chunks: Sequence[Chunk]) -> list[int]:
    """Return how many bytes each chunk takes in a snapshot."""
    return [aligned(chunk.tensor.nbytes) for chunk in chunks]


def writer_of(owner: object) -> BackgroundWriter:
    """Return who writes the checkpoints of ``owner``, a training, or the model of a process alone."""
    with _lock:
        return _known.setdefault(owner, BackgroundWriter())
