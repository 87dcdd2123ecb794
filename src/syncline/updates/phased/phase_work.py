"""One phase after another, as the training thread computes it: from what the partner sent to what it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from syncline.updates.phased.buffer_pool import BufferPool
from syncline.updates.phased.computing import Given, StageComputer, outputs_of, own_memory
from syncline.updates.phased.instructions import Kind, Pass, Phase
from syncline.updates.phased.messages import Message
from syncline.updates.phased.micro_batches import MicroBatch, Part, take
from syncline.updates.phased.setting import PhasedSetting
from syncline.updates.phased.stage import Stage
from syncline.updates.phased.updating import Samples, StageGradients, StageUpdater
from syncline.updates.private_torch import tree_leaves


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
    num_samples: float
    """Of this pair; the second rank is told by the first."""
    options: tuple[dict[str, Any], ...] = ()
    """Hyper-parameters of each group, as they were when it began."""
    samples: Samples | None = None
    loss: float | None = None
    output: Any = None
    """Of the last stage, in a forward pass alone."""

    @property
    def call(self) -> tuple[Pass, int]:
        """What kind of pass it is, and which of all."""
        return self.kind, self.number


class PhaseWork:
    """Computes phases; keeps the gradients of each stage until its update is over."""

    def __init__(self, setting: PhasedSetting, updater: StageUpdater) -> None:
        self._stages = setting.stages
        self._num_stages = setting.num_stages
        self._side = setting.side
        self._keeps_versions = setting.keeps_versions
        self._updater = updater
        self._computer = StageComputer(setting.loss)
        largest = max(stage.plan.num_gradient_bytes for stage in self._stages.values())
        self.buffers = BufferPool(num_buffers=setting.max_stages, num_bytes=largest)
        self.gradients: dict[int, StageGradients] = {}
        self._room: torch.Tensor | None = None
        """Where the gradients of the stage go whose backward visit is under way."""

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
        micro = current.micros[phase.micro]
        given = _given(messages[0]) if stage.number else Given(value=micro.inputs)
        if phase.kind is Kind.FORWARD:
            share, part = _of_batch(message, micro, current)
            return self._forward(phase, stage, current, given, share, part)
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

    def _forward(
        self, phase: Phase, stage: Stage, current: CurrentPass, given: Given, share: float, part: Part
    ) -> Message | None:
        output = self._computer.forward(stage, phase.micro, given, is_repeated=current.kind is Pass.TRAIN)
        if stage.number == self._num_stages - 1:
            current.output = output
            return None
        outputs = outputs_of(output, stage.number)
        theirs = [leaf for leaf in tree_leaves(given.value) if isinstance(leaf, torch.Tensor)]
        kept = [*theirs, *stage.module.parameters(), *stage.module.buffers()]
        is_loss = current.kind is Pass.TRAIN and stage.number == self._num_stages - 2
        return Message(
            phase=Phase(Kind.LOSS if is_loss else Kind.FORWARD, stage.number + 1, phase.micro),
            kind=current.kind,
            number=current.number,
            tensors=own_memory(outputs.tensors, kept),
            is_tuple=outputs.is_tuple,
            num_samples=current.num_samples,
            share=share,
            part=part,
        )

    def _backward(
        self, phase: Phase, stage: Stage, current: CurrentPass, given: Given, message: Message
    ) -> Message | None:
        if phase.micro == 0:
            self._room = self.buffers.take(stage.plan.num_gradient_bytes)
            stage.begin_backward(self._room)
        if phase.kind is Kind.LOSS:
            targets = take(current.targets, message.part, "targets")
            loss, gradients = self._computer.loss_phase(stage, given, targets, share=message.share)
            current.loss = loss + (current.loss or 0.0)
        else:
            gradients = self._computer.backward(stage, phase.micro, given, message.tensors)
        if phase.micro == len(current.micros) - 1:
            self._end_visit(stage, current)
        if stage.number == 0:
            return None
        return Message(
            phase=Phase(Kind.BACKWARD, stage.number - 1, phase.micro),
            kind=current.kind,
            number=current.number,
            tensors=tuple(None if one is None else one.contiguous() for one in gradients),
            is_tuple=message.is_tuple,
            num_samples=current.num_samples,
            share=message.share,
            loss=current.loss if phase.kind is Kind.LOSS else None,
        )

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


def _given(message: Message) -> Given:
    tensors = [tensor for tensor in message.tensors if tensor is not None]
    return Given.received(tensors, is_tuple=message.is_tuple)


def _of_batch(message: Message | None, micro: MicroBatch, current: CurrentPass) -> tuple[float, Part]:
    """Return a micro-batch's share in the samples of its batch, and its rows; the first rank tells them the second."""
    if message is not None:
        return message.share, message.part
    return 1.0 if len(current.micros) == 1 else micro.num_samples / current.num_samples, micro.part
