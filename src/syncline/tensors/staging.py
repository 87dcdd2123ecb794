"""Staging: a device's tensors travel through page-locked host memory in chunks, which copies and network share.

Chunk k + 1 comes from the device while the collective of chunk k is under way, and chunk k - 1 goes back. Chunks are
submitted in the order in which the calls were made, by one thread, in a stream that nobody else uses: so they match on
all ranks, however long the copies of each take.

Each chunk has a collective of its own. Sums are those of one collective on the whole, to the bit: each chunk takes the
schedule of the whole, and each of its elements the way through it that it takes there.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch

from syncline.errors import ConfigurationError, FabricClosedError, FabricError
from syncline.runtime.call import CallSettings
from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.runtime.worker_thread import WorkerThread
from syncline.schedule import Collective, Layout, Schedule
from syncline.tensors.device_copies import CopyKind, CopyRange, DeviceCopier, Mark
from syncline.tensors.memory import bytes_of, dtype_name, touches, without_repeats
from syncline.tensors.reductions import TensorReduction
from syncline.tensors.work import TensorWork, end_work

BLOCK_BYTES = 4 << 20
"""Of a chunk, at most: some 0.2 ms on PCIe and 3 ms at 10 Gb/s, long against the cost of a call and short against the
copy of a gradient bucket (25 MiB with DDP), of which only the first and last chunk are not hidden."""
MAX_BLOCKS = 32
"""Of page-locked memory of one group, at most, and what is kept from call to call: 128 MiB."""
MAX_CUTS = 256
"""Sizes of which it is remembered how they are cut."""

Range = tuple[int, int]
"""Elements [start, stop): of a tensor, or of each rank's part of one."""
Cuts = tuple[tuple[Range, Layout], ...]


class CallPart(NamedTuple):
    """A part of a call with a collective of its own, in host memory.

    ``loads`` and ``stores`` are ranges of the device's tensors, and at which byte of the host memory they belong.
    """

    loads: Sequence[tuple[torch.Tensor, int]]
    stores: Sequence[tuple[torch.Tensor, int]]
    start: Callable[[torch.Tensor], Work]
    """Begins the collective."""
    finish: Callable[[torch.Tensor], object]
    """Changes the result in host memory, in place."""

    @property
    def num_bytes(self) -> int:
        """How much host memory it takes."""
        return max(start + on_device.nbytes for on_device, start in (*self.loads, *self.stores))


class StagedWork(TensorWork):
    """A call in chunks under way. Once :meth:`wait` returns, what is queued on the current stream finds the result.

    ``landing`` is the ``result``, or where that comes first if its memory is not in one range.
    """

    def __init__(
        self, work: Work, landing: torch.Tensor, result: torch.Tensor, *, num_chunks: int, copier: DeviceCopier
    ) -> None:
        super().__init__([work])
        self.landing, self.result = landing, result
        self.device = result.device
        self.called: Mark = copier.mark(self.device)
        self.stored: Mark | None = None
        """The end of the last copy to the device, of those that were queued."""
        self.num_left = num_chunks
        self.error: BaseException | None = None
        self._copier = copier

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all copies to the device are queued, and let the current stream wait for them."""
        super().wait(timeout_s)
        if self.stored is not None:
            self._copier.follow(self.stored)

    def aside(self) -> AbstractContextManager[object]:
        """Wait within this where the current stream is none of the one who called."""
        return self._copier.aside(self.device)


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

    @property
    def host(self) -> torch.Tensor:
        return self.block.memory[: self.chunk.num_bytes]

    def place(self, ranges: Sequence[tuple[torch.Tensor, int]]) -> list[CopyRange]:
        memory = self.block.memory
        return [CopyRange(one, memory[start : start + one.nbytes].view(one.dtype)) for one, start in ranges]


class Staging:
    """Stages the calls of one group; any thread may begin one.

    One thread queues copies to the host, waits for them and submits the collectives; another queues the copies back.
    Both start with the first call. What fails on the device here ends all calls under way and all later ones, on all
    ranks.
    """

    def __init__(self, communicator: Communicator, copier: DeviceCopier) -> None:
        self.copier = copier
        self._communicator = communicator
        self._lock = threading.Lock()
        self._free: deque[_Block] = deque()
        self._num_blocks = 0
        self._to_load: deque[tuple[StagedWork, CallPart]] = deque()
        self._under_way: set[StagedWork] = set()
        self._end = partial(end_work, self._under_way, self._lock)
        self._failure: BaseException | None = None
        self._loading = WorkerThread("syncline-to-host", on_failure=self._fail)
        self._storing = WorkerThread("syncline-to-device", on_failure=self._fail)

    def begin(
        self,
        label: str,
        chunks: Sequence[CallPart],
        landing: torch.Tensor,
        result: torch.Tensor,
        timeout_s: float | None,
    ) -> StagedWork:
        """Begin a call; FabricClosedError after a close, what failed on the device before, ConfigurationError."""
        limit_s = self._communicator.timeout_s if timeout_s is None else timeout_s
        if limit_s <= 0:
            raise ConfigurationError(f"{label}: a deadline lies in the future, not {limit_s} s away")
        self._communicator.progress.touch()
        work = self._communicator.begin_work(label, limit_s)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            staged = StagedWork(work, landing, result, num_chunks=len(chunks), copier=self.copier)
            self._under_way.add(staged)
            self._to_load.extend((staged, chunk) for chunk in chunks)
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
            loaded = self.copier.copy(part.staged.device, CopyKind.TO_HOST, part.place(part.chunk.loads), after)
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
                ranges = part.place(part.chunk.stores)
                staged.stored = self.copier.copy(staged.device, CopyKind.TO_DEVICE, ranges, [staged.called])
                part.block.stored = staged.stored
        staged.num_left -= 1
        if not staged.num_left:
            self._complete(staged)
        with self._lock:
            self._free.append(part.block)
            if self._to_load:
                self._loading.submit(0, (), self._load)

    def _complete(self, staged: StagedWork) -> None:
        landing, result = staged.landing, staged.result
        if staged.error is None and landing.data_ptr() != result.data_ptr():
            staged.stored = self.copier.put(*without_repeats(landing.view(result.shape), result))
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


class StagedCollectives:
    """Begins the staged collectives of one rank; ``stream`` is for them alone, and the same on all ranks.

    A call is staged or not on all ranks alike, so a tensor is on a device on all of them or on none. ``layered`` is
    asked first for each all-reduce; it returns None where it cannot make it.
    """

    def __init__(
        self,
        communicator: Communicator,
        staging: Staging,
        *,
        stream: int,
        layered: Callable[[torch.Tensor, TensorReduction, float], TensorWork | None] | None = None,
    ) -> None:
        self._communicator = communicator
        self._rank, self._num_ranks = communicator.rank, communicator.world_size
        self._staging = staging
        self._stream = stream
        self._layered = layered
        self._cuts_of_whole = lru_cache(MAX_CUTS)(self._cut_whole)
        self._cuts_of_parts = lru_cache(MAX_CUTS)(self._cut_parts)

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all of ``tensors`` are on one device of the kind that is staged."""
        takes = self._staging.copier.takes
        return all(takes(tensor) and tensor.device == tensors[0].device for tensor in tensors)

    def all_reduce(self, tensor: torch.Tensor, op: TensorReduction, *, timeout_s: float | None) -> TensorWork:
        """Reduce ``tensor`` over all ranks, in place."""
        if self._layered is not None:
            work = self._layered(tensor, op, self._communicator.timeout_s if timeout_s is None else timeout_s)
            if work is not None:
                return work
        flat = flat_memory_of(tensor)
        schedule, cuts = self._cuts_of_whole(flat.numel(), flat.itemsize)
        chunks = []
        for (start, stop), layout in cuts:
            ranges = ((flat[start:stop], 0),)
            begin, finish = self._reducing(schedule, layout, op, flat.dtype, timeout_s)
            chunks.append(CallPart(loads=ranges, stores=ranges, start=begin, finish=finish))
        return self._staging.begin("all_reduce", chunks, flat, tensor, timeout_s)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: TensorReduction, *, timeout_s: float | None
    ) -> StagedWork:
        """Make rank k's ``output`` part k of what ``op`` makes of all ranks' ``source``."""
        flat, landing = flat_memory_of(source), _landing(output)
        if touches([flat], [landing]) and landing.data_ptr() != flat.data_ptr() + self._rank * landing.nbytes:
            flat = flat.clone()  # a result must not land where a later chunk is still to be read
        schedule, cuts = self._cuts_of_parts(flat.numel(), flat.itemsize)
        chunks = []
        for (start, stop), layout in cuts:
            size = (stop - start) * flat.itemsize
            loads = self._of_each_part(flat, start, stop)
            stores = ((landing[start:stop], self._rank * size),)
            begin, finish = self._reducing(schedule, layout, op, flat.dtype, timeout_s, (self._rank * size, size))
            chunks.append(CallPart(loads=loads, stores=stores, start=begin, finish=finish))
        return self._staging.begin("reduce_scatter", chunks, landing, output, timeout_s)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, timeout_s: float | None) -> StagedWork:
        """Make ``output`` all ranks' ``source``, in rank order."""
        flat, landing = flat_memory_of(source), _landing(output)
        if touches([landing], [flat]) and flat.data_ptr() != landing.data_ptr() + self._rank * flat.nbytes:
            flat = flat.clone()  # as in a reduce-scatter
        settings = self._settings(timeout_s, elements=dtype_name(flat.dtype))

        def begin(host: torch.Tensor) -> Work:
            return self._communicator.all_gather(bytes_of(host), **settings)

        chunks = []
        for start, stop in _ranges(flat.numel(), BLOCK_BYTES // (self._num_ranks * flat.itemsize)):
            size = (stop - start) * flat.itemsize
            loads = ((flat[start:stop], self._rank * size),)
            stores = self._of_each_part(landing, start, stop)
            chunks.append(CallPart(loads=loads, stores=stores, start=begin, finish=_leave))
        return self._staging.begin("all_gather", chunks, landing, output, timeout_s)

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout_s: float | None) -> StagedWork:
        """Make ``tensor`` that of ``root``."""
        is_root = root == self._rank
        flat = flat_memory_of(tensor) if is_root else _landing(tensor)
        settings = self._settings(timeout_s, elements=dtype_name(flat.dtype))

        def begin(host: torch.Tensor) -> Work:
            return self._communicator.broadcast(bytes_of(host), root=root, **settings)

        chunks = []
        for start, stop in _ranges(flat.numel(), BLOCK_BYTES // flat.itemsize):
            ranges = ((flat[start:stop], 0),)
            loads, stores = (ranges, ()) if is_root else ((), ranges)
            chunks.append(CallPart(loads=loads, stores=stores, start=begin, finish=_leave))
        return self._staging.begin("broadcast", chunks, flat, flat if is_root else tensor, timeout_s)

    def _settings(self, timeout_s: float | None, *, elements: str = "", op: str = "") -> CallSettings:
        return {"stream": self._stream, "timeout_s": timeout_s, "elements": elements, "op": op}

    def _reducing(
        self,
        schedule: Schedule,
        layout: Layout,
        op: TensorReduction,
        dtype: torch.dtype,
        timeout_s: float | None,
        own: Range | None = None,
    ) -> tuple[Callable[[torch.Tensor], Work], Callable[[torch.Tensor], None]]:
        """Return what begins a chunk's collective and what ends it; ``own``: first byte and size of what counts."""
        settings = self._settings(timeout_s, op=op.meaning)

        def begin(host: torch.Tensor) -> Work:
            op.prepared(host.view(dtype))
            return self._communicator.start(schedule, bytes_of(host), op.reduction, layout=layout, **settings)

        def finish(host: torch.Tensor) -> None:
            op.finished((host if own is None else host[own[0] : own[0] + own[1]]).view(dtype))

        return begin, finish

    def _of_each_part(self, whole: torch.Tensor, start: int, stop: int) -> list[tuple[torch.Tensor, int]]:
        """Return the range of each rank's part, and where in a chunk it is."""
        parts = whole.view(self._num_ranks, -1) if len(whole) else whole.view(self._num_ranks, 0)
        size = (stop - start) * whole.itemsize
        return [(part[start:stop], rank * size) for rank, part in enumerate(parts)]

    def _cut_whole(self, num_elements: int, itemsize: int) -> tuple[Schedule, Cuts]:
        """Cut an all-reduce between slices where that makes no chunk too large, else within one."""
        schedule = self._communicator.plan(Collective.ALL_REDUCE, num_elements * itemsize)
        slices = self._communicator.layout(schedule, num_elements, itemsize).slices
        most = BLOCK_BYTES // itemsize
        ends = [offsets[-1] for offsets in slices]
        starts = [0]
        while num_elements - starts[-1] > most:
            place = bisect_right(ends, starts[-1] + most)
            end = ends[place - 1] if place else 0
            starts.append(end if end > starts[-1] else starts[-1] + most)
        cuts = []
        for start, stop in pairwise([*starts, num_elements]):
            inside = [offsets for offsets in slices if offsets[0] < stop and offsets[-1] > start] or [slices[0]]
            chunk = tuple(tuple(min(max(one, start), stop) - start for one in offsets) for offsets in inside)
            cuts.append(((start, stop), Layout(slices=chunk, num_elements=stop - start)))
        return schedule, tuple(cuts)

    def _cut_parts(self, num_elements: int, itemsize: int) -> tuple[Schedule, Cuts]:
        """Cut a reduce-scatter so that a chunk is the same range of each rank's part, one behind the other."""
        schedule = self._communicator.plan(Collective.REDUCE_SCATTER, num_elements * itemsize, target="rank_order")
        offsets = schedule.offsets(num_elements)
        part_size = num_elements // self._num_ranks
        most = BLOCK_BYTES // (self._num_ranks * itemsize)
        slice_size = max(1, self._communicator.slice_bytes // (self._num_ranks * itemsize))
        cuts = []
        for start, stop in _ranges(part_size, most):
            size = stop - start
            slices = [
                tuple(min(max(one - rank * part_size, first), last) - start + rank * size for one in offsets)
                for first, last in ((start + a, start + b) for a, b in _ranges(size, slice_size))
                for rank in range(self._num_ranks)
            ]
            cuts.append(((start, stop), Layout(slices=tuple(slices), num_elements=self._num_ranks * size)))
        return schedule, tuple(cuts)


def flat_memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers in one range of the device's memory: the tensor's own, where they lie so."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _landing(tensor: torch.Tensor) -> torch.Tensor:
    """Return one range of the device's memory for the result: the tensor's own, if that is one."""
    plain = tensor.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain.view(-1)
    return torch.empty(plain.numel(), dtype=plain.dtype, device=plain.device)


def _ranges(num_elements: int, most: int) -> list[Range]:
    """Divide elements into ranges of at most ``most``; of none there is one range of none."""
    return [(start, min(start + most, num_elements)) for start in range(0, num_elements, most)] or [(0, 0)]


def _leave(_: torch.Tensor) -> None:
    """Do nothing to what is only moved."""
