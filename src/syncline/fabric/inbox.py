"""The receiving side of one peer: posted receives, announced messages, and what arrived too early.

What a header says is believed only as far as it was allowed before: a large message must have been granted, byte for
byte, and a small one must fit into the credit. So no peer can make this process allocate more than its credit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from syncline.fabric.callbacks import call_back
from syncline.fabric.dropped_streams import DroppedStreams
from syncline.fabric.frames import HEADER_BYTES, Frame, FrameError, FrameType
from syncline.fabric.grants import EagerCredit, GrantScheduler
from syncline.fabric.outbox import MAX_REQUESTS
from syncline.fabric.shared_host import read_memory


@dataclass(slots=True, kw_only=True, eq=False)
class Receive:
    """A posted receive, and how far its message has come."""

    destination: memoryview | None
    """None: it was cancelled, and what still comes is thrown away."""
    num_bytes: int
    signature: int
    urgency: int
    on_received: Callable[[], None]
    on_mismatch: Callable[[int], None] | None
    granted_bytes: int = 0
    arrived_bytes: int = 0
    is_landing: bool = False
    """A chunk of it is arriving on some connection."""
    is_fetched: bool = False
    """It is copied out of the peer's memory, and nothing is granted."""

    def refuse(self, signature: int) -> None:
        """Tell that its message has this signature, or another size."""
        if self.on_mismatch is not None:
            call_back(partial(self.on_mismatch, signature))


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    """A small message that came before its receive."""

    payload: bytearray
    signature: int
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxLinks:
    """What an inbox needs from around it."""

    grant_soon: Callable[[], None]
    send_control: Callable[..., None]
    """Queue a control frame, with the arguments of ``ControlConnection.send``."""
    redirect: Callable[[int], None]
    """Let what is arriving for a tag go to waste."""
    fetch_soon: Callable[[int, Callable[[int], int]], None]
    """Run a step of a copy, by its urgency, until it returns 0."""
    on_unreadable: Callable[[OSError], None]
    """Tell that the peer's memory cannot be read any more."""


class Inbox:
    """Messages from one peer until they are in their destinations."""

    def __init__(self, peer: int, *, credit_bytes: int, scheduler: GrantScheduler, links: InboxLinks) -> None:
        self._peer = peer
        self._scheduler = scheduler
        self._links = links
        self._credit = EagerCredit(credit_bytes)
        self._posted: dict[int, Receive] = {}
        self._announced: dict[int, tuple[int, int, int]] = {}  # tag: (size, signature, address or 0)
        self._arriving: dict[int, Receive] = {}
        self._held: dict[int, _Held] = {}
        self._eager: dict[int, Receive | _Held | None] = {}  # by tag: where the frame that is arriving goes
        self.dropped = DroppedStreams()
        self.unexpected_bytes = 0
        self.readable_pid: int | None = None
        """The peer's process, if messages can be copied out of its memory."""
        self.fetched_bytes = 0
        self.num_fetched = 0

    @property
    def num_pending(self) -> int:
        """Number of receives that are posted and not finished."""
        arriving = sum(receive.destination is not None for receive in self._arriving.values())
        eager = sum(isinstance(receive, Receive) for receive in self._eager.values())
        return len(self._posted) + arriving + eager

    def receive(
        self,
        tag: int,
        destination: memoryview,
        *,
        signature: int,
        urgency: int,
        on_received: Callable[[], None],
        on_mismatch: Callable[[int], None] | None = None,
    ) -> None:
        """Post a receive; what is here already is delivered in the loop's next iteration."""
        assert tag not in self._posted, f"tag {tag:#x} of rank {self._peer} is posted twice"
        assert tag not in self._arriving, f"tag {tag:#x} of rank {self._peer} is posted again while it arrives"
        view = destination if destination.format == "B" and destination.ndim == 1 else destination.cast("B")
        self._posted[tag] = Receive(
            destination=view,
            num_bytes=view.nbytes,
            signature=signature,
            urgency=urgency,
            on_received=on_received,
            on_mismatch=on_mismatch,
        )
        if tag in self._announced:
            self._match(tag)
        elif tag in self._held:
            asyncio.get_running_loop().call_soon(self._deliver_held, tag)

    def cancel(self, tag: int) -> None:
        """Forget a receive."""
        self._posted.pop(tag, None)
        if isinstance(self._eager.get(tag), Receive):
            self._eager[tag] = None
            self._links.redirect(tag)
        receive = self._arriving.get(tag)
        if receive is None or receive.destination is None:
            return
        receive.destination = None
        if receive.is_fetched:
            del self._arriving[tag]
            self._links.send_control(FrameType.DISCARD, tag=tag)
            return
        self._links.redirect(tag)
        self._scheduler.forget(self._peer, tag)
        if receive.granted_bytes < receive.num_bytes:
            receive.num_bytes = receive.granted_bytes
            self._links.send_control(FrameType.DISCARD, tag=tag)
            if receive.arrived_bytes == receive.num_bytes:
                del self._arriving[tag]

    def drop_streams(self, streams: range) -> None:
        """Throw away what comes in these streams from now on, and what came early."""
        self.dropped.add(streams)
        for tag in [tag for tag in self._announced if self.dropped.take(tag)]:
            del self._announced[tag]
            self._links.send_control(FrameType.DISCARD, tag=tag)
        for tag in [tag for tag in self._held if self.dropped.take(tag)]:
            held = self._held.pop(tag)
            self.unexpected_bytes -= len(held.payload)
            if held.is_whole:
                self._return_credit(len(held.payload))
            else:  # its credit is returned when all of it is here
                self._eager[tag] = None
                self._links.redirect(tag)

    def on_request(self, frame: Frame) -> None:
        """Take note of a message that waits at the peer."""
        tag = frame.tag
        if tag in self._announced or tag in self._arriving or len(self._announced) >= MAX_REQUESTS:
            raise FrameError(f"request {tag:#x} comes twice, or is one of more than {MAX_REQUESTS}")
        if frame.offset and self.readable_pid is None:
            raise FrameError(f"request {tag:#x} names an address, but no memory is shared")
        if self.dropped.take(tag):
            self._links.send_control(FrameType.DISCARD, tag=tag)
            return
        self._announced[tag] = (frame.message_bytes, frame.signature, frame.offset)
        if tag in self._posted:
            self._match(tag)

    def on_granted(self, tag: int, limit_bytes: int) -> None:
        """Take note that the scheduler grants ``tag`` up to ``limit_bytes``, and tell the peer."""
        self._arriving[tag].granted_bytes = limit_bytes
        self._links.send_control(FrameType.GRANT, tag=tag, message_bytes=limit_bytes)

    def begin_chunk(self, frame: Frame) -> memoryview | None:
        """Return where a payload goes; None to throw it away."""
        if frame.type == FrameType.EAGER:
            return self._begin_eager(frame)
        receive = self._arriving.get(frame.tag)
        end = frame.offset + frame.chunk_bytes
        what = f"bytes {frame.offset} to {end} of message {frame.tag:#x}"
        if receive is None or not receive.arrived_bytes == frame.offset < end <= receive.granted_bytes:
            raise FrameError(f"{what} were not granted")
        if receive.is_landing:
            raise FrameError(f"{what} are sent again while they arrive on another connection")
        receive.is_landing = True
        return None if receive.destination is None else receive.destination[frame.offset : end]

    def end_chunk(self, frame: Frame) -> None:
        """Take note that a payload is where it should be."""
        receive = self._end_eager(frame) if frame.type == FrameType.EAGER else self._end_granted(frame)
        if receive is not None:
            call_back(receive.on_received)

    def close(self) -> None:
        """Forget all receives, and what is granted but will not come. What arrived whole can still be received."""
        underway: Counter[int] = Counter()
        for receive in self._arriving.values():
            if not receive.is_fetched:
                underway[receive.urgency] += receive.granted_bytes - receive.arrived_bytes
        self._scheduler.forget_peer(self._peer, underway=underway)
        self._arriving.clear()
        self._announced.clear()
        self._eager.clear()
        self._held = {tag: held for tag, held in self._held.items() if held.is_whole}
        self.unexpected_bytes = sum(len(held.payload) for held in self._held.values())
        self._posted = {tag: receive for tag, receive in self._posted.items() if tag in self._held}

    def _match(self, tag: int) -> None:
        """Let a message that is announced and posted take its turn, or refuse it."""
        num_bytes, signature, address = self._announced.pop(tag)
        receive = self._posted.pop(tag)
        if signature != receive.signature or num_bytes != receive.num_bytes:
            self._links.send_control(FrameType.DISCARD, tag=tag)
            receive.refuse(signature)
            return
        if not num_bytes:
            # A sender without credit announces even an empty message: there is nothing to grant.
            self._links.send_control(FrameType.DISCARD, tag=tag)
            self._arriving[tag] = receive
            asyncio.get_running_loop().call_soon(self._finish_empty, tag)
            return
        self._arriving[tag] = receive
        if address:
            receive.is_fetched = True
            self._links.fetch_soon(receive.urgency, lambda limit: self._fetch(tag, receive, address, limit))
            return
        self._scheduler.wish(self._peer, tag, num_bytes=num_bytes, urgency=receive.urgency)
        self._links.grant_soon()

    def _fetch(self, tag: int, receive: Receive, address: int, limit_bytes: int) -> int:
        """Copy at most ``limit_bytes`` more of a message out of the peer's memory; return how many remain."""
        if self._arriving.get(tag) is not receive:  # the peer is gone, or the receive was cancelled
            return 0
        assert receive.destination is not None
        assert self.readable_pid is not None
        start = receive.arrived_bytes
        end = min(start + limit_bytes, receive.num_bytes)
        try:
            read_memory(self.readable_pid, address + start, receive.destination[start:end])
        except OSError as error:
            self._links.on_unreadable(error)
            return 0
        receive.arrived_bytes = end
        if end == receive.num_bytes:
            del self._arriving[tag]
            self.fetched_bytes += end
            self.num_fetched += 1
            self._links.send_control(FrameType.FETCHED, tag=tag)
            call_back(receive.on_received)
        return receive.num_bytes - end

    def _finish_empty(self, tag: int) -> None:
        receive = self._arriving.pop(tag, None)
        if receive is not None and receive.destination is not None:
            call_back(receive.on_received)

    def _begin_eager(self, frame: Frame) -> memoryview | None:
        tag = frame.tag
        if frame.offset or frame.chunk_bytes != frame.message_bytes or tag in self._held or tag in self._eager:
            raise FrameError(f"message {tag:#x} was sent without asking, in part or twice")
        if not self._credit.take(frame.chunk_bytes + HEADER_BYTES):
            raise FrameError(f"message {tag:#x} exceeds the credit of {self._credit.credit_bytes} bytes")
        if self.dropped.take(tag):
            self._eager[tag] = None
            return None
        receive = self._posted.pop(tag, None)
        if receive is None:
            held = _Held(payload=bytearray(frame.chunk_bytes), signature=frame.signature)
            self._held[tag] = self._eager[tag] = held
            self.unexpected_bytes += frame.chunk_bytes
            return memoryview(held.payload)
        if receive.signature != frame.signature or receive.num_bytes != frame.chunk_bytes:
            self._eager[tag] = None
            receive.refuse(frame.signature)
            return None
        self._eager[tag] = receive
        return receive.destination

    def _end_granted(self, frame: Frame) -> Receive | None:
        """Return the receive that is whole now, if it is still wanted."""
        receive = self._arriving[frame.tag]
        receive.is_landing = False
        receive.arrived_bytes += frame.chunk_bytes
        if frame.flags:
            self._scheduler.lost(self._peer, frame.flags)
        self._scheduler.arrived(self._peer, num_bytes=frame.chunk_bytes, urgency=receive.urgency)
        if self._scheduler.has_wishes:
            self._links.grant_soon()
        if receive.arrived_bytes < receive.num_bytes:
            return None
        del self._arriving[frame.tag]
        return None if receive.destination is None else receive

    def _end_eager(self, frame: Frame) -> Receive | None:
        """Return the receive that is whole now; what came before its receive is kept for it."""
        target = self._eager.pop(frame.tag)
        if not isinstance(target, _Held):
            self._return_credit(frame.chunk_bytes)
            return target
        target.is_whole = True
        if frame.tag in self._posted:
            self._deliver_held(frame.tag)
        return None

    def _deliver_held(self, tag: int) -> None:
        """Hand over a message that came before its receive, unless that was cancelled or it is not whole yet."""
        held = self._held.get(tag)
        if held is None or not held.is_whole or tag not in self._posted:
            return
        receive = self._posted.pop(tag)
        del self._held[tag]
        self.unexpected_bytes -= len(held.payload)
        self._return_credit(len(held.payload))
        if receive.signature != held.signature or receive.num_bytes != len(held.payload):
            receive.refuse(held.signature)
            return
        assert receive.destination is not None
        receive.destination[:] = held.payload
        call_back(receive.on_received)

    def _return_credit(self, num_bytes: int) -> None:
        returned = self._credit.consume(num_bytes + HEADER_BYTES)
        if returned:
            self._links.send_control(FrameType.CREDIT, message_bytes=returned)
