"""Buckets: contiguous runs of parameters, and of their gradients, that move together.

:func:`plan_buckets` decides which parameter lies where; it sees sizes and names only. A :class:`Bucket` is the memory
for one such plan. Buckets are numbered in forward order, from which their urgencies follow.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.dlpack import from_dlpack

from syncline.errors import ConfigurationError
from syncline.tensors.device_copies import HostCopy, find_copier
from syncline.updates.private_torch import copy_each, num_storage_users, storage_number

DEFAULT_BUCKET_BYTES = 4 * 1024 * 1024
_SMALL_ELEMENTS = 4096
"""Where parameters of a bucket have no more on average, calls cost more than what they move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """A parameter to be put into a bucket: what :func:`plan_buckets` has to know of it."""

    name: str
    group: int
    """Index of the optimizer's parameter group."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its gradient."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one parameter in its bucket: elements ``start`` to ``stop``, in the parameter's own memory order."""

    name: str
    position: int
    """Running number of the parameter among all that are in buckets."""
    start: int
    stop: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this slot of ``flat`` in the parameter's shape and memory order."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    def flatten(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value of the parameter's shape as its elements in memory order; a view, if it is laid out so."""
        if value.stride() == self.stride:
            return value.as_strided((self.num_elements,), (1,), value.storage_offset())
        flat = torch.empty(self.num_elements, dtype=value.dtype, device=value.device)
        flat.as_strided(self.shape, self.stride).copy_(value)
        return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Which parameters share a bucket. All belong to one parameter group, number type and device."""

    index: int
    """Forward order of the bucket."""
    group: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements of all its parameters."""
        return self.slots[-1].stop

    @property
    def num_bytes(self) -> int:
        """Size of its parameters; that of their gradients is the same."""
        return self.num_elements * self.dtype.itemsize


class Bucket:
    """The memory of one :class:`BucketPlan`: parameters and gradients, each one flat tensor.

    The ``wire`` tensors are what moves between ranks. In host memory they are the flat tensors themselves; for
    parameters on an accelerator they are page-locked copies, which are loaded and stored beside the training.
    """

    def __init__(
        self,
        plan: BucketPlan,
        *,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        owners: Sequence[torch.nn.Parameter],
    ) -> None:
        self.plan = plan
        self.index = plan.index
        """Its forward order."""
        self.parameters = parameters
        self.gradients = gradients
        self.tensors = tuple(owners)
        self.copier = copier = find_copier(plan.device)
        """What copies between a device and the host; None for parameters in the host's memory."""
        self.parameter_copy = None if copier is None else HostCopy(copier, parameters)
        self.gradient_copy = None if copier is None else HostCopy(copier, gradients)
        self.wire_parameters = parameters if self.parameter_copy is None else self.parameter_copy.host
        self.wire_gradients = gradients if self.gradient_copy is None else self.gradient_copy.host
        self.stepped = parameters
        """What the optimizer steps on: the parameters, or a copy beside them."""
        self._places: tuple[torch.Tensor, ...] = ()
        """Where the gradient of each parameter goes, once one has come."""
        self._shown: torch.Tensor | None = None
        """The gradients once more, in a storage that counts nobody but this and what users were shown."""
        self.has_left_early = False
        """Whether, in this pass, it left before the end, with a gradient of each parameter by a pass that counts."""

    def __repr__(self) -> str:
        plan = self.plan
        return f"<Bucket {plan.index}: {len(plan.slots)} parameters, {plan.num_bytes} bytes of {plan.dtype}>"

    def gradient(self, slot: Slot) -> torch.Tensor:
        """Return the place of one parameter's gradient."""
        return slot.view(self.gradients)

    def fill_gradients(self, values: Sequence[torch.Tensor | None], scale: float) -> None:
        """Write the gradient of each parameter times ``scale``, zeros for None; all zeros without a scale.

        Small ones are copied by one call and multiplied together: a multiplication of each would take longer.
        """
        if not scale:
            self.gradients.zero_()
            return
        if not self._places:
            self._places = tuple(self.gradient(slot) for slot in self.plan.slots)
        places = [place for place, value in zip(self._places, values, strict=True) if value is not None]
        given = [value for value in values if value is not None]
        with torch.no_grad():
            for place, value in zip(self._places, values, strict=True):
                if value is None:
                    place.zero_()
            if self.plan.num_elements > _SMALL_ELEMENTS * len(values):
                for place, one in zip(places, given, strict=True):
                    torch.mul(one, scale, out=place)
            elif given:
                copy_each(places, given)
                self.gradients.mul_(scale)

    def show_gradients(self, exist: Sequence[bool], before: MutableMapping[int, torch.Tensor] | None = None) -> None:
        """Put each gradient that exists (by position) where PyTorch looks for it, and None for the others.

        ``before`` are those that were there before the pass, and were added to; they are taken out. As with autograd,
        who keeps such a tensor finds the new gradient in it.
        """
        shown = self._for_users()
        start = shown.storage_offset()
        for slot, tensor in zip(self.plan.slots, self.tensors, strict=True):
            if before and slot.position in before:
                old = before.pop(slot.position)
                tensor.grad = self._renewed(slot, old) if exist[slot.position] else None
            elif exist[slot.position]:
                tensor.grad = shown.as_strided(slot.shape, slot.stride, start + slot.start)
            else:
                tensor.grad = None

    def shown_gradient(self, slot: Slot) -> torch.Tensor:
        """Return the place of one parameter's gradient for users, who may keep it."""
        return slot.view(self._for_users())

    def _for_users(self) -> torch.Tensor:
        if self._shown is None:
            self._shown = from_dlpack(self.gradients)  # the same memory, and a storage of its own
        return self._shown

    def renew_gradients(self, before: MutableMapping[int, torch.Tensor]) -> None:
        """Go on in new memory if somebody keeps a gradient of an earlier pass: it is theirs.

        ``before`` are the gradients that the pass which begins adds to (by position).
        """
        if self._shown is None:
            return
        number = storage_number(self._shown)
        known = [before[slot.position] for slot in self.plan.slots if slot.position in before] if before else []
        if num_storage_users(self._shown) > 1 + sum(storage_number(one) == number for one in known):
            self.gradients = torch.zeros_like(self.gradients)
            self._shown, self._places = None, ()
            if self.gradient_copy is None:
                self.wire_gradients = self.gradients

    def _renewed(self, slot: Slot, old: torch.Tensor) -> torch.Tensor:
        """Return the new gradient: in the tensor that was there before, if that lies here or somebody keeps it."""
        place = self.shown_gradient(slot)
        if old.data_ptr() == place.data_ptr() and old.stride() == place.stride():
            return old
        # 3: the caller's name for it, ours, and what the function is given
        if sys.getrefcount(old) > 3 or num_storage_users(old) > 1:
            return old.copy_(place)
        return place

    def stage_gradients(self) -> None:
        """Begin to bring the gradients to where they can be sent from; :meth:`wait_staged` before others read them."""
        if self.gradient_copy is not None:
            self.gradient_copy.load(self.gradients)

    def unstage_gradients(self) -> None:
        """Bring gradients that arrived to where the optimizer reads them, in the order of the current stream."""
        if self.gradient_copy is not None:
            self.gradient_copy.store(self.gradients, waits=False)

    def step_beside(self) -> None:
        """From now on step on a copy beside the parameters, which keep their values until new ones are unstaged."""
        self.stepped = torch.empty_like(self.parameters)
        if self.parameter_copy is None:
            self.wire_parameters = self.stepped

    def allow_step(self) -> None:
        """Let the parameters change once the current stream has come to this point: what it reads before is old."""
        if self.parameter_copy is not None:
            self.parameter_copy.allow()

    def begin_step(self) -> None:
        """Let the current stream, where the optimizer steps, come after what :meth:`allow_step` said."""
        if self.parameter_copy is not None:
            self.parameter_copy.enter()

    def stage_parameters(self) -> None:
        """Begin to bring the parameters that were stepped on to where they can be sent from."""
        if self.parameter_copy is not None:
            self.parameter_copy.load(self.stepped)

    def wait_staged(self) -> None:
        """Wait until the ``wire`` tensors are what was staged last."""
        for copy in (self.gradient_copy, self.parameter_copy):
            if copy is not None:
                copy.wait()

    def unstage_parameters(self) -> None:
        """Bring parameters that arrived to where the model reads them; they are there on return, for every stream."""
        if self.parameter_copy is not None:
            self.parameter_copy.store(self.parameters, waits=True)
        elif self.wire_parameters is not self.parameters:
            self.parameters.copy_(self.wire_parameters)

    def poison(self, kept: Iterable[tuple[int, int]]) -> None:
        """Let all parameters but the elements ``kept`` be NaN until new ones are there: who reads them then shows."""
        old = [(start, stop, self.parameters[start:stop].clone()) for start, stop in kept]
        self.parameters.fill_(math.nan)
        for start, stop, values in old:
            self.parameters[start:stop] = values

    def release(self) -> None:
        """Let go of the memory; parameters keep what they lie in until they are moved."""
        nothing = self.parameters.new_empty(0)
        self.parameters = self.gradients = self.wire_parameters = self.wire_gradients = self.stepped = nothing
        self.parameter_copy = self.gradient_copy = None
        self._shown, self._places = None, ()


def placed(buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, Slot, torch.nn.Parameter]]:
    """Yield each parameter with its bucket and its place there."""
    for bucket in buckets:
        for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True):
            yield bucket, slot, tensor


def plan_buckets(entries: Sequence[ParameterEntry], *, bucket_bytes: int) -> tuple[BucketPlan, ...]:
    """Pack parameters, given in forward order, into buckets of about ``bucket_bytes``; O(number of parameters).

    A bucket holds one parameter group, number type and device. The first two of each kind are a quarter and a half as
    large as the others: they are the first that the next forward pass waits for. The last two are a half and a quarter
    as large: they are the first that the backward pass has ready, when nothing else is left to send. A parameter is
    never divided. A bucket may be larger than it should by an eighth of ``bucket_bytes``: a layer's bias goes with the
    weight that fills the bucket, since a bucket of its own would cost as many messages.
    """
    if bucket_bytes <= 0:
        raise ConfigurationError(f"bucket_bytes must be positive, not {bucket_bytes}; the default is 4 MiB")
    left: Counter[_Kind] = Counter()
    for entry in entries:
        left[kind_of(entry)] += entry.num_bytes
    packings: list[list[int]] = []
    current: dict[_Kind, list[int]] = {}
    room: Counter[_Kind] = Counter()  # bytes that the current bucket may take yet
    opened: Counter[_Kind] = Counter()
    for position, entry in enumerate(entries):
        kind = kind_of(entry)
        if kind not in current or entry.num_bytes > room[kind]:
            limit_bytes = _limit_bytes(opened[kind], left[kind], bucket_bytes)
            room[kind] = max(limit_bytes, entry.num_bytes + bucket_bytes // 8)
            current[kind] = []
            packings.append(current[kind])
            opened[kind] += 1
        current[kind].append(position)
        room[kind] -= entry.num_bytes
        left[kind] -= entry.num_bytes
    return tuple(_plan(index, packing, entries) for index, packing in enumerate(packings))


_Kind = tuple[int, torch.dtype, torch.device]


def kind_of(entry: ParameterEntry | BucketPlan) -> _Kind:
    """Return what parameters of one bucket have in common."""
    return entry.group, entry.dtype, entry.device


def _limit_bytes(num_opened: int, left_bytes: int, bucket_bytes: int) -> int:
    """Return how large a bucket may be that follows ``num_opened`` of its kind, where so much is left to pack."""
    limit_bytes = (bucket_bytes >> max(0, 2 - num_opened)) + bucket_bytes // 8
    for rear_bytes in (bucket_bytes * 3 // 4, bucket_bytes // 4):
        if left_bytes > rear_bytes + bucket_bytes // 4:  # less would be a crumb: it goes with what is behind it
            return min(limit_bytes, left_bytes - rear_bytes)
    return limit_bytes


def _plan(index: int, members: list[int], entries: Sequence[ParameterEntry]) -> BucketPlan:
    slots = []
    start = 0
    for position in members:
        entry = entries[position]
        stop = start + entry.num_elements
        place = Slot(name=entry.name, position=position, start=start, stop=stop, shape=entry.shape, stride=entry.stride)
        slots.append(place)
        start = stop
    first = entries[members[0]]
    return BucketPlan(index=index, group=first.group, dtype=first.dtype, device=first.device, slots=tuple(slots))


@torch.no_grad()
def take_written(buckets: Sequence[Bucket]) -> list[bool]:
    """Take gradients that the user has put in the place of those of a pass, or written without one.

    Return which parameters have one (by position).
    """
    present = [False] * sum(len(bucket.plan.slots) for bucket in buckets)
    for bucket, slot, tensor in placed(buckets):
        present[slot.position] = tensor.grad is not None
        if tensor.grad is not None and tensor.grad.data_ptr() != bucket.gradient(slot).data_ptr():
            bucket.gradient(slot).copy_(tensor.grad)
    return present
