"""Collectives on a device's tensors in chunks, each with a collective of its own; see :mod:`syncline.backend.staging`.

Sums are those of one collective on the whole, to the bit: each chunk takes the schedule of the whole, and each of its
elements the way through it that it takes there.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from syncline.backend.staging import BLOCK_BYTES, CallPart, StagedCall, StagedWork, Staging
from syncline.pytorch.collectives import TensorReduction
from syncline.pytorch.host_memory import touches
from syncline.runtime.call import CallSettings
from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.schedule import Collective, Layout, Schedule
from syncline.updates.memory import bytes_of, dtype_name

MAX_CUTS = 256
"""Sizes of which it is remembered how they are cut."""

Range = tuple[int, int]
"""Elements [start, stop): of a tensor, or of each rank's part of one."""
Cuts = tuple[tuple[Range, Layout], ...]


class StagedCollectives:
    """Begins the staged collectives of one rank; ``stream`` is for them alone, and the same on all ranks.

    A call is staged or not on all ranks alike, so a tensor is on a device on all of them or on none.
    """

    def __init__(self, communicator: Communicator, staging: Staging, *, stream: int) -> None:
        self._communicator = communicator
        self._rank, self._num_ranks = communicator.rank, communicator.world_size
        self._staging = staging
        self._stream = stream
        self._cuts: dict[tuple[Collective, int, int], tuple[Schedule, Cuts]] = {}
        self._lock = threading.Lock()

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all of ``tensors`` are on one device of the kind that is staged."""
        takes = self._staging.copier.takes
        return all(takes(tensor) and tensor.device == tensors[0].device for tensor in tensors)

    def all_reduce(self, tensor: torch.Tensor, op: TensorReduction, *, timeout_s: float | None) -> StagedWork:
        """Reduce ``tensor`` over all ranks, in place."""
        flat = flat_memory_of(tensor)
        schedule, cuts = self._cut(Collective.ALL_REDUCE, flat)
        chunks = []
        for (start, stop), layout in cuts:
            ranges = ((flat[start:stop], 0),)
            begin, finish = self._reducing(schedule, layout, op, flat.dtype, timeout_s)
            size = ranges[0][0].nbytes
            chunks.append(CallPart(num_bytes=size, loads=ranges, stores=ranges, start=begin, finish=finish))
        return self._begin("all_reduce", chunks, flat, tensor, timeout_s)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: TensorReduction, *, timeout_s: float | None
    ) -> StagedWork:
        """Make rank k's ``output`` part k of what ``op`` makes of all ranks' ``source``."""
        flat, landing = flat_memory_of(source), _landing(output)
        if touches([flat], [landing]) and landing.data_ptr() != flat.data_ptr() + self._rank * landing.nbytes:
            flat = flat.clone()  # a result must not land where a later chunk is still to be read
        schedule, cuts = self._cut(Collective.REDUCE_SCATTER, flat)
        chunks = []
        for (start, stop), layout in cuts:
            size = (stop - start) * flat.itemsize
            loads = self._of_each_part(flat, start, stop)
            stores = ((landing[start:stop], self._rank * size),)
            begin, finish = self._reducing(schedule, layout, op, flat.dtype, timeout_s, (self._rank * size, size))
            num_bytes = self._num_ranks * size
            chunks.append(CallPart(num_bytes=num_bytes, loads=loads, stores=stores, start=begin, finish=finish))
        return self._begin("reduce_scatter", chunks, landing, output, timeout_s)

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
            num_bytes = self._num_ranks * size
            chunks.append(CallPart(num_bytes=num_bytes, loads=loads, stores=stores, start=begin, finish=_leave))
        return self._begin("all_gather", chunks, landing, output, timeout_s)

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
            size = ranges[0][0].nbytes
            chunks.append(CallPart(num_bytes=size, loads=loads, stores=stores, start=begin, finish=_leave))
        return self._begin("broadcast", chunks, flat, flat if is_root else tensor, timeout_s)

    def _begin(
        self,
        label: str,
        chunks: Sequence[CallPart],
        landing: torch.Tensor,
        result: torch.Tensor,
        timeout_s: float | None,
    ) -> StagedWork:
        is_temporary = landing.data_ptr() != result.data_ptr()
        call = StagedCall(
            label=label,
            device=result.device,
            chunks=chunks,
            timeout_s=self._communicator.timeout_s if timeout_s is None else timeout_s,
            temporary=landing.view(result.shape) if is_temporary else None,
            result=result if is_temporary else None,
        )
        return self._staging.begin(call)

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
            if op.prepare is not None:
                op.prepare(host.view(dtype))
            return self._communicator.start(schedule, bytes_of(host), op.reduction, layout=layout, **settings)

        def finish(host: torch.Tensor) -> None:
            if op.finish is not None:
                counts = host if own is None else host[own[0] : own[0] + own[1]]
                op.finish(counts.view(dtype))

        return begin, finish

    def _of_each_part(self, whole: torch.Tensor, start: int, stop: int) -> list[tuple[torch.Tensor, int]]:
        """Return the range of each rank's part, and where in a chunk it is."""
        parts = whole.view(self._num_ranks, -1) if len(whole) else whole.view(self._num_ranks, 0)
        size = (stop - start) * whole.itemsize
        return [(part[start:stop], rank * size) for rank, part in enumerate(parts)]

    def _cut(self, collective: Collective, flat: torch.Tensor) -> tuple[Schedule, Cuts]:
        """Return the schedule of the whole, and its chunks with their layouts."""
        key = (collective, flat.numel(), flat.itemsize)
        with self._lock:
            if key not in self._cuts:
                if len(self._cuts) >= MAX_CUTS:
                    self._cuts.clear()
                is_scatter = collective is Collective.REDUCE_SCATTER
                self._cuts[key] = self._cut_parts(flat) if is_scatter else self._cut_whole(flat)
            return self._cuts[key]

    def _cut_whole(self, flat: torch.Tensor) -> tuple[Schedule, Cuts]:
        """Cut an all-reduce between slices where that makes no chunk too large, else within one."""
        schedule = self._communicator.plan(Collective.ALL_REDUCE, flat.nbytes)
        slices = self._communicator.layout(schedule, flat.numel(), flat.itemsize).slices
        most = BLOCK_BYTES // flat.itemsize
        ends = [offsets[-1] for offsets in slices]
        starts = [0]
        while flat.numel() - starts[-1] > most:
            place = bisect_right(ends, starts[-1] + most)
            end = ends[place - 1] if place else 0
            starts.append(end if end > starts[-1] else starts[-1] + most)
        cuts = []
        for start, stop in pairwise([*starts, flat.numel()]):
            inside = [offsets for offsets in slices if offsets[0] < stop and offsets[-1] > start] or [slices[0]]
            chunk = tuple(tuple(min(max(one, start), stop) - start for one in offsets) for offsets in inside)
            cuts.append(((start, stop), Layout(slices=chunk, num_elements=stop - start)))
        return schedule, tuple(cuts)

    def _cut_parts(self, flat: torch.Tensor) -> tuple[Schedule, Cuts]:
        """Cut a reduce-scatter so that a chunk is the same range of each rank's part, one behind the other."""
        schedule = self._communicator.plan(Collective.REDUCE_SCATTER, flat.nbytes, target="rank_order")
        offsets = schedule.offsets(flat.numel())
        part_size = flat.numel() // self._num_ranks
        most = BLOCK_BYTES // (self._num_ranks * flat.itemsize)
        slice_size = max(1, self._communicator.slice_bytes // (self._num_ranks * flat.itemsize))
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
