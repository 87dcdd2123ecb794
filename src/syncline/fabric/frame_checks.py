"""What fills the two 32-bit fields of every frame: CRC-32s, which find accidents, or codes that only a key can make.

With ``authenticate_frames`` each connection has two keys, one for each direction, from its handshake's secret and its
transcript (both nonces, the ranks, the class). A field is the code that UMAC-32 (RFC 4418) makes of four bytes: the
payload's with twice the number of the frame as its nonce, the header's, in which the payload's stands, with one more.
Frames are numbered on each connection and direction and the number is not sent, so a frame that is replayed, left out
or moved fails too. A connection that goes on with another socket keeps its keys and its numbers, and what is sent again
is the same bytes. Heartbeats beside the stream say their own numbers, which grow, and have nonces from 2**63 on; so no
nonce is ever used for two frames. Some few that fail end the peer: a forger has so many guesses in 2**30.

Compiled code makes the codes, for both transports (``native/frame_checks.hpp``); decision 0053 says why these.
"""

from __future__ import annotations

import hmac
from typing import NamedTuple, Protocol

from isal.isal_zlib import crc32

KEY_BYTES = 16


class FrameKeys(NamedTuple):
    """The keys of one connection, as one of its ends uses them."""

    sending: bytes
    receiving: bytes


class FrameChecks(Protocol):
    """The fields of the frames of one connection and direction, one frame after the other."""

    @property
    def blame(self) -> str:
        """What to say of a frame whose fields are wrong."""

    def add(self, part: memoryview) -> None:
        """Begin, or go on with, the payload of this frame."""

    def payload_field(self, rest: memoryview | bytes) -> int:
        """Return the field of the payload: of all that was added and then ``rest``."""

    def header_field(self, body: memoryview | bytes) -> int:
        """Return the field of the header whose other bytes are ``body``."""

    def is_sound(self, header: memoryview | bytes) -> bool:
        """Whether the header is the next one, and as it was sent."""

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

    def is_sound(self, header: memoryview | bytes) -> bool:
        """Compare the CRC-32 of the header."""
        return crc32(header[:-4]) == int.from_bytes(header[-4:], "little")

    def next_frame(self) -> None:
        """Nothing: a CRC-32 is of its frame alone."""

    def restart(self) -> None:
        """Forget what was added."""
        self._crc = 0


def make_checks(keys: FrameKeys | None) -> tuple[FrameChecks, FrameChecks]:
    """Return the checks of what is sent and of what is received."""
    if keys is None:
        return CrcChecks(), CrcChecks()
    from syncline.fabric import _native  # it is there: else keys are refused (see transport_sets)

    return _native.KeyedChecks(keys.sending), _native.KeyedChecks(keys.receiving)


def derive_frame_keys(key: bytes, transcript: bytes, *, is_dialer: bool) -> FrameKeys:
    """Return one end's keys from the handshake's key and all that both sides said before they were sure of each other.

    The label is none of those of the handshake's own tags, so that no key is ever shown as a tag.
    """
    connection = hmac.digest(key, b"syncline frames 2\0" + transcript, "sha256")
    dialers, greeters = (
        hmac.digest(connection, label, "sha256")[:KEY_BYTES] for label in (b"from dialer", b"from greeter")
    )
    return FrameKeys(dialers, greeters) if is_dialer else FrameKeys(greeters, dialers)
