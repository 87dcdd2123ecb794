"""Frames as `native/frames.hpp` describes them, made and parsed by hand, for peers that tests drive."""

import struct
import zlib
from typing import NamedTuple

from syncline.fabric._native import KeyedChecks
from syncline.fabric.frames import VERSION, FrameType

MAGIC = 0x4C53
_BODY = struct.Struct("<HBBhHQIQQII")
_HEADER = struct.Struct("<HBBhHQIQQIII")
BODY_BYTES, HEADER_BYTES = _BODY.size, _HEADER.size


class CrcChecks:
    """CRC-32s, as anyone can make them."""

    def payload_field(self, payload):
        return zlib.crc32(payload)

    def header_field(self, body):
        return zlib.crc32(body)

    def next_frame(self):
        """Nothing: a CRC-32 is of its frame alone."""


def make_checks(keys):
    """Return the checks of what is sent and of what is received; without keys they are CRC-32s."""
    return (CrcChecks(), CrcChecks()) if keys is None else tuple(KeyedChecks(key) for key in keys)


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
    payload_field: int
    header_field: int


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
    checks=CrcChecks(),  # noqa: B008 - it has no state
):
    """Return the header of the next frame, whose payload follows it."""
    numbers = (flags, tag, signature, message_bytes, offset, len(payload), checks.payload_field(payload))
    body = _BODY.pack(MAGIC, VERSION, kind, connection_class, *numbers)
    header = body + struct.pack("<I", checks.header_field(body))
    checks.next_frame()
    return header


def decode_header(header):
    """Read a header from the first bytes."""
    frame = Frame._make(_HEADER.unpack_from(header))
    assert (frame.magic, frame.version) == (MAGIC, VERSION)
    return frame


def check_frame(header, payload, checks):
    """Assert that both fields of the next frame are as its sender made them."""
    frame = decode_header(header)
    assert checks.payload_field(payload) == frame.payload_field
    assert checks.header_field(header[:BODY_BYTES]) == frame.header_field
    checks.next_frame()
