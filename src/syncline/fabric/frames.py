"""Frames: what travels on a connection once it is authenticated.

Every frame is a header of 48 bytes and at most one chunk of payload. Both carry a CRC-32: TCP's own checksum misses
about one damaged packet in some ten million (Stone and Partridge, 2000), and a damaged gradient is worse than an error.
The checksum is not a MAC: it finds accidents, not attackers. With ``authenticate_frames`` keyed codes stand in the
fields of the checksums (:mod:`syncline.fabric.frame_checks`).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from syncline.fabric.frame_checks import CrcChecks, FrameChecks
from syncline.fabric.options import MAX_CHUNK_BYTES

MAGIC = 0x4C53
VERSION = 3
MAX_FLAGS = 0xFFFF
MAX_REASON_BYTES = 1024
CONTROL_CLASS = -1
"""The class number of the control connection; data classes count from 0."""
MEMORY_CLASS = -2
"""The class number under which statistics count what was copied between ranks of one machine."""

_BODY = struct.Struct("<HBBhHQIQQII")
_HEADER = struct.Struct("<HBBhHQIQQIII")
_CRC = struct.Struct("<I")
BODY_BYTES = _BODY.size
HEADER_BYTES = _HEADER.size


class FrameError(Exception):
    """What arrived is not a frame, or not one that is allowed here. The connection cannot go on."""


class DamagedFrameError(FrameError):
    """Bytes were changed on the way."""


class FrameType(IntEnum):
    """What a frame is for. All but EAGER, DATA and END travel on the control connection alone."""

    EAGER = 1
    """A whole small message, sent without asking."""
    DATA = 2
    """A chunk of a granted message; the flags say how many TCP segments were sent again since the last one."""
    END = 3
    """The last frame of a connection that is closed in good order."""
    REQUEST = 4
    """The sender has a message of ``message_bytes`` for ``tag``, in its memory at ``offset`` if that is not 0."""
    GRANT = 5
    """The message ``tag`` may be sent up to byte ``message_bytes``."""
    DISCARD = 6
    """Nothing more of ``tag`` will be granted; the sender drops the rest."""
    CREDIT = 7
    """``message_bytes`` more may be sent without asking."""
    CONTROL = 8
    """A message of the layer above."""
    HEARTBEAT = 9
    """The sender's loop runs; or it does not, and its process lives. Then its signature is not 0, and it stands beside
    the connection's stream: it is not counted, and never sent again. With keys ``offset`` is its number."""
    FAREWELL = 10
    """The END of every connection has been seen: all that was sent has been read."""
    LOST = 11
    """Rank ``tag`` is lost; the payload says why. The upper half is 0, or one more than the rank whose word the sender
    took (:func:`on_word_of`)."""
    OFFER = 12
    """The sender's memory may be read; the payload lets the receiver try."""
    ACCEPT = 13
    """The receiver of an offer can read the memory: requests may name addresses."""
    FETCHED = 14
    """The message ``tag`` was copied out of the sender's memory."""
    OPEN = 15
    """The sender opens further connection classes; the payload says which, for people and for comparing."""
    OPENED = 16
    """The sender has all connections of classes 0 to ``tag`` - 1 to this peer."""
    ACKNOWLEDGED = 17
    """The sender has the first ``message_bytes`` of what this peer sends on the connection of class ``tag`` - 1."""


DATA_TYPES = frozenset({FrameType.EAGER, FrameType.DATA, FrameType.END})
_CRCS = CrcChecks()
_TYPES = frozenset(int(kind) for kind in FrameType)


def cut_reason(reason: str) -> bytes:
    """Return why a rank is lost as a frame tells it."""
    return reason.encode()[:MAX_REASON_BYTES]


def on_word_of(accuser: int, lost: int) -> int:
    """Return the tag of a frame that tells that ``lost`` is lost because ``accuser`` says so."""
    return (accuser + 1) << 32 | lost


def read_loss(tag: int, *, teller: int) -> tuple[int, int]:
    """Return who is lost by the tag of such a frame, and whose word that is: the teller's own, or another's."""
    lost, other = tag & 0xFFFFFFFF, tag >> 32
    return lost, other - 1 if other else teller


class Frame(NamedTuple):
    """A decoded header."""

    magic: int
    version: int
    type: int
    connection_class: int
    flags: int
    tag: int
    signature: int
    message_bytes: int
    offset: int
    chunk_bytes: int
    payload_crc: int
    header_crc: int


def encode_header(
    kind: FrameType,
    connection_class: int,
    *,
    flags: int = 0,
    tag: int = 0,
    signature: int = 0,
    message_bytes: int = 0,
    offset: int = 0,
    payload: memoryview | bytes = b"",
    checks: FrameChecks = _CRCS,
) -> bytes:
    """Return the header of the next frame, with ``payload``, which is sent after it and not copied."""
    body = _BODY.pack(
        MAGIC,
        VERSION,
        kind,
        connection_class,
        flags,
        tag,
        signature,
        message_bytes,
        offset,
        len(payload),
        checks.payload_field(payload),
    )
    header = body + _CRC.pack(checks.header_field(body))
    checks.next_frame()
    return header


def decode_header(buffer: memoryview, checks: FrameChecks = _CRCS) -> Frame:
    """Read a header from the first bytes of ``buffer``; raise :class:`FrameError` if it is none."""
    frame = Frame._make(_HEADER.unpack_from(buffer))
    is_sound = checks.is_sound(buffer[:HEADER_BYTES])
    if frame.magic != MAGIC or frame.version != VERSION:
        raise (FrameError if is_sound else DamagedFrameError)(
            f"frame begins with {frame.magic:#06x} version {frame.version}: not one of ours"
        )
    if not is_sound:
        raise DamagedFrameError(f"a frame header failed its checksum: {checks.blame}")
    if (
        frame.type not in _TYPES
        or frame.chunk_bytes > MAX_CHUNK_BYTES
        or (frame.flags and frame.type != FrameType.DATA)
    ):
        raise FrameError(
            f"frame type {frame.type} with {frame.chunk_bytes} bytes and flags {frame.flags} is not allowed"
        )
    return frame


def check_payload(frame: Frame, rest: memoryview | bytes, checks: FrameChecks = _CRCS) -> None:
    """Raise :class:`FrameError` unless what was added to ``checks``, and then ``rest``, is what the header promised.

    The frame is complete with this.
    """
    if checks.payload_field(rest) != frame.payload_crc:
        raise DamagedFrameError(
            f"{frame.chunk_bytes} bytes of message {frame.tag:#x} failed their checksum: {checks.blame}"
        )
    checks.next_frame()
