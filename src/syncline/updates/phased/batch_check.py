"""Whether both ranks of a pair were given the same batch: each tells the other a checksum of it, call by call.

A rank uses only its part of a batch (the inputs, or the targets), so nothing else would show that they do not belong
together. What only one of them was given is not compared.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree

from syncline.errors import UpdateError
from syncline.runtime.port import Port
from syncline.runtime.tags import NUM_SLICES, first_tag
from syncline.updates.memory import bytes_of
from syncline.updates.phased.phases import Pass

NOTE_BYTES = 1024
MAX_TEXT = 120
_NOTE, _SEEN = NUM_SLICES - 2, NUM_SLICES - 1
"""Slices of the pair's stream that no tensor of a message has."""
_PLAIN = (bool, int, float, complex, str, bytes)


def describe_batch(value: Any) -> tuple[str, int]:
    """Return types and shapes of all that is in ``value``, and a checksum of that and of all its bytes."""
    words = []
    checksum = 0
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            words.append(f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}")
            if leaf.layout is torch.strided and leaf.device.type != "meta":
                elements = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
                checksum = zlib.crc32(bytes_of(elements.reshape(-1)), checksum)
        else:
            words.append(ascii(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__)
    text = ", ".join(words)
    return text, zlib.crc32(text.encode(), checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a rank was given in one call: for inputs and targets a text and a checksum, if there were any."""

    kind: Pass
    given: Mapping[str, tuple[str, int]]

    @classmethod
    def of(cls, kind: Pass, inputs: Any, targets: Any) -> Note:
        """Describe a batch."""
        parts = {"inputs": inputs, "targets": targets}
        return cls(kind=kind, given={name: describe_batch(part) for name, part in parts.items() if part is not None})

    def encode(self) -> memoryview:
        """Return the note as it travels."""
        given = {name: (text[:MAX_TEXT], checksum) for name, (text, checksum) in self.given.items()}
        text = json.dumps({"kind": self.kind.value, "given": given})
        return memoryview(bytearray(text.encode().ljust(NOTE_BYTES)))

    @classmethod
    def decode(cls, message: memoryview) -> Note:
        """Return the note that a message holds."""
        fields = json.loads(bytes(message))
        given = {name: (text, checksum) for name, (text, checksum) in fields["given"].items()}
        return cls(kind=Pass(fields["kind"]), given=given)

    def differs_in(self, other: Note) -> list[str]:
        """Return what both were given, but not the same; nothing if they made different calls."""
        if self.kind is not other.kind:
            return []  # which is told by who takes the next message
        return [name for name in self.given if name in other.given and self.given[name][1] != other.given[name][1]]


class BatchCheck:
    """One end. ``on_equal`` and ``on_mismatch`` are called on the loop's thread.

    A rank that finds a difference waits until its partner has found it too, so that both raise the same error before
    either of them closes its connections.
    """

    def __init__(
        self,
        port: Port,
        *,
        partner: int,
        stream: int,
        on_equal: Callable[[], None],
        on_mismatch: Callable[[BaseException], None],
    ) -> None:
        self.num_compared = 0
        """Calls in which both ranks were found to have been given the same."""
        self._port = port
        self._partner = partner
        self._stream = stream
        self._on_equal = on_equal
        self._on_mismatch = on_mismatch
        self._found: UpdateError | None = None

    def begin(self, number: int, kind: Pass, inputs: Any, targets: Any) -> None:
        """Tell the partner what this rank was given in call ``number``, from 1; on the training thread."""
        self._port.call_soon(self._exchange, number, Note.of(kind, inputs, targets))

    def partner_is_lost(self) -> None:
        """Wait no longer until the partner has found the difference too; on the loop's thread."""
        if self._found is not None:
            self._on_mismatch(self._found)

    def _exchange(self, number: int, own: Note) -> None:
        theirs = memoryview(bytearray(NOTE_BYTES))
        self._receive(number, _NOTE, theirs, partial(self._compare, number, own, theirs))
        self._send(number, _NOTE, own.encode())

    def _compare(self, number: int, own: Note, message: memoryview) -> None:
        theirs = Note.decode(message)
        names = own.differs_in(theirs)
        if not names:
            self.num_compared = number
            self._on_equal()
            return
        self._found = self._error(number, own, theirs, names)
        self._receive(number, _SEEN, memoryview(bytearray(1)), self.partner_is_lost)
        self._send(number, _SEEN, memoryview(bytearray(1)))

    def _error(self, number: int, own: Note, theirs: Note, names: list[str]) -> UpdateError:
        notes = sorted([(self._port.rank, own), (self._partner, theirs)], key=lambda pair: pair[0])
        told = "; ".join(f"{self._port.describe_peer(rank)} {_join(note, names)}" for rank, note in notes)
        return UpdateError(
            f"Both ranks of a pair get the same batch, but in call {number} of {own.kind.value}() their "
            f"{' and '.join(names)} differ: {told}; let both read the same data in the same order (a "
            "DistributedSampler with num_replicas = number of pairs and rank = number of the pair)"
        )

    def _send(self, number: int, bucket_schedule: int, message: memoryview) -> None:
        self._port.send(self._partner, first_tag(self._stream, number, bucket_schedule), message, urgency=-1)

    def _receive(self, number: int, bucket_schedule: int, into: memoryview, then: Callable[[], None]) -> None:
        tag = first_tag(self._stream, number, bucket_schedule)
        self._port.receive(self._partner, tag, into, urgency=-1, on_received=then)


def _join(note: Note, names: list[str]) -> str:
    return " and ".join(f"{name} {note.given[name][0]} (checksum {note.given[name][1]:08x})" for name in names)
