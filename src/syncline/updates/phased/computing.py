"""What the training thread does with a stage: forward, loss, and backward with the forward pass made again.

Between the forward and the backward phase of a micro-batch its input is kept, the random generator's state, and the
stage's buffers as they were, so that the second forward pass repeats the first: dropout draws the same, and running
statistics are counted once. After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with the stages
as segments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.updates.phased.stage import Stage

Loss = Callable[[Any, Any], torch.Tensor]
"""Gets what the last stage returns, and the targets; returns the mean over the samples, one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a stage is called with: what the stage before returned, or for the first stage whatever the user has."""

    value: Any
    tensors: tuple[torch.Tensor, ...] = ()
    """Those of ``value`` that came from the stage before."""

    @classmethod
    def received(cls, tensors: Sequence[torch.Tensor], *, is_tuple: bool) -> Given:
        """Return what a stage before returned."""
        return cls(value=tuple(tensors) if is_tuple else tensors[0], tensors=tuple(tensors))

    def as_leaves(self) -> Given:
        """Return the same values as leaves of a new graph."""
        if not self.tensors:
            return self
        leaves = [tensor.detach() for tensor in self.tensors]
        for leaf in leaves:
            leaf.requires_grad_(leaf.dtype.is_floating_point or leaf.dtype.is_complex)
        return Given.received(leaves, is_tuple=isinstance(self.value, tuple))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What a stage returned."""

    tensors: tuple[torch.Tensor, ...]
    is_tuple: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """How things were before a forward pass."""

    generator: torch.Tensor
    buffers: tuple[torch.Tensor, ...]


class StageComputer:
    """Computes the phases of one rank; ``micro`` is the number of a micro-batch."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._before: dict[tuple[int, int], _Before] = {}

    def forward(self, stage: Stage, micro: int, given: Given, *, is_repeated: bool) -> Any:
        """Return what the stage makes of its input, without a graph; :meth:`backward` can repeat it."""
        if is_repeated:
            buffers = tuple(buffer.clone() for buffer in stage.module.buffers())
            self._before[stage.number, micro] = _Before(generator=torch.get_rng_state(), buffers=buffers)
        with torch.no_grad():
            return stage.module(given.value)

    def loss_phase(
        self, stage: Stage, given: Given, targets: Any, *, share: float
    ) -> tuple[float, list[torch.Tensor | None]]:
        """Compute the last stage, the loss, and the gradients of both; return the loss and those of the input.

        All are multiplied by ``share``, that of the micro-batch in the samples of its batch.
        """
        leaves = given.as_leaves()
        with torch.enable_grad():
            loss = self._loss(stage.module(leaves.value), targets)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise UpdateError(
                    f"loss(output, targets) returns one number, the mean over the samples, not {shape}; end it with "
                    ".mean()"
                )
            loss = loss if share == 1.0 else loss * share
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), [leaf.grad for leaf in leaves.tensors]

    def backward(
        self, stage: Stage, micro: int, given: Given, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Compute the stage again, and the gradients of its parameters and input; return the latter."""
        before = self._before.pop((stage.number, micro))
        leaves = given.as_leaves()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), _buffers_as(stage.module, before.buffers):
            torch.set_rng_state(before.generator)
            outputs = outputs_of(stage.module(leaves.value), stage.number)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs.tensors, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return [leaf.grad for leaf in leaves.tensors]


def outputs_of(value: Any, number: int) -> Outputs:
    """Check what a stage returned."""
    if isinstance(value, torch.Tensor):
        return Outputs(tensors=(value,), is_tuple=False)
    if isinstance(value, tuple) and value and all(isinstance(one, torch.Tensor) for one in value):
        return Outputs(tensors=value, is_tuple=True)
    raise UpdateError(
        f"Stage {number} returned a {type(value).__name__}; a stage that is not the last returns a tensor or a tuple "
        "of tensors, with which the next stage is called as its one argument"
    )


def own_memory(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return ``tensors`` as contiguous ones that share no memory with ``others``, which may be written meanwhile."""
    shared = {other.untyped_storage().data_ptr() for other in others}
    return tuple(
        tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.untyped_storage().data_ptr() in shared
        else tensor.detach().contiguous()
        for tensor in tensors
    )


@contextlib.contextmanager
def _buffers_as(module: nn.Module, values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let a module's buffers be as they were, and afterwards as they are now."""
    now = [buffer.clone() for buffer in module.buffers()]
    _set_buffers(module, values)
    try:
        yield
    finally:
        _set_buffers(module, now)


@torch.no_grad()
def _set_buffers(module: nn.Module, values: Sequence[torch.Tensor]) -> None:
    for buffer, value in zip(module.buffers(), values, strict=True):
        buffer.data.copy_(value)
