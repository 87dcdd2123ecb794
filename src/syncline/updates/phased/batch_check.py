"""Whether both ranks of a pair were given the same batch: each tells the other a checksum of it, call by call.

A rank uses only its part of a batch (the inputs, or the targets), so nothing else would show that they do not belong
together. What only one of them was given is not compared.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from syncline.errors import UpdateError
from syncline.fabric.slice_executor import NUM_SLICES
from syncline.runtime.port import Port
from syncline.tensors.memory import bytes_of
from syncline.updates.messaging import Mailbox, MessageStream, decode_record, encode_record
from syncline.updates.phased.instructions import Pass
from syncline.updates.private_torch import tree_leaves

MAX_TEXT = 120
FIRST_KIND = NUM_SLICES - Mailbox.PAYLOAD
"""Of the pair's stream; no tensor of a message has so high a one."""
_PLAIN = (bool, int, float, complex, str, bytes)


def describe_batch(value: Any) -> tuple[str, int]:
    """Return types and shapes of all that is in ``value``, and a checksum of that and of all its bytes."""
    words = []
    checksum = 0
    for leaf in tree_leaves(value):
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

    def encode(self) -> bytes:
        """Return the note as it travels."""
        given = {name: (text[:MAX_TEXT], checksum) for name, (text, checksum) in self.given.items()}
        return encode_record(replace(self, given=given))

    def differs_in(self, other: Note) -> list[str]:
        """Return what both were given, but not the same; nothing if they made different calls."""
        if self.kind != other.kind:
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
        notes = MessageStream(port, stream, urgency=-1, even_if_lost=True)
        self._mailbox = Mailbox(
            notes,
            notes,
            decode=lambda text: (text, ()),
            on_message=self._on_note,
            on_lost=lambda _, error: on_mismatch(error),
            first_kind=FIRST_KIND,
        )
        self._own: deque[Note] = deque()
        """What this rank was given in the calls for which no note of the partner has come."""
        self._on_equal = on_equal
        self._on_mismatch = on_mismatch
        self._found: UpdateError | None = None

    def begin(self, kind: Pass, inputs: Any, targets: Any) -> None:
        """Tell the partner what this rank was given in the next call; on the training thread."""
        self._port.call_soon(self._tell, Note.of(kind, inputs, targets))

    def partner_is_lost(self) -> None:
        """Wait no longer until the partner has found the difference too; on the loop's thread."""
        if self._found is not None:
            self._on_mismatch(self._found)

    def _tell(self, own: Note) -> None:
        self._own.append(own)
        if len(self._own) == 1:
            self._mailbox.listen(self._partner)
        self._mailbox.send(self._partner, own.encode())

    def _on_note(self, _: int, text: bytes) -> None:
        if self._found is not None and not text:
            self._on_mismatch(self._found)  # the partner has found it too
        elif self._found is not None:
            self._mailbox.listen(self._partner)
        else:
            self._compare(text)

    def _compare(self, text: bytes) -> None:
        own, (theirs, _) = self._own.popleft(), decode_record(text, (Note,), "a pair")
        names = own.differs_in(theirs)
        if names:
            self._found = self._error(self.num_compared + 1, own, theirs, names)
            self._mailbox.listen(self._partner)
            self._mailbox.send(self._partner, b"")
            return
        self.num_compared += 1
        self._on_equal()
        if self._own:
            self._mailbox.listen(self._partner)

    def _error(self, number: int, own: Note, theirs: Note, names: list[str]) -> UpdateError:
        notes = sorted([(self._port.rank, own), (self._partner, theirs)], key=lambda pair: pair[0])
        told = "; ".join(f"{self._port.describe_peer(rank)} {_join(note, names)}" for rank, note in notes)
        return UpdateError(
            f"Both ranks of a pair get the same batch, but in call {number} of {own.kind.value}() their "
            f"{' and '.join(names)} differ: {told}; let both read the same data in the same order (a "
            "DistributedSampler with num_replicas = number of pairs and rank = number of the pair)"
        )


def _join(note: Note, names: list[str]) -> str:
    return " and ".join(f"{name} {note.given[name][0]} (checksum {note.given[name][1]:08x})" for name in names)
