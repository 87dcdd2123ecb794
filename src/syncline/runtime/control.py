"""What engines tell each other beside the data: small control messages, ahead of everything else.

=========  =============================================================================================
DESCRIBE   to the next rank, for every call: what it is, so that calls that differ are found on every rank
WAITING    to all, at half of a call's deadline: whom I wait for in what, so that the error can name the culprit
BESIDE     to all, at half of an update rule's deadline: whom I wait for beside all calls; with no text: no more
FAILED     to all: I have given up, and why; whatever waits for me may stop waiting
PARTING    to all, before LEAVING: how many steps (or collectives) I have made, for the errors of those who go on
LEAVING    to all, before a close: which calls I have completed, since those still get all that they need
PACE       to the first, every few seconds: where my time went, so that it can say who holds others up
DUMP       of the first to all: write your last calls to your folder for them, as somebody wants to see them
EXAMINE    of the first to all: record for so many seconds what you do, and answer with that and where you are
ANSWER     to the first: a part of that answer; the running number is that of the question
=========  =============================================================================================

All begin with the kind, the stream and the running number; the rest is text.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from syncline.errors import escape_text
from syncline.fabric import MAX_TOLD_BYTES
from syncline.runtime.call import Description

_HEAD = struct.Struct("<BHI")
_LEFT = struct.Struct("<HI")
_SECONDS = struct.Struct("<d")
_PART = struct.Struct("<II")
_COUNT = struct.Struct("<I")
_MAX_TEXT = 3000
_MAX_ACCUSED = 16
_MAX_UNIT = 32
_MOST = 0xFFFFFFFF


class ControlError(Exception):
    """What another rank told is no control message, or not one that is allowed; the text says what it told."""


class ControlKind(IntEnum):
    """The first byte of a control message."""

    DESCRIBE = 1
    WAITING = 2
    FAILED = 3
    LEAVING = 4
    PARTING = 5
    BESIDE = 6
    PACE = 7
    DUMP = 8
    EXAMINE = 9
    ANSWER = 10


WATCHING = frozenset({ControlKind.PACE, ControlKind.DUMP, ControlKind.EXAMINE, ControlKind.ANSWER})
"""Kinds that no call depends on: they are for who watches the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many steps, or collectives, a rank has made; the ``unit`` is named in errors."""

    count: int
    unit: str
    num_idle: int = 0
    """How many of these were steps without a backward pass of this rank; others are not told."""


class Failure(NamedTuple):
    """Why an engine gave up, as it is told to the others; ``rank`` is the one that it is about."""

    reason: str
    text: str
    rank: int
    accused: tuple[int, ...] = ()
    """All whom it is about, where it is about several; the first counts most."""
    remedy: str = ""
    """What the user can do about it, which stands at the end of what every caller reads."""
    is_hearsay: bool = False
    """Whether others say of that rank that it is lost: they and it may have lost each other, and both live."""


def encode_pace(report: bytes) -> bytes:
    """Encode a PACE message."""
    return _HEAD.pack(ControlKind.PACE, 0, 0) + report


def encode_dump() -> bytes:
    """Encode a DUMP message."""
    return _HEAD.pack(ControlKind.DUMP, 0, 0)


def encode_examine(query: int, seconds: float) -> bytes:
    """Encode an EXAMINE message."""
    return _HEAD.pack(ControlKind.EXAMINE, 0, query & _MOST) + _SECONDS.pack(seconds)


def decode_examine(body: bytes) -> float:
    """Decode the body of an EXAMINE message: for how long to record."""
    seconds = _SECONDS.unpack(body)[0] if len(body) == _SECONDS.size else -1.0
    if not 0 <= seconds < math.inf:
        raise ControlError("of an examination that cannot be read")
    return float(seconds)


def encode_answer(query: int, index: int, num_parts: int, part: bytes) -> bytes:
    """Encode an ANSWER message: one part of several."""
    return _HEAD.pack(ControlKind.ANSWER, 0, query & _MOST) + _PART.pack(index, num_parts) + part


def decode_answer(body: bytes) -> tuple[int, int, bytes]:
    """Decode the body of an ANSWER message: the part's number, of how many, and what it holds."""
    try:
        index, num_parts = _PART.unpack_from(body)
    except struct.error as error:
        raise ControlError("of an answer that cannot be read") from error
    return index, num_parts, body[_PART.size :]


def encode_description(stream: int, number: int, description: Description) -> bytes:
    """Encode a DESCRIBE message."""
    return _HEAD.pack(ControlKind.DESCRIBE, stream, number) + f"{description.identity}\n{description.text}".encode()


def decode_description(body: bytes) -> Description:
    """Decode the body of a DESCRIBE message."""
    identity, _, text = body.decode(errors="replace").partition("\n")
    return Description(identity=identity, text=escape_text(text))


def encode_waiting(stream: int, number: int, peers: Iterable[int], what: str) -> bytes:
    """Encode a WAITING message; ``what`` names the call."""
    return _HEAD.pack(ControlKind.WAITING, stream, number) + _encode_wait(peers, what)


def encode_beside(peers: Iterable[int], what: str) -> bytes:
    """Encode a BESIDE message; it has no call's number."""
    return _HEAD.pack(ControlKind.BESIDE, 0, 0) + _encode_wait(peers, what)


def _encode_wait(peers: Iterable[int], what: str) -> bytes:
    text = what.encode()[:_MAX_TEXT]
    numbers = sorted(peers)[: (MAX_TOLD_BYTES - len(text)) // 4 - 8]
    return struct.pack(f"<{1 + len(numbers)}I", len(numbers), *numbers) + text


def decode_waiting(body: bytes, world_size: int) -> tuple[frozenset[int], str]:
    """Decode the body of a WAITING or BESIDE message: who is waited for, and in what."""
    try:
        (count,) = _COUNT.unpack_from(body)
        end = _COUNT.size * (1 + count)
        ranks = frozenset(struct.unpack(f"<{count}I", body[_COUNT.size : end]))
    except struct.error as error:
        raise ControlError("of a wait that cannot be read") from error
    if ranks and max(ranks) >= world_size:
        raise ControlError(f"that it waits for rank {max(ranks)} of {world_size}")
    return ranks, escape_text(body[end:], max_chars=_MAX_TEXT)


def encode_failure(failure: Failure) -> bytes:
    """Encode a FAILED message."""
    fields = [
        failure.reason,
        failure.text[:_MAX_TEXT],
        failure.rank,
        failure.accused[:_MAX_ACCUSED],
        failure.remedy,
    ]
    return _HEAD.pack(ControlKind.FAILED, 0, 0) + json.dumps(fields).encode()


def decode_failure(body: bytes, world_size: int) -> Failure:
    """Decode the body of a FAILED message."""
    try:
        reason, text, rank, accused, remedy = json.loads(body)
        named = [int(one) for one in (rank, *accused)]
    except (ValueError, TypeError, RecursionError) as error:
        raise ControlError("of a failure that cannot be read") from error
    if not isinstance(rank, int) or not 0 <= min(named) <= max(named) < world_size:
        raise ControlError(f"of a failure of a rank that is none of {world_size}")
    return Failure(
        reason=escape_text(str(reason)),
        text=escape_text(str(text), max_chars=_MAX_TEXT),
        rank=rank,
        accused=tuple(named[1:]),
        remedy=escape_text(str(remedy)),
    )


def encode_parting(tally: Tally) -> bytes:
    """Encode a PARTING message; in place of a running number it has the count."""
    return _HEAD.pack(ControlKind.PARTING, 0, min(tally.count, _MOST)) + tally.unit.encode()


def decode_parting(count: int, body: bytes) -> Tally:
    """Decode a PARTING message."""
    return Tally(count=count, unit=escape_text(body, max_chars=_MAX_UNIT))


def encode_leaving(num_completed: Mapping[int, int]) -> Iterator[bytes]:
    """Encode as many LEAVING messages as it takes; ``num_completed`` calls of each stream.

    In place of a running number each says how many follow.
    """
    entries = [_LEFT.pack(stream, number) for stream, number in num_completed.items()]
    per_message = (MAX_TOLD_BYTES - _HEAD.size) // _LEFT.size
    starts = range(0, max(1, len(entries)), per_message)
    for num_left, start in zip(reversed(range(len(starts))), starts, strict=True):
        yield _HEAD.pack(ControlKind.LEAVING, 0, num_left) + b"".join(entries[start : start + per_message])


def decode_leaving(body: bytes) -> dict[int, int]:
    """Decode the body of a LEAVING message."""
    return dict(_LEFT.iter_unpack(body[: len(body) // _LEFT.size * _LEFT.size]))


def decode_head(payload: bytes) -> tuple[ControlKind, int, int, bytes]:
    """Return kind, stream, running number and body."""
    try:
        kind, stream, number = _HEAD.unpack_from(payload)
        return ControlKind(kind), stream, number, payload[_HEAD.size :]
    except (struct.error, ValueError) as error:
        raise ControlError(f"{len(payload)} bytes that are no control message") from error
