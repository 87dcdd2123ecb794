"""What a newcomer lacks, from the nearest member: parameters, buffers, optimizer state, hyper-parameters, position.

State that is divided among the ranks is not among it: all of them divide it anew when the newcomer is one of them.

One broadcast for each tensor, or for some small ones together, along the tree of the source and those that it serves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from syncline.pytorch.checkpoint.group import CheckpointGroup
from syncline.pytorch.packing import pack, unpack
from syncline.updates.bucket import Slot
from syncline.updates.control import ControlStream
from syncline.updates.state_values import decode_single, describe_state, dtype_of

PACKED_BYTES = 4 << 20
"""Smaller tensors go together in messages of about this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a training is, beside its tensors, in what JSON can say."""

    iteration: int
    extra: Any = None
    """What the members offer (``optimizer.offer_extra``)."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """The states of what they gave to ``resume()``, as text."""


class _SentState:
    """A source of optimizer state whose elements come later: it gathers where they are to land."""

    def __init__(self, catalogue: Mapping[str, Mapping[str, Any]]) -> None:
        self._catalogue = catalogue
        self.targets: dict[tuple[str, str], torch.Tensor] = {}

    def values(self, parameter: str) -> Mapping[str, Any]:
        """Return a parameter's state: a number type for what has one value for each element, else the value."""
        state = self._catalogue.get(parameter, {})
        return {
            key: dtype_of(value) if isinstance(value, str) else decode_single(value[0]) for key, value in state.items()
        }

    def fill(self, slot: Slot, key: str, start: int, target: torch.Tensor) -> None:
        """Note where elements are wanted; a newcomer wants each parameter's whole."""
        assert start == 0, "who steps the whole model has the whole state"
        self.targets[slot.name, key] = target


def give_state(model: nn.Module, group: CheckpointGroup, control: ControlStream, position: Position) -> None:
    """Give the newcomers of ``control``, of which this rank is the first, all that they lack."""
    entries = group.entries()
    head = {
        "groups": group.groups(),
        "state": describe_state(entries),
        "iteration": position.iteration,
        "extra": position.extra,
        "parts": position.parts,
    }
    text = json.dumps(head).encode()
    payload = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    control.start_broadcast(torch.tensor([len(text)]), "size of a newcomer's position").wait()
    control.start_broadcast(payload, "a newcomer's position").wait()
    divided = {(entry.parameter, entry.key): entry.value for entry in entries if entry.start is not None}
    _broadcast([*_model_tensors(model), *(divided[key] for key in sorted(divided))], control)


def take_state(model: nn.Module, group: CheckpointGroup, control: ControlStream) -> Position:
    """Take what :func:`give_state` gives, as another rank of ``control``; return where the training is."""
    size = torch.zeros(1, dtype=torch.int64)
    control.start_broadcast(size, "size of a newcomer's position").wait()
    payload = torch.zeros(int(size), dtype=torch.uint8)
    control.start_broadcast(payload, "a newcomer's position").wait()
    head = json.loads(bytes(payload.tolist()))
    group.load_groups(head["groups"])
    source = _SentState(head["state"])
    group.load_state(source)
    _broadcast([*_model_tensors(model), *(source.targets[key] for key in sorted(source.targets))], control)
    return Position(iteration=int(head["iteration"]), extra=head["extra"], parts=head["parts"])


def _model_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return what the model is made of, in an order in which all ranks agree."""
    return [*model.parameters(), *model.buffers()]


def _broadcast(tensors: Sequence[torch.Tensor], control: ControlStream) -> None:
    """Give the first rank's tensors to all: as they lie, where that goes, else packed; the next while one is sent."""
    under_way: list[tuple[Any, torch.Tensor | None, Sequence[torch.Tensor]]] = []
    for batch in _batches(tensors):
        (tensor, *others) = batch
        if not others and tensor.device.type == "cpu" and tensor.is_contiguous():
            under_way.append((control.start_broadcast(tensor.detach(), "a newcomer's tensor"), None, batch))
        else:
            packed = pack(batch)
            under_way.append((control.start_broadcast(packed, "a newcomer's tensors"), packed, batch))
        while len(under_way) > 2:
            _end(*under_way.pop(0), takes=control.rank != 0)
    for entry in under_way:
        _end(*entry, takes=control.rank != 0)


def _end(work: Any, packed: torch.Tensor | None, batch: Sequence[torch.Tensor], *, takes: bool) -> None:
    work.wait()
    if takes and packed is not None:
        unpack(packed, batch)


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors, small ones together; those of no elements are left out."""
    batch: list[torch.Tensor] = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        if batch and sum(each.nbytes for each in (*batch, tensor)) > PACKED_BYTES:
            yield batch
            batch = []
        batch.append(tensor)
    if batch:
        yield batch
