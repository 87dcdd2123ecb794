"""What frames are for: they travel on a connection once it is authenticated.

Every frame is a header of 48 bytes and at most one chunk of payload, which compiled code makes and parses
(``native/frames.hpp``). Both carry a CRC-32: TCP's own checksum misses about one damaged packet in some ten million
(Stone and Partridge, 2000), and a damaged gradient is worse than an error. The checksum is not a MAC: it finds
accidents, not attackers. With ``authenticate_frames`` keyed codes stand in the fields of the checksums.
"""

from __future__ import annotations

from enum import IntEnum

VERSION = 6
MAX_REASON_BYTES = 1024
CONTROL_CLASS = -1
"""The class number of the control connection; data classes count from 0."""
MEMORY_CLASS = -2
"""The class number under which statistics count what was copied between ranks of one machine."""


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
    GOSSIP = 18
    """What a rank tells ranks that it is not connected to; ``tag`` says who, and which of its tellings it is. Who gets
    it for the first time passes it on (:mod:`syncline.fabric.gossip`)."""
    ROUTED = 19
    """A message of the layer above that is passed on; ``tag`` says from whom, and to whom."""
    REST = 20
    """The sender would close the connections to this peer for want of use (``tag`` 0), or agrees to that (1)."""


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
