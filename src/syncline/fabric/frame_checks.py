"""What fills the two 32-bit fields of every frame: CRC-32s, which find accidents, or codes that only a key can make.

With ``authenticate_frames`` each connection has two keys, one for each direction, from its handshake's secret and its
transcript (both nonces, the ranks, the class). A field is a BLAKE2b keyed hash of four bytes (RFC 7693): the payload's
is over the number of the frame and the payload, the header's over the number and the header, in which the payload's
stands. Frames are numbered on each connection and direction and the number is not sent, so a frame that is replayed,
left out or moved fails too. A connection that goes on with another socket keeps its keys and its numbers, and what is
sent again is the same bytes. Some few that fail end the peer: a forger has so many guesses in 2**32.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import NamedTuple, Protocol

from isal.isal_zlib import crc32

FIELD_BYTES = 4


class FrameKeys(NamedTuple):
    """The keys of one connection, as one of its ends uses them."""

    sending: bytes
    receiving: bytes


class FrameChecks(Protocol):
    """The fields of the frames of one connection and direction, one frame after the other."""

    blame: str
    """What to say of a frame whose fields are wrong."""

    def add(self, part: memoryview) -> None:
        """Begin, or go on with, the payload of this frame."""

    def payload_field(self, rest: memoryview | bytes) -> int:
        """Return the field of the payload: of all that was added and then ``rest``."""

    def header_field(self, body: memoryview | bytes) -> int:
        """Return the field of the header whose other bytes are ``body``."""

    def next_frame(self) -> None:
        """Go on to the next frame: this one was made, or found to be sound."""

    def restart(self) -> None:
        """Forget what was added: this frame comes again from its first byte."""


class CrcChecks:
    """CRC-32s: they find damage, and anyone can make them."""

    blame = (
        "they were changed between the sender's memory and this one, or while they were being sent; "
        "check memory, cable and NIC offloads"
    )

    def __init__(self) -> None:
        self._crc = 0

    def add(self, part: memoryview) -> None:
        """Count a part in."""
        self._crc = crc32(part, self._crc)

    def payload_field(self, rest: memoryview | bytes) -> int:
        """Return the CRC-32 of the payload."""
        crc, self._crc = self._crc, 0
        return crc32(rest, crc)

    def header_field(self, body: memoryview | bytes) -> int:
        """Return the CRC-32 of the header."""
        return crc32(body)

    def next_frame(self) -> None:
        """Nothing: a CRC-32 is of its frame alone."""

    def restart(self) -> None:
        """Forget what was added."""
        self._crc = 0


class KeyedChecks:
    """Keyed hashes over the frame's number and its bytes."""

    blame = (
        "the authentication code does not fit; the frame was changed, repeated, left out or moved by someone on the "
        "way, or damaged: find out who can change packets between the hosts, then check memory, cable and NIC offloads"
    )

    def __init__(self, key: bytes) -> None:
        self._payload_start = blake2b(key=key, digest_size=FIELD_BYTES, person=b"payload")
        self._header_start = blake2b(key=key, digest_size=FIELD_BYTES, person=b"header")
        self._number = 0
        self._payload = self._start(self._payload_start)

    def add(self, part: memoryview) -> None:
        """Count a part in."""
        self._payload.update(part)

    def payload_field(self, rest: memoryview | bytes) -> int:
        """Return the payload's field."""
        self._payload.update(rest)
        return int.from_bytes(self._payload.digest(), "little")

    def header_field(self, body: memoryview | bytes) -> int:
        """Return the header's field."""
        header = self._start(self._header_start)
        header.update(body)
        return int.from_bytes(header.digest(), "little")

    def next_frame(self) -> None:
        """Count on."""
        self._number += 1
        self.restart()

    def restart(self) -> None:
        """Forget what was added; the number stays."""
        self._payload = self._start(self._payload_start)

    def _start(self, keyed: blake2b) -> blake2b:
        """Return a hash that has taken the key and the frame's number."""
        begun = keyed.copy()
        begun.update(self._number.to_bytes(8, "little"))
        return begun


def make_checks(keys: FrameKeys | None) -> tuple[FrameChecks, FrameChecks]:
    """Return the checks of what is sent and of what is received."""
    if keys is None:
        return CrcChecks(), CrcChecks()
    return KeyedChecks(keys.sending), KeyedChecks(keys.receiving)


def derive_frame_keys(key: bytes, transcript: bytes, *, is_dialer: bool) -> FrameKeys:
    """Return one end's keys from the handshake's key and all that both sides said before they were sure of each other.

    The label is none of those of the handshake's own tags, so that no key is ever shown as a tag.
    """
    connection = hmac.digest(key, b"syncline frames 1\0" + transcript, "sha256")
    dialers, greeters = (hmac.digest(connection, label, "sha256") for label in (b"from dialer", b"from greeter"))
    return FrameKeys(dialers, greeters) if is_dialer else FrameKeys(greeters, dialers)
