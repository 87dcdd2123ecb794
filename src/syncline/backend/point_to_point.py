"""Send and receive between two ranks of a group: matched by (source, tag), in order; a receive may be from anyone.

A *head* goes ahead of each message: tag, size, number. It carries the message itself if that is small. Else the
message follows: it is announced to the receiver, and moves only where a receive waits for it, straight into the
tensor; one of middling size, which senders send unasked, is taken into memory of its own meanwhile, within a budget.
A sender of a large message hears of its receiver whether the sizes agree. So neither waits for ever if they do not,
and a rank that leaves after its sends has left nothing behind that is still to be asked for.

Between ranks that share memory, messages pass through an inbox there: the sending thread writes, and whichever thread
waits for a message, or asks whether one is over, reads, for all of them. Of a large one an offer passes through, and
the reader copies it from where it is. So no message between them wakes a communication thread, but where a large one
is offered to a rank that asked for one and where nobody waits: its sender calls it, as it may be what the rank's next
step hangs on. Where there is no room, a message goes the other way; its number says when its turn is, as one of either
way can overtake those of the other. The same goes for memory that cannot be read.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from syncline.backend.matching import MessageHead, MessageMatcher
from syncline.errors import ConfigurationError, DeadlineError, FabricError, MismatchError, PeerLostError
from syncline.fabric import PeerLeftError
from syncline.fabric.slice_executor import NUMBER_MASK, first_tag
from syncline.runtime import Communicator
from syncline.runtime.work import Work

if TYPE_CHECKING:
    from syncline.fabric import _native

HEAD_BYTES = 512
_HEAD = struct.Struct("<BxxxxxxxqqqQ")
"""Kind, tag, bytes of the message, bytes of it that are in the head (-1: none), number."""
INLINE_BYTES = HEAD_BYTES - _HEAD.size
MESSAGE, ACCEPTED, REFUSED, TAKEN, CALL = range(5)
PUT, OFFERED, ANSWER = range(3)
"""Kinds of what is in an inbox, as ``Inboxes::Kind`` has them."""
FETCH_BYTES = 64 << 10
"""Up to here a sender does not wait for a receiver: what nobody asked for yet is fetched."""
FETCH_BUDGET_BYTES = 4 << 20
"""How much of each rank's messages is fetched before somebody asks."""
READ_BYTES = 4 << 20
"""How much is copied from a sender's memory before this thread looks for what else there is to do."""
URGENCY = 0
_HEADS, _BODIES = range(2)


@dataclass(slots=True, kw_only=True, eq=False)
class _Send:
    peer: int
    tag: int
    payload: memoryview
    work: Work
    timeout_s: float
    deadline_s: float
    """By the monotonic clock."""
    needs_answer: bool = False
    is_sent: bool = False
    is_offered: bool = False
    """Whether the receiver may copy it from where it is."""
    is_over: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Receive:
    """A receive, asked for or over."""

    source: int | None
    """The rank that it is from; None as long as that may be anyone."""
    tag: int
    destination: memoryview
    work: Work
    timeout_s: float
    deadline_s: float
    """By the monotonic clock."""
    awaited: int | None = None
    """The source as it was asked for."""
    is_read: bool = False
    """Whether its message is being copied from its sender's memory."""
    is_over: bool = False


class PointToPoint:
    """The messages of one rank of a group. ``stream`` is this object's alone, with the same number on all ranks."""

    def __init__(self, communicator: Communicator, *, stream: int) -> None:
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self._stream = stream
        self._port = communicator.open_port("messages of torch.distributed")
        self._inboxes = communicator.inboxes
        self._lock = threading.RLock()
        """Held by whoever reads or changes what follows: the loop's thread, and those that send and receive."""
        self._matcher: MessageMatcher[Receive] = MessageMatcher()
        self._sends: dict[tuple[int, int], _Send] = {}
        self._receives: dict[int, Receive] = {}  # all that are not over, by id
        self._reads: deque[tuple[Receive, MessageHead]] = deque()
        """What is to be copied from the memory of senders."""
        self._num_large = self._num_waiting = self._num_asleep = 0
        """Of large receives that are not over, of threads that wait while there are any, and of all that sleep."""
        self._is_called = False
        self._num_changes = 0
        """Of the inboxes, when all of them were last looked at."""
        self._num_sent: Counter[int] = Counter()
        self._num_come: Counter[int] = Counter()
        self._num_heads_sent: Counter[int] = Counter()
        self._num_heads: Counter[int] = Counter()
        self._fetching_bytes: Counter[int] = Counter()
        self._gone: dict[int, Exception] = {}
        self._silent: set[int] = set()  # of those that are gone, who has no last words left either
        self._port.call_soon(self._locked(self._begin))

    def send(self, payload: memoryview, peer: int, tag: int, *, timeout_s: float) -> Work:
        """Send ``payload``, unchanged until the work is over; from any thread.

        It is over when the memory is free again; that of more than 64 KiB when the receiver took it.
        """
        self._check_peer(peer)
        work = self._port.work(f"send to rank {peer} (tag {tag})", timeout_s=timeout_s)
        deadline_s = time.monotonic() + timeout_s
        send = _Send(peer=peer, tag=tag, payload=payload, work=work, timeout_s=timeout_s, deadline_s=deadline_s)
        self._port.touch()
        with self._lock:
            number = self._num_sent[peer]
            self._num_sent[peer] += 1
            if self._inboxes is None or not self._offer(self._inboxes, send, number):
                self._port.call_soon(self._locked(self._send, send, number))
        return work

    def _offer(self, inboxes: _native.Inboxes, send: _Send, number: int) -> bool:
        """Let the receiver copy a large message from where it is; False, with nothing done, if that cannot be."""
        peer = send.peer
        if send.payload.nbytes <= FETCH_BYTES or peer in self._gone or self._rank in self._gone:
            return False
        if not inboxes.offer(peer, send.tag, number, send.payload):
            return False
        send.needs_answer = send.is_offered = True
        self._sends[peer, number] = send
        late = partial(self._send_is_late, send, number)
        send.work.make_by_waiting(partial(self._take_until_over, inboxes, send, peer, send.payload.nbytes, late))
        if inboxes.must_call(peer):
            self._port.call_soon(self._locked(self._tell, peer, CALL, 0, 0, 0))
        return True

    def put(self, address: int, num_bytes: int, peer: int, tag: int) -> bool:
        """Send what lies at ``address``, which may change then; False, with nothing done, if it must be sent."""
        self._check_peer(peer)
        if self._inboxes is None or num_bytes > FETCH_BYTES:
            return False
        self._port.touch()
        with self._lock:
            if peer in self._gone or self._rank in self._gone:
                return False
            is_put = self._inboxes.put(peer, tag, self._num_sent[peer], address, num_bytes)
            self._num_sent[peer] += is_put
        return is_put

    def receive(self, destination: memoryview, source: int | None, tag: int, *, timeout_s: float) -> Receive:
        """Receive the next message of ``source`` (None: of anyone) with ``tag``, of exactly this size; any thread."""
        if source is not None:
            self._check_peer(source)
        whom = "any rank" if source is None else f"rank {source}"
        work = self._port.work(f"receive from {whom} (tag {tag})", timeout_s=timeout_s)
        receive = Receive(
            source=source,
            tag=tag,
            destination=destination,
            work=work,
            timeout_s=timeout_s,
            deadline_s=time.monotonic() + timeout_s,
            awaited=source,
        )
        if self._inboxes is None:
            self._port.call_soon(self._locked(self._ask, receive))
            return receive
        self._port.touch()
        with self._lock:
            self._ask(receive)
            self._take_all()  # now, so that what is here goes where it is wanted, and is not laid aside first
            if not receive.is_over:
                late = partial(self._receive_is_late, receive)
                work.make_by_waiting(partial(self._take_until_over, self._inboxes, receive, source, 0, late))
        if self._num_large:
            self._read_next()
            self._attend()
        return receive

    def _take_until_over(
        self,
        inboxes: _native.Inboxes,
        call: _Send | Receive,
        peer: int | None,
        num_bytes: int,
        late: Callable[[], None],
        _: Work,
        limit_s: float,
    ) -> None:
        """Take what comes until ``call`` is over, on a thread that waits for it, for at most ``limit_s``.

        What ends it comes from ``peer``, or from anyone; that one copies ``num_bytes`` meanwhile.
        """
        until_s = min(time.monotonic() + limit_s, call.deadline_s)
        is_reader, is_awake = self._num_large > 0, 0
        if is_reader:
            self._attend(1)
        while True:
            seen = inboxes.num_changes
            with self._lock:
                self._num_asleep -= is_awake
                is_awake = 0
                if peer is not None:
                    self._take(peer)
                if not call.is_over:
                    self._take_all()
                now_s = time.monotonic()
                if now_s >= call.deadline_s:
                    late()
                if call.is_over or (now_s >= until_s and not self._reads):
                    break
                if not self._reads:
                    is_awake = 1
                    self._num_asleep += 1
            if not is_awake:
                self._read_next()
            else:
                inboxes.wait(seen, until_s - now_s, num_bytes=num_bytes)
        if is_reader or self._reads:
            self._attend(-is_reader)

    def _read_next(self) -> None:
        """Copy the next part of a message that was offered and asked for, if there is one; from any thread."""
        with self._lock:
            if self._inboxes is None or not self._reads:
                return
            receive, head = self._reads.popleft()
            if receive.is_over:
                return
            receive.is_read = True
        start = head.num_read
        stop = min(start + READ_BYTES, head.num_bytes)
        is_read = self._inboxes.read(head.source, head.address + start, receive.destination[start:stop])
        with self._lock:
            head.num_read, receive.is_read = stop, False
            if is_read and stop < head.num_bytes:
                self._reads.appendleft((receive, head))
            elif is_read:
                if not self._inboxes.answer(head.source, head.number, head.num_bytes):
                    self._answer(head, TAKEN, head.num_bytes)
                self._end_receive(receive, None)
            elif head.source in self._silent or self._rank in self._gone:
                self._end_receive(receive, self._why(head.source))
            else:
                head.address = 0
                self._port.call_soon(self._locked(self._deliver, receive, head))

    def _read_on_loop(self) -> None:
        if not self._num_waiting:
            self._read_next()
            self._attend()

    def _attend(self, num_come: int = 0) -> None:
        """See that what is offered is read: by a thread that waits here, else by the loop's, which senders call.

        So many threads wait more than before; from any thread.
        """
        if self._inboxes is None:
            return
        with self._lock:
            self._num_waiting += num_come
            is_called = self._num_large > 0 and not self._num_waiting
            if is_called != self._is_called:
                self._is_called = is_called
                self._inboxes.be_called(is_called)
                self._take_all()  # what came just before was not called for
            if self._reads and self._num_asleep:
                self._inboxes.wake()
            elif self._reads and not self._num_waiting:
                self._port.call_soon(self._read_on_loop)

    # Everything below is called with the lock held, and on the communication loop's thread; but any thread takes what
    # is in the inbox, and delivers it.

    def _take_all(self) -> None:
        """Take what has come since this was last done; what waits for its turn then is taken by who brings that."""
        num_changes = 0 if self._inboxes is None else self._inboxes.num_changes
        if num_changes != self._num_changes:
            self._num_changes = num_changes
            for peer in range(self._world_size):
                if peer != self._rank:
                    self._take(peer)

    def _take(self, peer: int) -> None:
        """Take what ``peer`` has put into the inbox, as far as its turn has come."""
        inboxes = self._inboxes
        try:
            while inboxes is not None and peer not in self._silent and (found := inboxes.first(peer)):
                kind, tag, number, num_bytes, address = found
                if kind == ANSWER:
                    inboxes.skip(peer)
                    self._answered(peer, TAKEN, num_bytes, number)
                    continue
                if number != self._num_come[peer]:
                    return
                self._num_come[peer] += 1
                receive = self._matcher.find(peer, tag)
                if kind == PUT and receive is not None and receive.destination.nbytes == num_bytes:
                    inboxes.take(peer, receive.destination)
                    inboxes.release(peer, num_bytes)
                    receive.source = peer
                    self._end_receive(receive, None)
                    continue
                self._take_aside(inboxes, receive, MessageHead(peer, tag, num_bytes, number, address=address))
        except (FabricError, RuntimeError) as error:
            self._gone[peer] = FabricError(f"{self._port.describe_peer(peer)}: {error}")
            self._silent.add(peer)
            self._port.call_soon(self._locked(self._fail_peer, peer, self._gone[peer]))

    def _take_aside(self, inboxes: _native.Inboxes, receive: Receive | None, head: MessageHead) -> None:
        """Take what is not yet asked for, of another size, or to be copied from its sender's memory."""
        if head.address:
            inboxes.skip(head.source)
        else:
            head.inline, head.is_put = bytearray(head.num_bytes), True
            inboxes.take(head.source, head.inline)
        if receive is None:
            self._matcher.arrive(head)
        else:
            self._deliver(receive, head)

    def _locked(self, function: Callable[..., object], *arguments: object) -> Callable[[], None]:
        """Return what calls ``function`` with the lock held."""

        def call() -> None:
            with self._lock:
                function(*arguments)

        return call

    def _begin(self) -> None:
        for peer in range(self._world_size):
            if peer != self._rank:
                self._listen(peer)
        self._port.watch_losses(self._on_lost)

    def _listen(self, peer: int) -> None:
        head = memoryview(bytearray(HEAD_BYTES))
        tag = first_tag(self._stream, self._num_heads[peer], _HEADS)
        self._num_heads[peer] += 1
        received = self._locked(self._on_head, peer, head)
        self._port.receive(peer, tag, head, urgency=URGENCY, on_received=received, even_if_lost=True)

    def _send(self, send: _Send, number: int) -> None:
        if send.peer in self._gone or self._rank in self._gone:
            send.work.finish(self._why(send.peer))
            return
        num_bytes = send.payload.nbytes
        self._sends[send.peer, number] = send
        self._expire(send.work, send.timeout_s, partial(self._send_is_late, send, number))
        if num_bytes <= INLINE_BYTES:
            send.is_sent = True
            on_sent = self._locked(self._sent, send, number)
            self._tell(send.peer, MESSAGE, send.tag, num_bytes, number, bytes(send.payload), on_sent)
            return
        send.needs_answer = num_bytes > FETCH_BYTES
        self._tell(send.peer, MESSAGE, send.tag, num_bytes, number)
        self._send_body(send, number)

    def _send_body(self, send: _Send, number: int) -> None:
        body = first_tag(self._stream, number, _BODIES)
        self._port.send(send.peer, body, send.payload, urgency=URGENCY, on_sent=self._locked(self._sent, send, number))

    def _sent(self, send: _Send, number: int) -> None:
        send.is_sent = True
        if not send.needs_answer:
            self._end_send(send, number, None)

    def _end_send(self, send: _Send, number: int, error: Exception | None) -> None:
        if error is None or not send.is_offered:  # else its memory may be read nonetheless, and stays
            self._sends.pop((send.peer, number), None)
        if not send.is_over:
            send.is_over = True
            self._end(send.work, error)

    def _end(self, work: Work, error: Exception | None) -> None:
        if self._inboxes is None:
            work.finish(error)
            return
        work.end(error)
        if self._num_asleep:
            self._inboxes.wake()

    def _tell(
        self,
        peer: int,
        kind: int,
        tag: int,
        num_bytes: int,
        number: int,
        inline: bytes | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        head = bytearray(HEAD_BYTES)
        _HEAD.pack_into(head, 0, kind, tag, num_bytes, -1 if inline is None else len(inline), number)
        if inline:
            head[_HEAD.size : _HEAD.size + len(inline)] = inline
        place = first_tag(self._stream, self._num_heads_sent[peer], _HEADS)
        self._num_heads_sent[peer] += 1
        self._port.send(peer, place, memoryview(head), urgency=URGENCY, on_sent=on_sent)

    def _on_head(self, peer: int, memory: memoryview) -> None:
        kind, tag, num_bytes, num_inline, number = _HEAD.unpack_from(memory)
        self._listen(peer)
        if kind == CALL:
            self._take(peer)
            self._attend()
            return
        if kind != MESSAGE:
            self._answered(peer, kind, num_bytes, number)
            return
        if num_bytes < 0 or not (num_inline == -1 or num_inline == num_bytes <= INLINE_BYTES):
            self._fail_peer(peer, FabricError(f"{self._port.describe_peer(peer)} sent what is no message"))
            return
        inline = bytes(memory[_HEAD.size : _HEAD.size + num_inline]) if num_inline >= 0 else None
        self._take(peer)
        self._num_come[peer] += 1
        head = MessageHead(source=peer, tag=tag, num_bytes=num_bytes, number=number, inline=inline)
        try:
            receive = self._matcher.arrive(head)
        except FabricError as error:
            self._fail_peer(peer, error)
            return
        if receive is not None:
            self._deliver(receive, head)
        elif inline is None and num_bytes <= FETCH_BYTES:
            self._fetch(head)
        self._take(peer)
        self._attend()

    def _answered(self, peer: int, kind: int, num_bytes: int, number: int) -> None:
        send = self._sends.get((peer, number))
        if send is None:
            return
        if kind == REFUSED:
            text = (
                f"rank {self._rank} sent {send.payload.nbytes} bytes with tag {send.tag} to "
                f"{self._port.describe_peer(peer)}, which received {num_bytes} bytes; let both give tensors of one size"
            )
            self._end_send(send, number, MismatchError(text))
            return
        send.needs_answer = False  # but its memory is in use until all of it is sent
        if kind == ACCEPTED and send.is_offered:
            send.is_offered = False
            self._send_body(send, number)
        elif send.is_sent or kind == TAKEN:
            self._end_send(send, number, None)

    def _fetch(self, head: MessageHead) -> None:
        """Take a message of middling size before somebody asks: its sender has sent it unasked, and goes on."""
        if self._fetching_bytes[head.source] + head.num_bytes > FETCH_BUDGET_BYTES:
            return
        self._fetching_bytes[head.source] += head.num_bytes
        head.fetched = bytearray(head.num_bytes)
        self._receive_body(head, memoryview(head.fetched), self._locked(self._fetched, head))

    def _fetched(self, head: MessageHead) -> None:
        head.inline = head.fetched  # from here on, as if it had come with its head
        if head.on_fetched is not None:
            head.on_fetched()

    def _receive_body(self, head: MessageHead, into: memoryview, on_received: Callable[[], None]) -> None:
        tag = first_tag(self._stream, head.number & NUMBER_MASK, _BODIES)
        self._port.receive(head.source, tag, into, urgency=URGENCY, on_received=on_received, even_if_lost=True)

    def _ask(self, receive: Receive) -> None:
        if self._rank in self._gone:
            receive.is_over = True
            receive.work.finish(self._gone[self._rank])
            return
        self._receives[id(receive)] = receive
        self._num_large += receive.destination.nbytes > FETCH_BYTES
        head = self._matcher.ask(receive.source, receive.tag, receive)
        if head is not None and head.inline is None and not head.address and self._inboxes is not None:
            self._port.call_soon(self._locked(self._deliver, receive, head))  # the fabric lives on the loop
        elif head is not None:
            self._deliver(receive, head)
        elif not self._can_come(receive):
            self._end_receive(receive, self._why(receive.source))
        if self._inboxes is None and not receive.work.is_over:
            self._expire(receive.work, receive.timeout_s, partial(self._receive_is_late, receive))

    def _deliver(self, receive: Receive, head: MessageHead) -> None:
        """Put the message of ``head`` where ``receive`` wants it, as soon as it is here."""
        receive.source = head.source
        if head.is_put and self._inboxes is not None:
            self._inboxes.release(head.source, head.num_bytes)
        if head.fetched is not None:
            self._fetching_bytes[head.source] -= head.num_bytes
        if head.num_bytes != receive.destination.nbytes:
            self._refuse(receive, head)
        elif head.inline is not None:
            self._take_inline(receive, head)
        elif head.address:
            self._reads.append((receive, head))
        elif head.fetched is not None:  # it is on its way into memory of its own
            head.on_fetched = partial(self._take_inline, receive, head)
        else:
            if head.num_bytes > FETCH_BYTES:
                self._answer(head, ACCEPTED, head.num_bytes)
            self._receive_body(head, receive.destination, self._locked(self._end_receive, receive, None))

    def _take_inline(self, receive: Receive, head: MessageHead) -> None:
        if not receive.is_over:  # else its memory is another's, since it was late
            assert head.inline is not None, "it has landed there"
            receive.destination[:] = head.inline
        self._end_receive(receive, None)

    def _refuse(self, receive: Receive, head: MessageHead) -> None:
        """End a receive whose message has another size, and let the message go to waste."""
        text = (
            f"rank {self._rank} received {receive.destination.nbytes} bytes with tag {receive.tag} from "
            f"{self._port.describe_peer(head.source)}, which sent {head.num_bytes} bytes; let both give tensors of one "
            "size"
        )
        if head.num_bytes > FETCH_BYTES:
            self._answer(head, REFUSED, receive.destination.nbytes)
        if head.inline is None and head.fetched is None and not head.address:
            self._receive_body(head, memoryview(bytearray()), lambda: None)  # the fabric throws away what is larger
        self._end_receive(receive, MismatchError(text))

    def _answer(self, head: MessageHead, kind: int, num_bytes: int) -> None:
        """Tell the sender of a large message what becomes of it; from any thread."""
        self._port.call_soon(self._locked(self._tell, head.source, kind, head.tag, num_bytes, head.number))

    def _end_receive(self, receive: Receive, error: Exception | None) -> None:
        if error is not None:
            self._matcher.withdraw(receive.awaited, receive.tag, receive)
        if receive.is_read or self._receives.pop(id(receive), None) is None:  # a copy has an end of its own
            return
        self._num_large -= receive.destination.nbytes > FETCH_BYTES
        receive.is_over = True
        self._end(receive.work, error)

    def _receive_is_late(self, receive: Receive) -> None:
        whom = "no rank" if receive.awaited is None else self._port.describe_peer(receive.awaited)
        self._end_receive(
            receive,
            DeadlineError(
                f"{whom} sent {'' if receive.awaited is None else 'no'}thing with tag {receive.tag} to rank "
                f"{self._rank} within {receive.timeout_s:g} s; check that both ends name each other and the same tag"
            ),
        )

    def _send_is_late(self, send: _Send, number: int) -> None:
        text = (
            f"{self._port.describe_peer(send.peer)} did not take the {send.payload.nbytes} bytes that rank "
            f"{self._rank} sent with tag {send.tag} within {send.timeout_s:g} s; check that both ends name each other "
            "and the same tag"
        )
        self._end_send(send, number, DeadlineError(text))

    def _expire(self, work: Work, timeout_s: float, end: Callable[[], None]) -> None:
        timer = asyncio.get_running_loop().call_later(timeout_s, self._locked(end))
        work.add_done_callback(lambda _: timer.cancel())

    def _on_lost(self, peer: int, error: Exception) -> None:
        """End what needs ``peer``; what it sent before it left is delivered first."""
        with self._lock:
            self._take_all()
            self._attend()
            self._gone[peer] = error
            if peer == self._rank:
                self._fail_all(error)
                self._port.close()  # its receives would stay with the connections of the world
            elif isinstance(error, PeerLeftError):
                self._port.hear_out(lambda: self._num_heads[peer], self._locked(self._fail_peer, peer, error))
            else:
                self._fail_peer(peer, error)

    def _fail_peer(self, peer: int, error: Exception) -> None:
        self._gone[peer] = error
        self._silent.add(peer)
        for (receiver, number), send in tuple(self._sends.items()):
            if receiver == peer:
                self._end_send(send, number, self._why(peer))
        for receive in tuple(self._receives.values()):
            if receive.source == peer or not self._can_come(receive):
                self._end_receive(receive, self._why(peer))

    def _fail_all(self, error: Exception) -> None:
        if self._inboxes is not None:
            self._inboxes.withdraw()
        for (_, number), send in tuple(self._sends.items()):
            self._end_send(send, number, error)
        for receive in tuple(self._receives.values()):
            self._end_receive(receive, error)

    def _can_come(self, receive: Receive) -> bool:
        """Whether somebody may still send what is asked for; from anyone, not if one of them was lost."""
        if receive.source is not None:
            return receive.source not in self._silent
        others = [peer for peer in range(self._world_size) if peer != self._rank]
        is_one_lost = any(not isinstance(error, PeerLeftError) for error in self._gone.values())
        return not is_one_lost and any(peer not in self._silent for peer in others)

    def _why(self, peer: int | None) -> Exception:
        """Return an error of its own for each call that needs ``peer``, or needed anyone."""
        lost = next(iter(self._gone)) if peer is None else peer if peer in self._gone else self._rank
        error = self._gone[lost]
        if isinstance(error, PeerLostError):
            return PeerLostError(f"{str(error).rstrip('.')}, during messages with it", rank=error.rank, host=error.host)
        return FabricError(str(error))

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self._world_size or peer == self._rank:
            raise ConfigurationError(
                f"Rank {self._rank} exchanges messages with the other ranks of its group of {self._world_size}, not "
                f"with {peer}"
            )
