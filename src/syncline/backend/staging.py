"""Staging: a device's tensors travel through page-locked host memory in chunks, which copies and network share.

Chunk k + 1 comes from the device while the collective of chunk k is under way, and chunk k - 1 goes back. Chunks are
submitted in the order in which the calls were made, by one thread, in a stream that nobody else uses: so they match on
all ranks, however long the copies of each take.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from syncline.backend.device_copies import CopyKind, CopyRange, DeviceCopier, Mark
from syncline.errors import ConfigurationError, FabricClosedError, FabricError
from syncline.pytorch.collectives import TensorWork
from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.updates.worker_thread import WorkerThread

BLOCK_BYTES = 4 << 20
"""Of a chunk, at most: some 0.2 ms on PCIe and 3 ms at 10 Gb/s, long against the cost of a call and short against the
copy of a gradient bucket (25 MiB with DDP), of which only the first and last chunk are not hidden."""
MAX_BLOCKS = 32
"""Of page-locked memory of one group, at most, and what is kept from call to call: 128 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """A part of a call with a collective of its own, on ``num_bytes`` of host memory.

    ``loads`` and ``stores`` are ranges of the device's tensors, and at which byte of the host memory they belong.
    """

    num_bytes: int
    loads: Sequence[tuple[torch.Tensor, int]]
    stores: Sequence[tuple[torch.Tensor, int]]
    start: Callable[[torch.Tensor], Work]
    """Begins the collective."""
    finish: Callable[[torch.Tensor], object]
    """Changes the result in host memory, in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCall:
    """A call in chunks; ``temporary`` holds the result of a ``result`` whose memory is not in one range."""

    label: str
    device: torch.device
    chunks: Sequence[CallPart]
    timeout_s: float
    temporary: torch.Tensor | None = None
    result: torch.Tensor | None = None


class StagedWork(TensorWork):
    """A staged call under way. Once :meth:`wait` returns, what is queued on the current stream finds the result."""

    def __init__(self, call: StagedCall, work: Work, copier: DeviceCopier) -> None:
        super().__init__([work], lambda: None)
        self.call = call
        self.called: Mark = copier.mark(call.device)
        self.stored: Mark | None = None
        """The end of the last copy to the device, of those that were queued."""
        self.num_left = len(call.chunks)
        self.error: BaseException | None = None
        self._copier = copier

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all copies to the device are queued, and let the current stream wait for them."""
        super().wait(timeout_s)
        if self.stored is not None:
            self._copier.follow(self.stored)

    def aside(self) -> AbstractContextManager[object]:
        """Wait within this where the current stream is none of the one who called."""
        return self._copier.aside(self.call.device)


@dataclass(slots=True, eq=False)
class _Block:
    memory: torch.Tensor
    stored: Mark | None = None  # until then the device reads it


@dataclass(slots=True, eq=False)
class _Part:
    """A chunk on its way."""

    staged: StagedWork
    chunk: CallPart
    block: _Block
    ranges: dict[CopyKind, list[CopyRange]] = field(init=False)

    def __post_init__(self) -> None:
        self.ranges = {
            CopyKind.TO_HOST: [self._range(*each) for each in self.chunk.loads],
            CopyKind.TO_DEVICE: [self._range(*each) for each in self.chunk.stores],
        }

    @property
    def host(self) -> torch.Tensor:
        return self.block.memory[: self.chunk.num_bytes]

    def _range(self, on_device: torch.Tensor, start: int) -> CopyRange:
        return CopyRange(on_device, self.block.memory[start : start + on_device.nbytes].view(on_device.dtype))


class Staging:
    """Stages the calls of one group; any thread may begin one.

    One thread queues copies to the host, waits for them and submits the collectives; another queues the copies back.
    Both start with the first call. What fails on the device here ends all calls under way and all later ones, on all
    ranks.
    """

    def __init__(self, communicator: Communicator, copier: DeviceCopier) -> None:
        self.copier = copier
        self._communicator = communicator
        self._port = communicator.open_port("staging")  # for its works; no message goes through it
        self._lock = threading.Lock()
        self._free: deque[_Block] = deque()
        self._num_blocks = 0
        self._to_load: deque[tuple[StagedWork, CallPart]] = deque()
        self._under_way: set[StagedWork] = set()
        self._failure: BaseException | None = None
        self._loading = WorkerThread("syncline-to-host", on_failure=self._fail)
        self._storing = WorkerThread("syncline-to-device", on_failure=self._fail)

    def begin(self, call: StagedCall) -> StagedWork:
        """Begin a call; FabricClosedError after a close, what failed on the device before, ConfigurationError."""
        if call.timeout_s <= 0:
            raise ConfigurationError(f"{call.label}: a deadline lies in the future, not {call.timeout_s} s away")
        self._communicator.progress.touch()
        work = self._port.work(call.label, timeout_s=call.timeout_s)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            staged = StagedWork(call, work, self.copier)
            self._under_way.add(staged)
            self._to_load.extend((staged, chunk) for chunk in call.chunks)
            self._loading.submit(0, (), self._load)
        return staged

    def close(self) -> None:
        """End the threads, fail what is under way and release all memory; the communicator is closed before.

        Copies may still be under way: whoever allocated their memory keeps it until they are done.
        """
        label = f"the process group of rank {self._communicator.rank} is closed"
        with self._lock:
            self._failure = self._failure or FabricClosedError(label)
            self._to_load.clear()
        self._loading.close()
        self._storing.close(finishes=True)
        self._end_all(self._failure)
        self._free.clear()

    def _load(self) -> None:
        """Queue copies to the host, as many as there is memory for: all are under way before one is waited for."""
        while (part := self._take()) is not None:
            after = [part.block.stored] if part.block.stored is not None else []
            if part.chunk.loads:
                after.append(part.staged.called)
            device, ranges = part.staged.call.device, part.ranges[CopyKind.TO_HOST]
            loaded = self.copier.copy(device, CopyKind.TO_HOST, ranges, after)
            self._loading.submit(1, (), partial(self._start, part, loaded))

    def _take(self) -> _Part | None:
        """Return the next chunk, if there is memory for it; what is free has been used, and is used before new."""
        with self._lock:
            if not self._to_load or not (self._free or self._num_blocks < MAX_BLOCKS):
                return None
            staged, chunk = self._to_load.popleft()
            block = self._free.popleft() if self._free else None
            self._num_blocks += block is None
        return _Part(staged, chunk, block or _Block(self.copier.allocate_host(BLOCK_BYTES)))

    def _start(self, part: _Part, loaded: Mark) -> None:
        self.copier.wait(loaded)
        work = part.chunk.start(part.host)
        ready = () if work.done() else (work,)  # what is over needs no loop, which may have stopped
        self._storing.submit(0, ready, partial(self._store, part, work))

    def _store(self, part: _Part, work: Work) -> None:
        """Queue the copies back, or keep the error; on the thread for that."""
        staged = part.staged
        staged.error = staged.error or work.exception()
        if staged.error is None:
            part.chunk.finish(part.host)
            if part.chunk.stores:
                device, ranges = staged.call.device, part.ranges[CopyKind.TO_DEVICE]
                staged.stored = self.copier.copy(device, CopyKind.TO_DEVICE, ranges, [staged.called])
                part.block.stored = staged.stored
        staged.num_left -= 1
        if not staged.num_left:
            self._complete(staged)
        with self._lock:
            self._free.append(part.block)
            if self._to_load:
                self._loading.submit(0, (), self._load)

    def _complete(self, staged: StagedWork) -> None:
        call = staged.call
        if staged.error is None and call.temporary is not None and call.result is not None:
            staged.stored = self.copier.put(call.temporary, call.result)
        self._end(staged, staged.error)

    def _fail(self, error: BaseException) -> None:
        """End all calls because a thread of this could not go on."""
        with self._lock:
            self._failure = self._failure or error
            self._to_load.clear()
        with suppress(FabricError):  # it may be closed
            self._communicator.give_up(f"its device failed: {error}")
        self._end_all(error)

    def _end_all(self, error: BaseException | None) -> None:
        with self._lock:
            under_way = tuple(self._under_way)
        for staged in under_way:
            self._end(staged, error)

    def _end(self, staged: StagedWork, error: BaseException | None) -> None:
        """End a work, on the loop's thread as long as there is one."""

        def finish() -> None:
            with self._lock:
                is_first = staged in self._under_way
                self._under_way.discard(staged)
            if is_first:
                staged.works[0].finish(error)

        try:
            self._port.call_soon(finish)
        except FabricError:
            finish()
