"""Whether both ranks of a pair were given the same batch: each tells the other a checksum of it, call by call.

A rank uses only its part of a batch (the inputs, or the targets), so nothing else would show that they do not belong
together. What only one of them was given is not compared.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from syncline.errors import UpdateError
from syncline.runtime.port import Port
from syncline.tensors.memory import bytes_of
from syncline.updates.phased.instructions import Pass
from syncline.updates.private_torch import tree_leaves

MAX_TEXT = 120
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

    kind: str
    given: tuple[tuple[str, str, int], ...]
    """Name, text and checksum of each."""

    @classmethod
    def of(cls, kind: Pass, inputs: Any, targets: Any) -> Note:
        """Describe a batch."""
        parts = {"inputs": inputs, "targets": targets}
        described = {name: describe_batch(part) for name, part in parts.items() if part is not None}
        return cls(kind=kind, given=tuple((name, text[:MAX_TEXT], check) for name, (text, check) in described.items()))

    def differs_in(self, other: Note) -> list[str]:
        """Return what both were given, but not the same; nothing if they made different calls."""
        if self.kind != other.kind:
            return []  # which is told by who takes the next message
        theirs = {name: check for name, _, check in other.given}
        return [name for name, _, check in self.given if theirs.get(name, check) != check]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """To the partner: this rank has found a difference."""


class BatchCheck:
    """One end; all but :meth:`begin` is on the loop's thread, ``tell``, ``on_equal`` and ``on_mismatch`` too.

    A rank that finds a difference waits until its partner has found it too, so that both raise the same error before
    either of them closes its connections.
    """

    def __init__(
        self,
        port: Port,
        *,
        partner: int,
        tell: Callable[[int, Note | Found], None],
        on_equal: Callable[[], None],
        on_mismatch: Callable[[BaseException], None],
    ) -> None:
        self.num_compared = 0
        """Calls in which both ranks were found to have been given the same."""
        self._port = port
        self._partner = partner
        self._tell = tell
        self._own: deque[Note] = deque()
        self._theirs: deque[Note] = deque()
        """What was given in the calls for which the other rank's note is not here."""
        self._on_equal = on_equal
        self._on_mismatch = on_mismatch
        self._found: UpdateError | None = None
        self._is_found_there = False

    def begin(self, kind: Pass, inputs: Any, targets: Any) -> None:
        """Tell the partner what this rank was given in the next call; on the training thread."""
        self._port.call_soon(self._begin, Note.of(kind, inputs, targets))

    def hear(self, note: Note | Found) -> None:
        """Take what the partner has told."""
        if isinstance(note, Found):
            self._is_found_there = True
        else:
            self._theirs.append(note)
        self._compare()

    def partner_is_lost(self) -> None:
        """Wait no longer until the partner has found the difference too."""
        self._is_found_there = True
        self._compare()

    def _begin(self, own: Note) -> None:
        self._own.append(own)
        self._tell(self._partner, own)
        self._compare()

    def _compare(self) -> None:
        while self._own and self._theirs and self._found is None:
            own, theirs = self._own.popleft(), self._theirs.popleft()
            if names := own.differs_in(theirs):
                self._found = self._error(self.num_compared + 1, own, theirs, names)
                self._tell(self._partner, Found())
            else:
                self.num_compared += 1
                self._on_equal()
        if self._found is not None and self._is_found_there:
            self._on_mismatch(self._found)

    def _error(self, number: int, own: Note, theirs: Note, names: list[str]) -> UpdateError:
        notes = sorted([(self._port.rank, own), (self._partner, theirs)], key=lambda pair: pair[0])
        told = "; ".join(f"{self._port.describe_peer(rank)} {_join(note, names)}" for rank, note in notes)
        return UpdateError(
            f"Both ranks of a pair get the same batch, but in call {number} of {own.kind}() their "
            f"{' and '.join(names)} differ: {told}; let both read the same data in the same order (a "
            "DistributedSampler with num_replicas = number of pairs and rank = number of the pair)"
        )


def _join(note: Note, names: list[str]) -> str:
    return " and ".join(f"{name} {text} (checksum {check:08x})" for name, text, check in note.given if name in names)
