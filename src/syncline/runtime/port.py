"""A port: messages from one rank to another on the communicator's fabric, beside its collectives.

Update rules that are no collectives (a parameter server, a temporary server) talk through it. Everything but
:meth:`Port.call_soon`, :meth:`Port.call` and :meth:`Port.run` happens on the communication loop's thread. A rank can
send to itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from syncline.errors import FabricError
from syncline.fabric import Fabric, PeerStalls
from syncline.priorities.settings import MAX_CLASSES
from syncline.runtime.loop import CommunicationLoop
from syncline.runtime.relay import ControlHandler, LossHandler, Relay, Told
from syncline.runtime.work import Work

T = TypeVar("T")

LAST_WORDS_S = 0.5
"""What a rank sent before it left is delivered until it has been quiet for so long."""
BULK_CLASS = MAX_CLASSES - 1
"""A message of this class goes on the last one that is open: what is on class 0 overtakes it in the switches too."""


class Port:
    """One user of the fabric beside the engine. ``signature`` goes with all its messages; tags are its own streams'."""

    def __init__(self, loop: CommunicationLoop, fabric: Fabric, relay: Relay, *, signature: int) -> None:
        self.rank, self.world_size, self.progress = fabric.rank, fabric.world_size, fabric.progress
        self.stalls: PeerStalls = fabric.stalls
        """Which ranks live, but do not train, as far as is known here."""
        self._loop = loop
        self._fabric = fabric
        self._relay = relay
        self._signature = signature
        self._posted: dict[int, tuple[memoryview, Callable[[], None]]] = {}
        self._to_self: dict[int, tuple[memoryview, Callable[[], None] | None]] = {}
        """Receives from this rank itself, and messages to it, that wait for each other; and whom to tell."""
        self._awaited: set[tuple[int, int]] = set()
        self._on_lost: LossHandler | None = None
        self._told: Told | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._awaited) + len(self._posted)} receives"
        return f"<Port of rank {self.rank}: {state}>"

    def work(self, label: str, *, timeout_s: float) -> Work:
        """Return a work that its owner ends on the loop's thread, at the latest after ``timeout_s``."""
        return Work(label, timeout_s=timeout_s, loop=self._loop, progress=self._fabric.progress)

    def touch(self) -> None:
        """Count a call; raises in a forked child, which has none of the memory that ranks share."""
        self._loop.check_process()
        self._fabric.progress.touch()

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Run ``function`` on the loop's thread, in the order of the calls; from any thread."""
        if not self._loop.is_current():
            self._fabric.progress.touch()
        self._loop.call_soon(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run ``coroutine`` on the loop and wait for it; from any other thread."""
        with self._fabric.progress.waiting():
            return self._loop.run(coroutine, timeout_s)

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Call ``function`` on the loop's thread, in the order of the calls, and return what it returns; as `run`."""
        with self._fabric.progress.waiting():
            return self._loop.call(function, timeout_s)

    def watch_losses(self, on_lost: LossHandler) -> None:
        """Tell ``on_lost`` of every rank that is lost or has left, now and later; of this one too, when it is closed.

        Of this one too if an exception on the loop was caught by nobody: what it cut off will never be done.
        """
        self._on_lost = on_lost
        self._relay.handlers.append(on_lost)
        self._loop.on_crash(self._crashed)
        for peer, error in self._relay.losses():
            on_lost(peer, error)

    def watch_controls(self, number: int, on_control: ControlHandler) -> None:
        """Hand ``on_control`` what others :meth:`tell`; ``number`` is a stream of this alone, the same at both ends."""
        self._told = Told(number, on_control)
        self._relay.add_group(self._told)

    def tell(self, peer: int, payload: bytes) -> None:
        """Send a control message to the port of the same number, ahead of all data; nothing to a rank that is lost."""
        assert self._told is not None, "who tells also watches, under the same number"
        if not self._is_closed and not self.is_lost(peer):
            self._fabric.send_control(peer, self._told.enclose(payload))

    def round_trips(self) -> dict[int, float]:
        """Return the seconds to each peer and back, as far as kernels tell; on the loop's thread."""
        return self._fabric.statistics().round_trips()

    def is_lost(self, peer: int) -> bool:
        """Whether ``peer`` is lost, or has left."""
        return peer != self.rank and self._fabric.is_lost(peer)

    def describe_peer(self, peer: int) -> str:
        """``"rank 3 (host b1)"``."""
        return self._fabric.describe_peer(peer)

    def send(
        self,
        peer: int,
        tag: int,
        payload: memoryview,
        *,
        urgency: int,
        connection_class: int = 0,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send ``payload``, unchanged until ``on_sent``; to a rank that is lost nothing is sent, and nothing told."""
        if self._is_closed or self.is_lost(peer):
            return
        if peer == self.rank:
            self._to_self[tag] = payload, on_sent
            self._match(tag)
            return
        self._fabric.send(
            peer,
            tag,
            payload,
            signature=self._signature,
            urgency=urgency,
            connection_class=connection_class,
            on_sent=self._unless_closed(on_sent) if on_sent is not None else None,
        )

    def receive(
        self,
        peer: int,
        tag: int,
        destination: memoryview,
        *,
        urgency: int,
        on_received: Callable[[], None],
        even_if_lost: bool = False,
    ) -> None:
        """Let the message ``tag`` of ``peer`` land in ``destination``; from a lost rank nothing comes.

        With ``even_if_lost``, what had arrived before its loss is still delivered.
        """
        if self._is_closed or (self.is_lost(peer) and not even_if_lost):
            return
        if peer == self.rank:
            self._posted[tag] = destination, on_received
            self._match(tag)
            return
        self._awaited.add((peer, tag))

        def received() -> None:
            self._awaited.discard((peer, tag))
            if not self._is_closed:
                on_received()

        self._fabric.receive(peer, tag, destination, signature=self._signature, urgency=urgency, on_received=received)

    def hear_out(self, count: Callable[[], int], then: Callable[[], None]) -> None:
        """Call ``then`` when what ``count`` counts has not grown for a while; on the loop's thread.

        For messages of a rank that has left: all that it sent is in this process, and is delivered one after another.
        """
        num_heard = count()

        def look() -> None:
            if count() == num_heard:
                then()
            else:
                self.hear_out(count, then)

        self.call_later(LAST_WORDS_S, look)

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call ``function`` after so many seconds, unless this is closed; on the loop's thread."""
        asyncio.get_running_loop().call_later(seconds, self._unless_closed(function))

    def cancel(self, peer: int, tag: int) -> None:
        """Forget a receive; its destination is not written any more."""
        if peer == self.rank:
            self._posted.pop(tag, None)
        elif (peer, tag) in self._awaited:
            self._awaited.discard((peer, tag))
            self._fabric.cancel(peer, tag)

    def drop_streams(self, streams: Iterable[range]) -> None:
        """Throw away whatever still comes in streams in which nobody receives any more."""
        for each in streams:
            self._fabric.drop_streams(each)

    def close(self) -> None:
        """Forget all receives and tell nobody anything any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.forget_crash(self._crashed)
        if self._on_lost in self._relay.handlers:
            self._relay.handlers.remove(self._on_lost)
        if self._told is not None:
            self._relay.remove_group(self._told)
        for peer, tag in self._awaited:
            self._fabric.cancel(peer, tag)
        self._awaited.clear()
        self._posted.clear()
        self._to_self.clear()

    def _crashed(self, error: BaseException) -> None:
        if self._on_lost is not None and not self._is_closed:
            text = f"the communication loop of {self.describe_peer(self.rank)} failed: {error!r}"
            failure = FabricError(text)
            failure.__cause__ = error
            self._on_lost(self.rank, failure)

    def _match(self, tag: int) -> None:
        """Deliver a message to ourselves once both sides are there; callbacks run later, as with a peer."""
        if tag not in self._posted or tag not in self._to_self:
            return
        (destination, on_received), (payload, on_sent) = self._posted.pop(tag), self._to_self.pop(tag)
        destination[:] = payload
        if on_sent is not None:
            self._loop.call_soon(self._unless_closed(on_sent))
        self._loop.call_soon(self._unless_closed(on_received))

    def _unless_closed(self, callback: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            if not self._is_closed:
                callback()

        return call
