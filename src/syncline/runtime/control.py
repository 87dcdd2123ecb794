"""What engines tell each other beside the data: small control messages, ahead of everything else.

=========  =============================================================================================
DESCRIBE   to the next rank, for every call: what it is, so that calls that differ are found on every rank
WAITING    to all, at half of a call's deadline: whom I wait for in what, so that the error can name the culprit
FAILED     to all: I have given up, and why; whatever waits for me may stop waiting
LEAVING    to all, before a close: which calls I have completed, since those still get all that they need
=========  =============================================================================================

All begin with the kind, the stream and the running number; the rest is text.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from syncline.fabric import MAX_CONTROL_BYTES
from syncline.runtime.call import Description

_HEAD = struct.Struct("<BHI")
_LEFT = struct.Struct("<HI")
_COUNT = struct.Struct("<I")
_MAX_TEXT = 3000


class ControlKind(IntEnum):
    """The first byte of a control message."""

    DESCRIBE = 1
    WAITING = 2
    FAILED = 3
    LEAVING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an engine gave up, as it is told to the others; ``rank`` and ``host`` of whom it is about."""

    reason: str
    text: str
    rank: int
    host: str


def encode_description(stream: int, number: int, description: Description) -> bytes:
    """Encode a DESCRIBE message."""
    return _HEAD.pack(ControlKind.DESCRIBE, stream, number) + f"{description.identity}\n{description.text}".encode()


def decode_description(body: bytes) -> Description:
    """Decode the body of a DESCRIBE message."""
    identity, _, text = body.decode(errors="replace").partition("\n")
    return Description(identity=identity, text=text)


def encode_waiting(stream: int, number: int, peers: Iterable[int], what: str) -> bytes:
    """Encode a WAITING message; ``what`` names the call."""
    text = what.encode()[:_MAX_TEXT]
    numbers = sorted(peers)[: (MAX_CONTROL_BYTES - len(text)) // 4 - 8]
    head = _HEAD.pack(ControlKind.WAITING, stream, number)
    return head + struct.pack(f"<{1 + len(numbers)}I", len(numbers), *numbers) + text


def decode_waiting(body: bytes) -> tuple[frozenset[int], str]:
    """Decode the body of a WAITING message: who is waited for, and in what."""
    (count,) = _COUNT.unpack_from(body)
    end = _COUNT.size * (1 + count)
    return frozenset(struct.unpack(f"<{count}I", body[_COUNT.size : end])), body[end:].decode(errors="replace")


def encode_failure(failure: Failure) -> bytes:
    """Encode a FAILED message."""
    fields = [failure.reason, failure.text[:_MAX_TEXT], failure.rank, failure.host]
    return _HEAD.pack(ControlKind.FAILED, 0, 0) + json.dumps(fields).encode()


def decode_failure(body: bytes) -> Failure:
    """Decode the body of a FAILED message."""
    reason, text, rank, host = json.loads(body)
    return Failure(reason=str(reason), text=str(text), rank=int(rank), host=str(host))


def encode_leaving(num_completed: Mapping[int, int]) -> Iterator[bytes]:
    """Encode as many LEAVING messages as it takes; ``num_completed`` calls of each stream.

    In place of a running number each says how many follow.
    """
    entries = [_LEFT.pack(stream, number) for stream, number in num_completed.items()]
    per_message = (MAX_CONTROL_BYTES - _HEAD.size) // _LEFT.size
    starts = range(0, max(1, len(entries)), per_message)
    for num_left, start in zip(reversed(range(len(starts))), starts, strict=True):
        yield _HEAD.pack(ControlKind.LEAVING, 0, num_left) + b"".join(entries[start : start + per_message])


def decode_leaving(body: bytes) -> dict[int, int]:
    """Decode the body of a LEAVING message."""
    return dict(_LEFT.iter_unpack(body[: len(body) // _LEFT.size * _LEFT.size]))


def decode_head(payload: bytes) -> tuple[ControlKind, int, int, bytes]:
    """Return kind, stream, running number and body."""
    kind, stream, number = _HEAD.unpack_from(payload)
    return ControlKind(kind), stream, number, payload[_HEAD.size :]
