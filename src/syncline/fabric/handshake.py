"""The handshake that opens every connection: four messages of fixed size, before anything is allocated.

::

    dialer                                                     greeter
    HELLO  versions, job, epoch, ranks, class, nonce   ->
                                                       <-      REPLY  version, nonce, HMAC(K, "S" + HELLO + REPLY)
    FINISH HMAC(K, "C" + HELLO + REPLY)                ->
                                                       <-      WELCOME position, HMAC(K, "W" + HELLO + REPLY + FINISH)

A dialer that is not welcomed, as the greeter had no place for it or the network broke, comes again. It cannot know
whether its FINISH has arrived, so it first asks to go on with that connection, as with one that broke later: by the
same messages. HELLO then says which one (an identity that both ends have from its first handshake) and for which time,
FINISH how much of it has arrived at the dialer. The greeter, who knows now that it is the same process, gives up the
old socket, and WELCOME says how much has arrived there.

The labels stop reflection, the nonces replay; ranks, class and epoch are bound by the MACs. K comes from the shared
secret, or from the job's nonce where there is none (then it stops accidents, not attackers). Only the opening is
authenticated: whoever can change packets on the way can still change frames, unless ``authenticate_frames`` keys them
by this handshake (:class:`FrameKeys`). Whether it does stands in HELLO, and both must want the same.

Pure: bytes in, bytes out. A refusal says why, as far as that leaks nothing to a stranger.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from syncline.fabric import frames

MAGIC = b"SYNCLINE"
VERSIONS = (frames.VERSION, frames.VERSION)
"""The oldest and the newest protocol version that this build speaks."""
NONCE_BYTES = 32
FRAME_KEY_BYTES = 16
_NO_MAC = bytes(32)

CONNECTION_ID_BYTES = 16
_HELLO = struct.Struct("<8sHH32sQIIhBBI16s32s")
_REPLY = struct.Struct("<8sHH32s32s")
_FINISH = struct.Struct("<8sHHQ32s")
_WELCOME = struct.Struct("<8sHQ32s")
_MAC_BYTES = 32
HELLO_BYTES, REPLY_BYTES, FINISH_BYTES, WELCOME_BYTES = _HELLO.size, _REPLY.size, _FINISH.size, _WELCOME.size


class Refusal(IntEnum):
    """Why a connection is refused."""

    NONE = 0
    GARBAGE = 1
    VERSION = 2
    JOB = 3
    EPOCH = 4
    RANK = 5
    DUPLICATE = 6
    CLASSES = 7
    SECRET = 8
    FRAMES = 9
    GONE = 10


REASONS = {
    Refusal.NONE: "nothing is wrong",
    Refusal.GARBAGE: "what answers there is not Syncline; check the address and the port",
    Refusal.VERSION: "the protocol versions differ; install the same Syncline on all hosts",
    Refusal.JOB: "the job ids differ; give all ranks of a job the same job_id, and other jobs another",
    Refusal.EPOCH: "it belongs to another start of the job; end the processes that an earlier attempt left behind",
    Refusal.RANK: "it is not the rank that was dialled; check that each process has its own RANK",
    Refusal.DUPLICATE: "this rank is connected already; check that no two processes have the same RANK",
    Refusal.CLASSES: "the numbers of connection classes differ; give all ranks the same options",
    Refusal.SECRET: "the shared secrets differ; give all ranks the same secret file",
    Refusal.FRAMES: "one of the two authenticates its frames and the other does not; give all ranks the same "
    "secret and the same authenticate_frames (SYNCLINE_AUTHENTICATE_FRAMES)",
    Refusal.GONE: "it has given up this rank, or is another process; look there for why",
}


class RefusedError(Exception):
    """The other side cannot be let in. ``answer`` is what to tell it, empty to say nothing."""

    def __init__(self, refusal: Refusal, answer: bytes = b"") -> None:
        super().__init__(REASONS[refusal])
        self.refusal = refusal
        self.answer = answer


class Terms(NamedTuple):
    """What this side brings to a handshake."""

    rank: int
    world_size: int
    job_id: str
    epoch: int
    key: bytes
    num_classes: int
    authenticates_frames: bool = False
    versions: tuple[int, int] = VERSIONS
    nonce: Callable[[int], bytes] = secrets.token_bytes

    @property
    def job(self) -> bytes:
        """The job's id in 32 bytes."""
        return hashlib.sha256(self.job_id.encode()).digest()


class FrameKeys(NamedTuple):
    """The keys of one connection's frames, as one of its ends uses them; it keeps them when it is opened again.

    Which codes they make stands in ``native/frame_checks.hpp``.
    """

    sending: bytes
    receiving: bytes


class Resumption(NamedTuple):
    """A connection that is opened again."""

    number: int
    """Which attempt this is, from 1 on."""
    connection_id: bytes
    position: int
    """How many bytes of the stream have arrived at the dialer, in whole frames."""


class Admission(NamedTuple):
    """With whom a connection was opened, and for what."""

    rank: int
    """The other one."""
    connection_class: int
    frame_keys: FrameKeys | None
    """What authenticates the frames of this connection, if something does."""
    connection_id: bytes
    resumption: Resumption | None
    """Where the dialer goes on, if the connection is opened again, or was not sure to be welcomed before."""


Resume = Callable[[int, int, Resumption], int | None]
"""Give up the old socket of a rank's connection class; return how much has arrived, None if there is none to resume."""


def derive_key(secret: bytes, *, job_id: str) -> bytes:
    """Return the handshake's key for one job."""
    return hmac.digest(secret, b"syncline handshake 1\0" + job_id.encode(), "sha256")


def derive_offer_key(key: bytes, *, epoch: int) -> bytes:
    """Return the key by which the ranks of one start of a job seal their offers of memory."""
    return hmac.digest(key, b"syncline memory offer 1\0" + epoch.to_bytes(8, "big"), "sha256")


def derive_frame_keys(key: bytes, transcript: bytes, *, is_dialer: bool) -> FrameKeys:
    """Return one end's keys from the handshake's key and all that both sides said before they were sure of each other.

    The label is none of those of the handshake's own tags, so that no key is ever shown as a tag.
    """
    connection = hmac.digest(key, b"syncline frames 2\0" + transcript, "sha256")
    dialers, greeters = (
        hmac.digest(connection, label, "sha256")[:FRAME_KEY_BYTES] for label in (b"from dialer", b"from greeter")
    )
    return FrameKeys(dialers, greeters) if is_dialer else FrameKeys(greeters, dialers)


class Dialer:
    """The side that connects."""

    def __init__(self, terms: Terms, *, peer: int, connection_class: int, resumption: Resumption | None = None) -> None:
        self._terms = terms
        self._resumption = resumption
        self._transcript = b""
        self.connection_id = resumption.connection_id if resumption else b""
        """Known when the handshake is finished."""
        self.frame_keys: FrameKeys | None = None
        """What authenticates the frames, if something does; known when the handshake is finished."""
        self.hello = _HELLO.pack(
            MAGIC,
            *terms.versions,
            terms.job,
            terms.epoch,
            terms.rank,
            peer,
            connection_class,
            terms.num_classes,
            terms.authenticates_frames,
            resumption.number if resumption else 0,
            self.connection_id,
            terms.nonce(NONCE_BYTES),
        )
        """The first message."""

    def finish(self, reply: bytes) -> bytes:
        """Judge the greeter's reply and return the last message; :class:`RefusedError` if either side refuses."""
        magic, version, status, _, mac = _REPLY.unpack(reply)
        _check_head(magic, status)
        oldest, newest = self._terms.versions
        if not oldest <= version <= newest:
            raise RefusedError(Refusal.VERSION, _finish_message(version, Refusal.VERSION))
        expected = _mac(self._terms.key, b"S", self.hello, reply[:-_MAC_BYTES])
        if not hmac.compare_digest(mac, expected):
            raise RefusedError(Refusal.SECRET, _finish_message(version, Refusal.SECRET))
        position = self._resumption.position if self._resumption else 0
        finish = _finish_message(version, Refusal.NONE, self._terms.key, self.hello + reply, position)
        self._transcript = self.hello + reply + finish
        if self._resumption is None:
            self.frame_keys = _frame_keys(self._terms, self.hello + reply, is_dialer=True)
            self.connection_id = _connection_id(self._terms, self.hello + reply)
        return finish

    def enter(self, welcome: bytes) -> int:
        """Judge the greeter's last message; return how much of what was sent on this connection has arrived there."""
        magic, status, position, mac = _WELCOME.unpack(welcome)
        _check_head(magic, status)
        if not hmac.compare_digest(mac, _mac(self._terms.key, b"W", self._transcript, welcome[:-_MAC_BYTES])):
            raise RefusedError(Refusal.SECRET)
        return int(position)


class Greeter:
    """The side that was connected to. ``is_taken(rank, class)`` says whether there is such a connection already."""

    def __init__(self, terms: Terms, *, is_taken: Callable[[int, int], bool], resume: Resume = lambda *_: None) -> None:
        self._terms = terms
        self._is_taken = is_taken
        self._resume = resume
        self._number, self._connection_id = 0, b""
        self.welcome = b""
        """What the dialer is told in the end."""
        self._hello = b""
        self._reply = b""
        self._identity = (-1, -1)

    def reply(self, hello: bytes) -> bytes:
        """Judge the first message and return the second."""
        magic, oldest, newest, job, epoch, source, target, connection_class, *rest = _HELLO.unpack(hello)
        num_classes, authenticates_frames, number, connection_id, _ = rest
        if magic != MAGIC:
            raise RefusedError(Refusal.GARBAGE)
        terms = self._terms
        version = min(newest, terms.versions[1])
        refusal = Refusal.NONE
        if version < max(oldest, terms.versions[0]):
            refusal = Refusal.VERSION
        elif not hmac.compare_digest(job, terms.job):
            refusal = Refusal.JOB
        elif epoch != terms.epoch:
            refusal = Refusal.EPOCH
        elif differing := _compare_options(terms, terms.num_classes if number else num_classes, authenticates_frames):
            refusal = differing
        elif target != terms.rank or not terms.rank < source < terms.world_size:
            refusal = Refusal.RANK
        elif not frames.CONTROL_CLASS <= connection_class < num_classes:
            refusal = Refusal.CLASSES
        elif not number and self._is_taken(source, connection_class):
            refusal = Refusal.DUPLICATE
        if refusal:
            raise RefusedError(refusal, _REPLY.pack(MAGIC, terms.versions[1], refusal, bytes(NONCE_BYTES), _NO_MAC))
        self._hello = hello
        self._identity = (source, connection_class)
        self._number, self._connection_id = number, connection_id
        body = _REPLY.pack(MAGIC, version, Refusal.NONE, terms.nonce(NONCE_BYTES), _NO_MAC)[:-_MAC_BYTES]
        self._reply = body + _mac(terms.key, b"S", hello, body)
        return self._reply

    def finish(self, message: bytes) -> Admission:
        """Judge the last message; return who the dialer is."""
        magic, _, status, position, _ = _FINISH.unpack(message)
        _check_head(magic, status)
        terms, transcript = self._terms, self._hello + self._reply
        if not hmac.compare_digest(message[-_MAC_BYTES:], _mac(terms.key, b"C", transcript, message[:-_MAC_BYTES])):
            raise RefusedError(Refusal.SECRET)
        if self._number:
            resumption = Resumption(self._number, self._connection_id, position)
            self._let_in(self._resume(*self._identity, resumption), Refusal.GONE, transcript + message)
            return Admission(*self._identity, None, resumption.connection_id, resumption)
        self._let_in(None if self._is_taken(*self._identity) else 0, Refusal.DUPLICATE, transcript + message)
        keys = _frame_keys(terms, transcript, is_dialer=False)
        return Admission(*self._identity, keys, _connection_id(terms, transcript), None)

    def _let_in(self, position: int | None, refusal: Refusal, transcript: bytes) -> None:
        """Make the welcome, or refuse where nothing can be opened at any position."""
        if position is None:
            raise RefusedError(refusal, _WELCOME.pack(MAGIC, refusal, 0, _NO_MAC))
        body = _WELCOME.pack(MAGIC, Refusal.NONE, position, _NO_MAC)[:-_MAC_BYTES]
        self.welcome = body + _mac(self._terms.key, b"W", transcript, body)


def _mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, label + b"".join(parts), "sha256")


def _compare_options(terms: Terms, num_classes: int, authenticates_frames: int) -> Refusal:
    if authenticates_frames != terms.authenticates_frames:
        return Refusal.FRAMES
    return Refusal.NONE if num_classes == terms.num_classes else Refusal.CLASSES


def _frame_keys(terms: Terms, transcript: bytes, *, is_dialer: bool) -> FrameKeys | None:
    return derive_frame_keys(terms.key, transcript, is_dialer=is_dialer) if terms.authenticates_frames else None


def _connection_id(terms: Terms, transcript: bytes) -> bytes:
    return _mac(terms.key, b"I", transcript)[:CONNECTION_ID_BYTES]


def _finish_message(
    version: int, status: Refusal, key: bytes = b"", transcript: bytes = b"", position: int = 0
) -> bytes:
    """Return the last message, with its MAC where there is a transcript to be sure of."""
    body = _FINISH.pack(MAGIC, version, status, position, _NO_MAC)[:-_MAC_BYTES]
    return body + (_mac(key, b"C", transcript, body) if transcript else _NO_MAC)


def _check_head(magic: bytes, status: int) -> None:
    """Raise :class:`RefusedError` for what is no message of a handshake, or where the other side refuses."""
    if magic != MAGIC or status:
        raise RefusedError(Refusal(status) if magic == MAGIC and status in REASONS else Refusal.GARBAGE)
