"""The in-memory fabric: every rank of a job in one process, on one loop, without sockets.

It keeps the promises of :class:`syncline.fabric.Fabric` and as little more than that as it can: a small message is
copied and sent ahead, and a large one stays in the sender's memory until its receive is posted.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import partial

from syncline.arguments import Count, Seconds, Whole, checked
from syncline.errors import FabricClosedError, PeerLostError
from syncline.fabric.progress import Progress, Stalls
from syncline.fabric.protocol import (
    ABORTED,
    MAX_CONTROL_BYTES,
    FabricListener,
    ListenerSlot,
    PeerLeftError,
    call_back,
)
from syncline.fabric.slice_executor import SliceExecutor
from syncline.fabric.statistics import ConnectionStatistics, FabricStatistics


@dataclass(slots=True, kw_only=True)
class Parcel:
    """A message on its way; ``payload`` is the sender's memory, or a copy if it was sent ahead."""

    source: int
    target: int
    tag: int
    payload: memoryview
    signature: int
    urgency: int
    connection_class: int
    on_sent: Callable[[], None] | None
    is_control: bool = False
    is_settled: bool = False
    """The sender is done with it; it is the receiver's now."""


@dataclass(slots=True, kw_only=True)
class Posted:
    """A receive that waits for its message."""

    destination: memoryview
    signature: int
    on_received: Callable[[], None]
    on_mismatch: Callable[[int], None] | None


@dataclass(slots=True)
class Counters:
    """What one rank counts of another, in one connection class."""

    sent_bytes: int = 0
    sent_messages: int = 0
    received_bytes: int = 0
    received_messages: int = 0
    queued_bytes: int = 0


CONTROL_URGENCY = -(1 << 62)
"""Control messages go ahead of all data."""
_STREAM_SHIFT = 48
"""The stream is in the highest 16 bits of a tag."""


@checked
def memory_fabrics(
    world_size: Count, *, seed: int | None = None, eager_bytes: Whole = 16384, close_s: Seconds = 10.0
) -> tuple[MemoryFabric, ...]:
    """Connect ``world_size`` ranks in memory, on the running loop, whose thread alone may use them.

    Without a seed, messages are delivered by urgency, then in the order in which they were sent; with one, in random
    order, which the seed replays. Those of at most ``eager_bytes`` do not wait for their receive.

    >>> async def connect(): return memory_fabrics(2)
    >>> asyncio.run(connect())[0].describe_peer(1)
    'rank 1 (host memory)'
    """
    network = _Network(seed=seed, eager_bytes=eager_bytes)
    network.fabrics = tuple(MemoryFabric(network, rank, close_s=close_s) for rank in range(world_size))
    return network.fabrics


@dataclass(slots=True, kw_only=True)
class _Network:
    """What lies between the ranks: the parcels under way, and the order in which they arrive."""

    seed: int | None
    eager_bytes: int
    fabrics: tuple[MemoryFabric, ...] = ()
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _random: random.Random | None = None
    _queue: list[tuple[int, int, Parcel]] = field(default_factory=list)
    _controls: dict[tuple[int, int], list[Parcel]] = field(default_factory=dict)
    _sequence: int = 0
    _is_pumping: bool = False

    def __post_init__(self) -> None:
        if self.seed is not None:
            self._random = random.Random(self.seed)  # noqa: S311 - a replayable order, no secret

    def put(self, parcel: Parcel) -> None:
        """Take a parcel; it is delivered in a later iteration of the loop, one parcel in each."""
        if parcel.is_control:
            self._controls.setdefault((parcel.source, parcel.target), []).append(parcel)
        self._sequence += 1
        heapq.heappush(self._queue, (parcel.urgency, self._sequence, parcel))
        if not self._is_pumping:
            self._is_pumping = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        parcel = self._take()
        self._is_pumping = bool(self._queue)
        if self._is_pumping:
            self.loop.call_soon(self._pump)
        if parcel.is_control:
            # Whichever control parcel was drawn, the oldest of that pair of ranks goes first.
            parcel = self._controls[parcel.source, parcel.target].pop(0)
        self.fabrics[parcel.target]._deliver(parcel)

    def _take(self) -> Parcel:
        if self._random is None:
            return heapq.heappop(self._queue)[2]
        place = self._random.randrange(len(self._queue))
        self._queue[place], self._queue[-1] = self._queue[-1], self._queue[place]
        return self._queue.pop()[2]


class MemoryFabric:
    """One rank's end of the in-memory fabric (see :func:`memory_fabrics`)."""

    def __init__(self, network: _Network, rank: int, *, close_s: float) -> None:
        self._network = network
        self.rank = rank
        self._close_s = close_s
        self._listener_slot = ListenerSlot()
        self._posted: dict[tuple[int, int], Posted] = {}
        self._held: dict[tuple[int, int], Parcel] = {}
        self._outgoing = 0
        self._drained = asyncio.Event()
        self._lost: dict[int, PeerLostError] = {}
        self._counters: dict[tuple[int, int], Counters] = {}
        self._is_closed = False
        self._dropped_streams: list[range] = []
        self._num_dropped = 0
        self.unconnected: Set[int] = frozenset()
        self.progress = Progress()
        self.stalls = Stalls(float("inf"), lambda: self._listener_slot.tell(lambda listener: listener.on_stall()))
        """No heartbeats are sent in memory: whoever plays a hung rank calls ``tick``."""

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._posted)} receives, {len(self._held)} held"
        return f"<MemoryFabric rank {self.rank} of {self.world_size}: {state}>"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._network.fabrics)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What errors call the ranks."""
        return tuple(range(self.world_size))

    def set_listener(self, listener: FabricListener) -> None:
        """Tell ``listener`` from now on; what happened before is delivered at once."""
        self._listener_slot.listen(listener)

    def send(
        self,
        peer: int,
        tag: int,
        payload: memoryview,
        *,
        signature: int,
        urgency: int,
        connection_class: int,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue ``payload`` for ``peer`` (see the protocol)."""
        self._check_peer(peer)
        if peer in self._lost:
            return
        self._count(peer, connection_class).queued_bytes += payload.nbytes
        is_eager = payload.nbytes <= self._network.eager_bytes
        self._outgoing += 1
        self._network.put(
            Parcel(
                source=self.rank,
                target=peer,
                tag=tag,
                payload=memoryview(bytes(payload)) if is_eager else payload.cast("B"),
                signature=signature,
                urgency=urgency,
                connection_class=connection_class,
                on_sent=on_sent,
            )
        )

    def receive(
        self,
        peer: int,
        tag: int,
        destination: memoryview,
        *,
        signature: int,
        urgency: int,  # noqa: ARG002 - in memory the sender's urgency orders already
        on_received: Callable[[], None],
        on_mismatch: Callable[[int], None] | None = None,
    ) -> None:
        """Let the message ``tag`` of ``peer`` land in ``destination`` (see the protocol)."""
        self._check_peer(peer)
        assert (peer, tag) not in self._posted, f"rank {self.rank} posted tag {tag:#x} of rank {peer} twice"
        self._posted[peer, tag] = Posted(
            destination=destination.cast("B"),
            signature=signature,
            on_received=on_received,
            on_mismatch=on_mismatch,
        )
        held = self._held.pop((peer, tag), None)
        if held is not None:
            self._network.put(held)

    def cancel(self, peer: int, tag: int) -> None:
        """Forget a posted receive."""
        self._posted.pop((peer, tag), None)

    def drop_streams(self, streams: range) -> None:
        """Throw away what comes in streams that are over."""
        self._dropped_streams.append(streams)
        for key in [key for key in self._held if self._is_over(key[1])]:
            parcel = self._held.pop(key)
            self._network.fabrics[parcel.source]._finish(parcel, was_delivered=True)

    def send_control(self, peer: int, payload: bytes) -> None:
        """Send a small message ahead of all data."""
        self._check_peer(peer)
        assert len(payload) <= MAX_CONTROL_BYTES, f"control message of {len(payload)} bytes"
        if peer in self._lost:
            return
        self._outgoing += 1
        self._network.put(
            Parcel(
                source=self.rank,
                target=peer,
                tag=0,
                payload=memoryview(bytes(payload)),
                signature=0,
                urgency=CONTROL_URGENCY,
                connection_class=-1,
                on_sent=None,
                is_control=True,
            )
        )

    def tell(self, peers: Collection[int], payload: bytes) -> None:
        """Send a control message to each of ``peers``."""
        for peer in peers:
            self.send_control(peer, payload)

    def pass_on(self, peer: int, payload: bytes) -> None:
        """Send a control message."""
        self.send_control(peer, payload)

    def when_connected(self, peers: Collection[int], then: Callable[[], None]) -> None:  # noqa: ARG002 - all are
        """Call ``then``."""
        then()

    def open_executor(self, reference: SliceExecutor, most_bytes: int, ranks: Sequence[int] = ()) -> SliceExecutor:  # noqa: ARG002 - it knows
        """Return ``reference``."""
        return reference

    async def open_classes(self, *_: object, **__: object) -> None:
        """Do nothing: every class is there, and nobody is waited for."""
        self._check_open()

    def is_lost(self, peer: int) -> bool:
        """Whether ``peer`` was reported lost."""
        return peer in self._lost

    def is_local(self, peer: int) -> bool:  # noqa: ARG002 - all are
        """Return True."""
        return True

    def describe_peer(self, peer: int) -> str:
        """``"rank 3 (host memory)"``."""
        return f"rank {peer} (host memory)"

    def statistics(self) -> FabricStatistics:
        """Return a frozen record of all counters."""
        return FabricStatistics(
            rank=self.rank,
            time_s=self._network.loop.time(),
            connections=tuple(
                ConnectionStatistics(peer=peer, connection_class=connection_class, **asdict(counters))
                for (peer, connection_class), counters in sorted(self._counters.items())
            ),
            unexpected_bytes=sum(
                parcel.payload.nbytes
                for parcel in self._held.values()
                if parcel.payload.nbytes <= self._network.eager_bytes
            ),
            pending_receives=len(self._posted),
            refused_connections=0,
            lost_peers=tuple(sorted(self._lost)),
            dropped_messages=self._num_dropped,
        )

    async def close(self) -> None:
        """Wait until what was sent has arrived (at most ``close_s``), then leave; the others are told so."""
        if self._is_closed:
            return
        try:
            async with asyncio.timeout(self._close_s):
                while self._outgoing:
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            pass  # what no one receives within the deadline is dropped, as TCP would
        self._leave(PeerLeftError, "left: it closed its fabric")

    def abort(self, reason: str = ABORTED) -> None:
        """Leave at once; the others see this rank as lost."""
        self._leave(PeerLostError, f"is lost: {reason}")

    def _leave(self, kind: type[PeerLostError], reason: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._posted.clear()
        for parcel in self._held.values():
            self._network.fabrics[parcel.source]._finish(parcel, was_delivered=False)
        self._held.clear()
        for fabric in self._network.fabrics:
            if fabric is not self and not fabric._is_closed:
                error = kind(f"{self.describe_peer(self.rank)} {reason}", rank=self.rank, host="memory")
                self._network.loop.call_soon(fabric._lose, self.rank, error)

    def _lose(self, peer: int, error: PeerLostError) -> None:
        if self._is_closed or peer in self._lost:
            return
        self._lost[peer] = error
        self._listener_slot.tell(lambda listener: listener.on_peer_lost(peer, error))

    def _deliver(self, parcel: Parcel) -> None:
        """Take a parcel that arrived: hand it over, or hold it until its receive is posted."""
        source = self._network.fabrics[parcel.source]
        if self._is_closed or (parcel.source in self._lost and not parcel.is_settled):
            source._finish(parcel, was_delivered=False)
        elif parcel.is_control:
            source._finish(parcel, was_delivered=True)
            payload = bytes(parcel.payload)
            self._listener_slot.tell(lambda listener: listener.on_control(parcel.source, payload))
        elif self._is_over(parcel.tag):
            source._finish(parcel, was_delivered=True)
        elif (parcel.source, parcel.tag) in self._posted:
            self._land(parcel, self._posted.pop((parcel.source, parcel.tag)))
            source._finish(parcel, was_delivered=True)
        else:
            self._held[parcel.source, parcel.tag] = parcel
            if parcel.payload.nbytes <= self._network.eager_bytes:
                source._finish(parcel, was_delivered=True)

    def _is_over(self, tag: int) -> bool:
        """Whether the message ``tag`` is in a stream in which nothing is received any more; then it is counted."""
        is_over = any(tag >> _STREAM_SHIFT in streams for streams in self._dropped_streams)
        self._num_dropped += is_over
        return is_over

    def _land(self, parcel: Parcel, posted: Posted) -> None:
        if parcel.signature != posted.signature or parcel.payload.nbytes != posted.destination.nbytes:
            if posted.on_mismatch is not None:
                call_back(partial(posted.on_mismatch, parcel.signature))
            return
        posted.destination[:] = parcel.payload
        counters = self._count(parcel.source, parcel.connection_class)
        counters.received_bytes += parcel.payload.nbytes
        counters.received_messages += 1
        posted.on_received()

    def _finish(self, parcel: Parcel, *, was_delivered: bool) -> None:
        """Settle the sender's account of ``parcel``, once: what is held was settled when it arrived, if it is small."""
        if parcel.is_settled:
            return
        parcel.is_settled = True
        self._outgoing -= 1
        if not self._outgoing:
            self._drained.set()
        on_sent, parcel.on_sent = parcel.on_sent, None
        if not parcel.is_control:
            counters = self._count(parcel.target, parcel.connection_class)
            counters.queued_bytes -= parcel.payload.nbytes
            if was_delivered:
                counters.sent_bytes += parcel.payload.nbytes
                counters.sent_messages += 1
        if on_sent is not None and was_delivered and not self._is_closed:
            on_sent()

    def _count(self, peer: int, connection_class: int) -> Counters:
        return self._counters.setdefault((peer, connection_class), Counters())

    def _check_open(self) -> None:
        if self._is_closed:
            raise FabricClosedError(f"rank {self.rank}: the fabric was closed; open a new one with syncline.init()")

    def _check_peer(self, peer: int) -> None:
        self._check_open()
        assert 0 <= peer < self.world_size, f"rank {peer} is not in the job"
        assert peer != self.rank, f"rank {self.rank} sends to itself"
