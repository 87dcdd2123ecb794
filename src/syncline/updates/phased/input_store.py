"""The input store: what the partner has sent for later phases, in memory or spilled to storage."""

from __future__ import annotations

from collections.abc import Callable

import torch

from syncline.updates.phased.instructions import Phase
from syncline.updates.phased.kept_inputs import needs
from syncline.updates.phased.messages import Message, decode
from syncline.updates.phased.stage_store import StageStore


class InputStore:
    """Does what :class:`~syncline.updates.phased.kept_inputs.KeptInputs` decides; with the driver's lock held."""

    def __init__(self, stage_store: StageStore) -> None:
        self._store = stage_store
        self._messages: dict[Phase, Message] = {}
        self._spilled: dict[Phase, bytes] = {}
        """The text of each message that was spilled: it tells what its file holds."""

    def add(self, message: Message) -> None:
        """Take what was sent for ``message.phase``."""
        self._messages[message.phase] = message

    def of(self, phase: Phase) -> tuple[Message, ...]:
        """Return what ``phase`` is computed from, which is in memory."""
        return tuple(self._messages[name] for name in needs(phase))

    def spill(self, name: Phase, then: Callable[[], None]) -> None:
        """Write a message."""
        message = self._messages[name]
        self._spilled[name] = message.encode()
        self._store.write_aside(_file_name(name), _tensors(message), then, is_input=True)

    def fetch(self, name: Phase, then: Callable[[], None]) -> None:
        """Read a message that was spilled."""
        message, _ = decode(self._spilled[name])
        self._messages[name] = message
        self._store.read_aside(_file_name(name), _tensors(message), then)

    def forget(self, name: Phase) -> None:
        """Free the memory of a message."""
        del self._messages[name]

    def remove(self, name: Phase) -> None:
        """Free the file of a message."""
        del self._spilled[name]
        self._store.remove_aside(_file_name(name))


def _file_name(name: Phase) -> str:
    return f"stage-{name.stage:04d}.{name.kind.value}-{name.micro:04d}"


def _tensors(message: Message) -> dict[str, torch.Tensor]:
    return {str(place): tensor for place, tensor in enumerate(message.tensors) if tensor is not None}
