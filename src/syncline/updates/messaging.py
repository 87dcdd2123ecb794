"""What the rules that talk past the collectives have in common: messages, notes, and drivers of state machines.

A rule of this kind decides in a pure state machine. Its messages go between ranks beside the collectives, in the order
in which they were sent. :class:`MessageStream` sends and receives memory whose size both ends know, so that a receive
can be posted, into the memory where it is used, before it is known what will come. :class:`Mailbox` carries what one
end alone knows: a text of any length, and with it the sizes of the payloads that follow. Both are of the loop's thread
alone.

A :class:`Driver` joins the machine to the fabric and to the training thread. The machine is told what happens on the
loop's thread, and what it says is done there; the training thread posts what it has (:meth:`Port.call_soon`) and waits
for what it needs. What both see is guarded by the lock of ``_changed``. The first failure counts: it ends every wait,
and every later call raises it.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from syncline.errors import UpdateError, accusing
from syncline.fabric import PeerLeftError
from syncline.fabric.slice_executor import first_tag
from syncline.members import Membership
from syncline.observe import say
from syncline.runtime.port import Port
from syncline.runtime.relay import LossHandler

T = TypeVar("T")
Done = Callable[[], None]

MAX_TEXT_BYTES = 1 << 20
HEAD_BYTES = 1024
_LENGTH = struct.Struct("<I")


class MessageStream:
    """Messages of some kinds: for each peer and kind they are numbered, and received by number.

    ``epoch`` tells streams apart that follow each other under one number; it is below 2**14, and a kind below 2**16.
    With ``even_if_lost``, what a rank had sent before it was lost is still received.
    """

    def __init__(
        self,
        port: Port,
        stream: int,
        *,
        urgency: int,
        connection_class: int = 0,
        epoch: int = 0,
        even_if_lost: bool = False,
    ) -> None:
        self.port = port
        self._even_if_lost = even_if_lost
        self.epoch = epoch
        self.is_retired = False
        self._stream = stream
        self._urgency = urgency
        self._connection_class = connection_class
        self._num_sent: Counter[tuple[int, int]] = Counter()
        self._num_received: Counter[tuple[int, int]] = Counter()

    def send(self, peer: int, kind: int, memory: memoryview, on_sent: Done | None = None) -> None:
        """Send ``memory``, unchanged until ``on_sent``; nothing if this was retired."""
        if self.is_retired:
            return
        tag = self._next_tag(self._num_sent, peer, kind)
        done = None if on_sent is None else self._unless_retired(on_sent)
        self.port.send(peer, tag, memory, urgency=self._urgency, connection_class=self._connection_class, on_sent=done)

    def receive(self, peer: int, kind: int, into: memoryview, on_received: Done) -> None:
        """Let the peer's next message of that kind land in ``into``."""
        tag = self._next_tag(self._num_received, peer, kind)
        received = self._unless_retired(on_received)
        self.port.receive(peer, tag, into, urgency=self._urgency, on_received=received, even_if_lost=self._even_if_lost)

    def cancel(self, peer: int, kind: int) -> None:
        """Forget the receive that was posted last; its memory is not written any more."""
        self.port.cancel(peer, self._tag(self._num_received[peer, kind] - 1, kind))

    def retire(self) -> None:
        """Tell nobody anything any more: nothing is sent, and what still comes lands and is dropped."""
        self.is_retired = True

    def _next_tag(self, counter: Counter[tuple[int, int]], peer: int, kind: int) -> int:
        number = counter[peer, kind]
        counter[peer, kind] += 1
        return self._tag(number, kind)

    def _tag(self, number: int, kind: int) -> int:
        return first_tag(self._stream, number, kind) + self.epoch

    def _unless_retired(self, callback: Done) -> Done:
        def call() -> None:
            if not self.is_retired:
                callback()

        return call


class Mailbox(Generic[T]):
    """Texts with payloads. A payload lands in memory of its own, so a message that is refused spoils nothing.

    The text goes in a head of fixed size, and what has no room there behind it; then come the payloads. ``decode``
    makes a message of the text, and says where its payloads are to land (those of no bytes are not sent); it raises
    ValueError for what is no message, and then ``on_lost`` is told, and nothing more is received from that peer.
    """

    HEAD, REST, PAYLOAD = range(3)
    """Kinds of the streams' messages; each payload of a message has one of its own."""

    def __init__(
        self,
        texts: MessageStream,
        payloads: MessageStream,
        *,
        decode: Callable[[bytes], tuple[T, Sequence[memoryview]]],
        on_message: Callable[[int, T], None],
        on_lost: LossHandler,
    ) -> None:
        """``on_message`` is told of a message by sender, once it is whole; :meth:`listen` again for the next one."""
        self._texts, self._payloads = texts, payloads
        self._decode, self._on_message, self._on_lost = decode, on_message, on_lost
        self.sent_bytes: Counter[int] = Counter()

    def send(self, peer: int, text: bytes, payloads: Sequence[memoryview] = (), on_sent: Done | None = None) -> int:
        """Send a message, and return its bytes; payloads stay unchanged until ``on_sent``."""
        assert len(text) <= MAX_TEXT_BYTES, "a text describes what follows, and is short"
        room = HEAD_BYTES - _LENGTH.size
        head = bytearray(HEAD_BYTES)
        _LENGTH.pack_into(head, 0, len(text))
        head[_LENGTH.size : _LENGTH.size + min(len(text), room)] = text[:room]
        filled = [(kind, memory) for kind, memory in enumerate(payloads, self.PAYLOAD) if memory.nbytes]
        sent = None if on_sent is None else _after(1 + len(filled), on_sent)
        self._texts.send(peer, self.HEAD, memoryview(head), sent)
        if len(text) > room:
            self._texts.send(peer, self.REST, memoryview(bytearray(text[room:])))
        for kind, memory in filled:
            self._payloads.send(peer, kind, memory, sent)
        num_bytes = len(head) + max(0, len(text) - room) + sum(memory.nbytes for _, memory in filled)
        self.sent_bytes[peer] += num_bytes
        return num_bytes

    def listen_to_all(self) -> None:
        """Receive the next message of every rank, this one too."""
        for peer in range(self._texts.port.world_size):
            self.listen(peer)

    def listen(self, peer: int) -> None:
        """Receive the peer's next message."""
        head = memoryview(bytearray(HEAD_BYTES))
        self._texts.receive(peer, self.HEAD, head, partial(self._on_head, peer, head))

    def _on_head(self, peer: int, head: memoryview) -> None:
        (num_bytes,) = _LENGTH.unpack_from(head)
        text = bytes(head[_LENGTH.size : _LENGTH.size + num_bytes])
        if num_bytes > MAX_TEXT_BYTES:
            self._refuse(peer, f"a text of {num_bytes} bytes")
        elif num_bytes == len(text):
            self._on_text(peer, text)
        else:
            rest = memoryview(bytearray(num_bytes - len(text)))
            received = partial(self._on_rest, peer, text, rest)
            self._texts.receive(peer, self.REST, rest, received)

    def _on_rest(self, peer: int, text: bytes, rest: memoryview) -> None:
        self._on_text(peer, text + bytes(rest))

    def _on_text(self, peer: int, text: bytes) -> None:
        try:
            message, payloads = self._decode(text)
        except ValueError as error:
            self._refuse(peer, str(error))
            return
        filled = [(kind, memory) for kind, memory in enumerate(payloads, self.PAYLOAD) if memory.nbytes]
        deliver = partial(self._on_message, peer, message)
        landed = _after(len(filled), deliver)
        for kind, memory in filled:
            self._payloads.receive(peer, kind, memory, landed)
        if not filled:
            deliver()

    def _refuse(self, peer: int, what: str) -> None:
        self._on_lost(peer, UpdateError(f"{self._texts.port.describe_peer(peer)} sent {what}"))


def _after(number: int, callback: Done) -> Done:
    """Return what calls ``callback`` when it is called for that number of times."""
    num_left = number

    def call() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            callback()

    return call


# Records as text: frozen dataclasses of numbers, texts, tuples and of each other in JSON, without their payload, and
# back: what a record within another comes back as is a tuple of its fields.

PAYLOAD_FIELD = "payload"
"""What is not in the text."""


def encode_record(record: Any, **beside: object) -> bytes:
    """Return a record as text; ``beside`` goes with it."""
    names = [field.name for field in dataclasses.fields(record) if field.name != PAYLOAD_FIELD]
    fields = {name: getattr(record, name) for name in names}
    content = [type(record).__name__, fields, beside]
    return json.dumps(content, separators=(",", ":"), default=dataclasses.astuple).encode()


def decode_record(text: bytes, kinds: Iterable[type], what: str) -> tuple[Any, dict[str, Any]]:
    """Return the record and what went beside it; raises ValueError if ``text`` is none of ``kinds``, and says so."""
    try:
        name, fields, beside = json.loads(text)
        [kind] = (kind for kind in kinds if kind.__name__ == name)
        record = kind(**{key: _as_tuple(value) for key, value in fields.items()})
        return record, {key: _as_tuple(value) for key, value in beside.items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"this is no message of {what}: {text[:80]!r}") from error


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


LOOK_S = 0.5
"""After so long a wait, the driver looks for what holds it up."""
LOOK_AGAIN_S = 2.0
STALL_GRACE_S = 4.0
"""Heartbeats tell of a training thread some seconds late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """To everyone: ``rank`` lives and is left behind. Of those that are lost the fabric tells everyone."""

    rank: int


class Driver(ABC):
    """Failures, losses, and waits that end; what the machine's events and instructions are is the subclass's.

    Drivers of all ranks tell each other *notes*: small records, ahead of all else.
    """

    kinds_of_notes: tuple[type, ...] = (LeftBehind,)

    def __init__(self, port: Port, membership: Membership, *, timeout_s: float) -> None:
        self.membership = membership
        self._port = port
        self._timeout_s = timeout_s
        self._progress = port.progress
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    # --- the training thread -------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise what has gone wrong, if anything has."""
        if self._failure is not None:
            raise self._failure

    def _wait(self, is_over: Callable[[], bool], reason: str) -> None:
        """Wait until ``is_over`` (asked with the lock held), a failure, or the deadline, for a ``reason`` in a word.

        Who is waited for, lives, and does not train is left behind when it has been waited for long enough.
        """
        start_s, wait_s = time.monotonic(), LOOK_S
        limit_s = min(self._port.stalls.limit_s, self._timeout_s)
        end_s = start_s + max(self._timeout_s, limit_s + STALL_GRACE_S)
        with self._progress.waiting(reason):
            while not self._wait_for(is_over, wait_s) and (now_s := time.monotonic()) < end_s:
                if now_s - start_s >= limit_s:
                    self._port.call(self._leave_behind, self._timeout_s)
                self._look()
                wait_s = min(2 * wait_s, LOOK_AGAIN_S, max(LOOK_S, end_s - now_s - LOOK_S))

    def _wait_for(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Wait without looking for anything; False if neither that nor a failure came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._failure is not None or is_over(), seconds)

    def _look(self) -> None:  # noqa: B027 - most have nobody to ask
        """Find out what holds up a wait."""

    # --- the loop's thread ---------------------------------------------------------------------------------------

    def _watch(self, stream: int) -> None:
        """Hear of losses from now on, and of those before, and of notes on a ``stream`` of its own."""
        self._port.watch_controls(stream, self._on_control)
        self._port.watch_losses(self._lose)

    def _send_note(self, peer: int, note: Any) -> None:
        if peer == self._port.rank:
            self._port.call_soon(self._on_note, peer, note)
        else:
            self._port.tell(peer, encode_record(note))

    def _tell_others(self, note: Any) -> None:
        for peer in range(self._port.world_size):
            if peer != self._port.rank:
                self._send_note(peer, note)

    def _on_control(self, peer: int, payload: bytes) -> None:
        try:
            note, _ = decode_record(payload, self.kinds_of_notes, "an update's driver")
        except ValueError as error:
            self._lose(peer, UpdateError(f"{self._port.describe_peer(peer)} sent what is none: {error}"))
        else:
            self._on_note(peer, note)

    def _on_note(self, peer: int, note: Any) -> None:
        """Hear of a rank that hangs, this one perhaps; what one that was left behind itself tells is nothing."""
        assert isinstance(note, LeftBehind)
        hangs, who = note.rank, self._port.describe_peer
        if {hangs, peer}.intersection(self.membership.lost) or self._failure is not None:
            return
        if hangs == self._port.rank:
            text = f"{who(hangs)} was left behind: {who(peer)} takes this rank for hung; the others go on without it"
            self.fail(accusing(UpdateError(f"{text}; start it again from a checkpoint"), hangs))
        else:
            self._leave(hangs, f"{who(hangs)} hangs, as {who(peer)} reports")

    def _lose(self, peer: int, error: Exception) -> None:
        """Go on without a rank, or fail; this one is lost when its fleet closes, or its loop is broken."""
        if peer == self._port.rank:
            self.fail(error)
            return
        is_known = peer in self.membership.lost
        self._on_lost(peer, error)
        if is_known or peer not in self.membership.lost or isinstance(error, PeerLeftError) or self._failure:
            return
        if self.membership.living[:1] == (self._port.rank,):  # one says it for all
            say(f"{error}; the others go on without it")

    @abstractmethod
    def _on_lost(self, peer: int, error: Exception) -> None:
        """Go on without another rank, or fail."""

    def _awaited_peers(self) -> Collection[int]:
        """Return whom this rank may wait for."""
        return ()

    def _leave(self, peer: int, text: str) -> None:
        """Go on without a rank that lives, as all others are to."""
        self._tell_others(LeftBehind(rank=peer))
        self._lose(peer, UpdateError(text))

    def _leave_behind(self) -> None:
        stalls = self._port.stalls
        for peer in sorted(stalls.stalled.intersection(self._awaited_peers()).difference(self.membership.lost)):
            who = self._port.describe_peer(peer)
            text = f"{who} lives, but its training thread has made no call for {stalls.still_s(peer):.1f} s"
            self._leave(peer, text)

    def fail(self, error: BaseException) -> None:
        """End everything with ``error``, from any thread."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()
