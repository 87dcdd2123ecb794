"""One phase after another, as the training thread computes it: from what the partner sent to what it is sent.

A stage's work is forward, loss, and backward with the forward pass made again. Between the forward and the backward
phase of a micro-batch its input is kept, the random generator's state, and the stage's buffers as they were, so that
the second forward pass repeats the first: dropout draws the same, and running statistics are counted once. After Chen
et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with the stages as segments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.runtime.communicator import Communicator
from syncline.runtime.port import Port
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.control import ControlStream
from syncline.updates.phased.batch_check import Given
from syncline.updates.phased.instructions import Kind, Pass, Phase
from syncline.updates.phased.kept_inputs import Message
from syncline.updates.phased.micro_batches import MicroBatch, take
from syncline.updates.phased.stage import BufferPool, Stage
from syncline.updates.phased.storage import Folder
from syncline.updates.phased.updating import Clipping, Samples, StageGradients, StageUpdater
from syncline.updates.phased.versions import Manifest
from syncline.updates.private_torch import tree_leaves

Loss = Callable[[Any, Any], torch.Tensor]
"""Gets what the last stage returns, and the targets; returns the mean over the samples, one number."""


def outputs_of(value: Any, number: int) -> tuple[tuple[torch.Tensor, ...], bool]:
    """Return the tensors that a stage returned, and whether they were a tuple; raises if it is anything else."""
    if isinstance(value, torch.Tensor):
        return (value,), False
    if isinstance(value, tuple) and value and all(isinstance(one, torch.Tensor) for one in value):
        return value, True
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseOptions:
    """How a model of stages is trained; see :func:`syncline.phase`. Alike on all ranks."""

    num_micros: int
    max_stages: int
    """Stages that have memory at once."""
    input_budget_bytes: int | None
    """What inputs that wait for their phase may take of memory; None is everything."""
    max_grad_norm: float | None
    resumes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedSetting:
    """The stages of one rank, and everything that it needs to train them."""

    stages: Mapping[int, Stage]
    """Those that it computes."""
    num_stages: int
    side: int
    partner: int
    options: PhaseOptions
    optimizer: torch.optim.Optimizer
    """The user's; its ``param_groups`` stay live."""
    whole_parameters: bool
    loss: Loss
    clipping: Clipping | None
    storage: Folder
    manifest: Manifest | None
    """Of the step that training begins with, if versions are kept."""
    job: Communicator
    """Of all ranks of the job."""
    collectives: BucketCollectives
    """Between the ranks of this side, which hold the same stages."""
    port: Port
    """Between all ranks of the job."""
    stream: int
    """Of the messages between the two ranks of a pair."""
    versions: ControlStream | None
    """Between all ranks of the job, to tell that a step is stored; None if no versions are kept."""

    @property
    def keeps_versions(self) -> bool:
        """Whether each step is stored beside the one before."""
        return self.manifest is not None


@dataclass(slots=True, kw_only=True)
class CurrentPass:
    """A pass that is under way at this rank."""

    kind: Pass
    number: int
    step: int
    """How many training passes there were, this one included."""
    micros: Sequence[MicroBatch]
    targets: Any
    """Of the whole batch."""
    given: Given = ()
    num_samples: float
    """Of this pair; the second rank is told by the first."""
    options: tuple[dict[str, Any], ...] = ()
    """Hyper-parameters of each group, as they were when it began."""
    samples: Samples | None = None
    loss: float | None = None
    output: Any = None
    """Of the last stage, in a forward pass alone."""


class PhaseWork:
    """Computes phases; keeps the gradients of each stage until its update is over."""

    def __init__(self, setting: PhasedSetting, updater: StageUpdater) -> None:
        self._stages = setting.stages
        self._num_stages = setting.num_stages
        self._side = setting.side
        self._keeps_versions = setting.keeps_versions
        self._updater = updater
        self._loss = setting.loss
        largest = max(stage.plan.num_gradient_bytes for stage in self._stages.values())
        self.buffers = BufferPool(num_buffers=setting.options.max_stages, num_bytes=largest)
        self.gradients: dict[int, StageGradients] = {}
        self._room: torch.Tensor | None = None
        """Where the gradients of the stage go whose backward visit is under way."""
        self._before: dict[tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """By stage and micro-batch, the random generator's state and the buffers before the forward pass."""

    def begin(self, current: CurrentPass) -> None:
        """Make ready for a pass."""
        if current.kind is Pass.TRAIN:
            current.options = self._updater.options()
            if self._side == 0:
                current.samples = self._updater.count_samples(current.num_samples, current.step)

    def compute(self, phase: Phase, current: CurrentPass, messages: Sequence[Message]) -> Message | None:
        """Compute ``phase`` from what was sent for it; return what is to be sent, if anything is."""
        stage = self._stages[phase.stage]
        message = messages[-1] if messages else None
        if message is not None:
            current.num_samples = message.num_samples
            current.loss = message.loss if message.loss is not None else current.loss
        if current.kind is Pass.TRAIN and current.samples is None:
            current.samples = self._updater.count_samples(current.num_samples, current.step)
        given = messages[0] if stage.number else None
        if phase.kind is Kind.FORWARD:
            return self._forward(phase, stage, current, given)
        assert message is not None, "the way back begins with what the partner sent"
        return self._backward(phase, stage, current, given, message)

    def place_gradients(self, number: int) -> StageGradients:
        """Give the gradients of a stage memory again, whatever is in it; the stage is held."""
        gradients = self.gradients[number]
        stage = self._stages[number]
        gradients.room = self.buffers.take(stage.plan.num_gradient_bytes)
        gradients.buckets = stage.place_gradients(gradients.room)
        return gradients

    def give_back(self, gradients: StageGradients) -> None:
        """Free the memory of gradients that were used, or are stored."""
        room, gradients.room = gradients.room, None
        assert room is not None, "gradients have memory until they are used, or stored"
        self.buffers.give_back(room)

    def _forward(self, phase: Phase, stage: Stage, current: CurrentPass, given: Message | None) -> Message | None:
        """Compute a stage without a graph; on the way back it is computed again, from the same state."""
        micro = current.micros[phase.micro]
        if current.kind is Pass.TRAIN:
            buffers = [buffer.clone() for buffer in stage.module.buffers()]
            self._before[stage.number, phase.micro] = torch.get_rng_state(), buffers
        value = micro.inputs if given is None else _joined(_tensors(given), given)
        with torch.no_grad():
            output = stage.module(value)
        if stage.number == self._num_stages - 1:
            current.output = output
            return None
        outputs, is_tuple = outputs_of(output, stage.number)
        theirs = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        kept = [*theirs, *stage.module.parameters(), *stage.module.buffers()]
        is_loss = current.kind is Pass.TRAIN and stage.number == self._num_stages - 2
        share, part = (given.share, given.part) if given is not None else (_share(micro, current), micro.part)
        return Message(
            phase=Phase(Kind.LOSS if is_loss else Kind.FORWARD, stage.number + 1, phase.micro),
            kind=current.kind,
            number=current.number,
            payload=own_memory(outputs, kept),
            is_tuple=is_tuple,
            num_samples=current.num_samples,
            share=share,
            part=part,
            given=current.given if stage.number == phase.micro == 0 else (),
        )

    def _backward(
        self, phase: Phase, stage: Stage, current: CurrentPass, given: Message | None, message: Message
    ) -> Message | None:
        if phase.micro == 0:
            self._room = self.buffers.take(stage.plan.num_gradient_bytes)
            stage.begin_backward(self._room)
        leaves = [] if given is None else [_leaf(tensor) for tensor in _tensors(given)]
        value = current.micros[phase.micro].inputs if given is None else _joined(leaves, given)
        if phase.kind is Kind.LOSS:
            targets = take(current.targets, message.part, "targets")
            current.loss = self._compute_loss(stage, value, targets, message.share) + (current.loss or 0.0)
        else:
            self._repeat(stage, phase.micro, value, message.payload)
        if phase.micro == len(current.micros) - 1:
            self._end_visit(stage, current)
        if stage.number == 0:
            return None
        gradients = (leaf.grad for leaf in leaves)
        return Message(
            phase=Phase(Kind.BACKWARD, stage.number - 1, phase.micro),
            kind=current.kind,
            number=current.number,
            payload=tuple(None if one is None else one.contiguous() for one in gradients),
            is_tuple=message.is_tuple,
            num_samples=current.num_samples,
            share=message.share,
            loss=current.loss if phase.kind is Kind.LOSS else None,
        )

    def _compute_loss(self, stage: Stage, value: Any, targets: Any, share: float) -> float:
        """Compute the last stage, the loss, and the gradients of both; return the loss.

        All are multiplied by ``share``, that of the micro-batch in the samples of its batch.
        """
        with torch.enable_grad():
            loss = self._loss(stage.module(value), targets)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise UpdateError(
                    f"loss(output, targets) returns one number, the mean over the samples, not {shape}; end it with "
                    ".mean()"
                )
            loss = loss if share == 1.0 else loss * share
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _repeat(self, stage: Stage, micro: int, value: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compute the stage again, and the gradients of its parameters and input."""
        generator, buffers = self._before.pop((stage.number, micro))
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), _buffers_as(stage.module, buffers):
            torch.set_rng_state(generator)
            outputs, _ = outputs_of(stage.module(value), stage.number)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def _end_visit(self, stage: Stage, current: CurrentPass) -> None:
        assert current.samples is not None, "samples are counted before the way back"
        present, work = self._updater.count_present(stage.present, current.step)
        room, self._room = self._room, None
        self.gradients[stage.number] = StageGradients(
            buckets=stage.end_backward(),
            samples=current.samples,
            options=current.options,
            present=present,
            present_work=work,
            step=current.step,
            room=room,
            module_buffers=stage.module_buffers() if self._keeps_versions else {},
        )


def _share(micro: MicroBatch, current: CurrentPass) -> float:
    """Return a micro-batch's share in the samples of its batch, which the first rank tells the second."""
    return 1.0 if len(current.micros) == 1 else micro.num_samples / current.num_samples


def _tensors(message: Message) -> list[torch.Tensor]:
    return [tensor for tensor in message.payload if tensor is not None]


def _joined(tensors: Sequence[torch.Tensor], message: Message) -> Any:
    """Return what a stage is called with, as the stage before returned it."""
    return tuple(tensors) if message.is_tuple else tensors[0]


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values as a leaf of a new graph."""
    leaf = tensor.detach()
    return leaf.requires_grad_(leaf.dtype.is_floating_point or leaf.dtype.is_complex)
