"""One stage on the rank that computes it: a module whose parameters have memory only while it is held; that memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.updates.bucket import Bucket, BucketPlan, Slot
from syncline.updates.flat import Vector, VectorShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Where the parameters of a stage lie in its room, bucket after bucket."""

    number: int
    trained: tuple[BucketPlan, ...]
    """Buckets that are updated; their numbers run on from stage to stage."""
    frozen: tuple[BucketPlan, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all parameters, with what alignment adds."""
        return _shape((*self.trained, *self.frozen)).num_bytes

    @property
    def num_gradient_bytes(self) -> int:
        """Size of all gradients."""
        return _shape(self.trained).num_bytes

    @property
    def num_trained(self) -> int:
        """Number of parameters that are updated."""
        return sum(len(plan.slots) for plan in self.trained)


class Stage:
    """A module, and where its parameters are. ``trained`` and ``frozen`` own the plan's slots, bucket by bucket."""

    def __init__(
        self,
        plan: StagePlan,
        module: nn.Module,
        *,
        trained: Sequence[Sequence[nn.Parameter]],
        frozen: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        self.plan = plan
        self.module = module
        self.present = [False] * plan.num_trained
        """For each trained parameter, whether it got a gradient in the last backward pass."""
        self._owners = [tuple(owners) for owners in (*trained, *frozen)]
        self._plans = (*plan.trained, *plan.frozen)
        self._flats: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, number, slot))  # type: ignore[no-untyped-call]
            for number, bucket in enumerate(plan.trained)
            for slot, parameter in zip(bucket.slots, trained[number], strict=True)
        ]

    @property
    def number(self) -> int:
        """Its place in the model."""
        return self.plan.number

    def place(self, room: torch.Tensor) -> None:
        """Let the parameters lie in ``room``, whatever is in it."""
        self._flats = Vector(_shape(self._plans), room).parts
        for plan, flat, owners in zip(self._plans, self._flats, self._owners, strict=True):
            for slot, owner in zip(plan.slots, owners, strict=True):
                owner.data = slot.view(flat)

    def leave(self) -> None:
        """Let the parameters have no memory."""
        self._flats = []
        for owners in self._owners:
            for owner in owners:
                owner.data = ghost(owner)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all parameters by name, as they are stored; the stage is held."""
        return {
            slot.name: flat[slot.start : slot.stop].view(slot.shape)
            for plan, flat in zip(self._plans, self._flats, strict=True)
            for slot in plan.slots
        }

    def begin_backward(self, room: torch.Tensor) -> None:
        """Let the gradients of all micro-batches be gathered in ``room``; they begin as zeros."""
        self._gradients = Vector(_shape(self.plan.trained), room).parts
        for flat in self._gradients:
            flat.zero_()
        self.present = [False] * self.plan.num_trained

    def _take_gradient(self, bucket: int, slot: Slot, parameter: torch.Tensor) -> None:
        """Add the gradient of one parameter in its place."""
        if self._gradients and parameter.grad is not None:
            if parameter.grad.layout is not torch.strided:
                raise UpdateError(
                    f"The gradient of {slot.name!r} is {parameter.grad.layout}; make the layer with sparse=False"
                )
            place = slot.view(self._gradients[bucket])
            place.add_(parameter.grad) if self.present[slot.position] else place.copy_(parameter.grad)
            self.present[slot.position] = True
        parameter.grad = None

    def end_backward(self) -> tuple[Bucket, ...]:
        """Return the stage's buckets, gradients and all."""
        gradients, self._gradients = self._gradients, []
        return self._buckets(gradients)

    def place_gradients(self, room: torch.Tensor) -> tuple[Bucket, ...]:
        """Return the stage's buckets, whose gradients lie in ``room``, whatever is in it; the stage is held."""
        return self._buckets(Vector(_shape(self.plan.trained), room).parts)

    def _buckets(self, gradients: Sequence[torch.Tensor]) -> tuple[Bucket, ...]:
        trained = len(self.plan.trained)
        return tuple(
            Bucket(plan, parameters=flat, gradients=gradient, owners=owners)
            for plan, flat, gradient, owners in zip(
                self.plan.trained, self._flats[:trained], gradients, self._owners[:trained], strict=True
            )
        )

    def module_buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of the module's buffers by name: running statistics and the like."""
        return {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def ghost(parameter: torch.Tensor) -> torch.Tensor:
    """Return what stands for a parameter without memory: its shape, with one element for all, which is NaN."""
    value = float("nan") if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
    return torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def _shape(plans: Iterable[BucketPlan]) -> VectorShape:
    return VectorShape(parts=tuple((plan.dtype, plan.num_elements) for plan in plans))


class Ledger:
    """Counts live bytes and their peak; from any thread."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes that are in use from now on; negative ones no more."""
        with self._lock:
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class BufferPool:
    """At most ``num_buffers`` pieces of memory of ``num_bytes`` each; any thread may take one that is known to be free.

    Fresh pages cost more than a copy into them, so buffers are kept.
    """

    def __init__(self, *, num_buffers: int, num_bytes: int) -> None:
        self.num_buffers, self.num_bytes = num_buffers, num_bytes
        self.ledger = Ledger()
        self._free: list[torch.Tensor] = []
        self._num_made = 0
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a room (bytes), of which ``num_bytes`` are used."""
        assert num_bytes <= self.num_bytes, "buffers are as large as the largest stage"
        with self._lock:
            if not self._free:
                assert self._num_made < self.num_buffers, "stages are dropped before others get their buffers"
                self._num_made += 1
                self._free.append(torch.empty(self.num_bytes, dtype=torch.uint8))
            room = self._free.pop()
            self._taken[id(room)] = num_bytes
            self.ledger.add(num_bytes)
            return room

    def give_back(self, room: torch.Tensor) -> None:
        """Take a room back; nobody reads it any more."""
        with self._lock:
            self.ledger.add(-self._taken.pop(id(room)))
            self._free.append(room)
