"""The TCP fabric: authenticated connections, one control and some data connections to each peer that needs them.

Of few ranks each is connected to all. Of many it is to its neighbours, and to others once it sends them something; of
what happens to those it has no connection to it hears by gossip (:mod:`syncline.fabric.gossip`).

This module only composes: what a frame is, who may send, who is alive and how connections open stand in the modules
of those names. Everything runs on one loop; nothing is locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, Unpack

from syncline.errors import FabricClosedError, PeerLostError, as_told
from syncline.fabric.acceptor import Acceptor
from syncline.fabric.frames import FrameError, FrameType, cut_reason, on_word_of, read_loss
from syncline.fabric.handshake import Admission
from syncline.fabric.liveness import Liveness, Suspect, describe_absence
from syncline.fabric.options import FabricOptions
from syncline.fabric.peer import Peer
from syncline.fabric.progress import Progress, Stalls
from syncline.fabric.protocol import (
    ABORTED,
    MAX_BACKLOG_BYTES,
    MAX_CONTROL_BYTES,
    FabricListener,
    GivenUpError,
    ListenerSlot,
    PeerLeftError,
    ReceiveSettings,
    SendSettings,
    call_back,
)
from syncline.fabric.reach import Reach
from syncline.fabric.shared_host import MemoryOffers, bind_thread
from syncline.fabric.sizing import WindowSizes
from syncline.fabric.slice_executor import SliceExecutor
from syncline.members import News, is_believed
from syncline.observe import Trace
from syncline.priorities.settings import Priorities

if TYPE_CHECKING:
    from syncline.fabric.overlay import Overlay
    from syncline.fabric.peer_transport import TransportSet
    from syncline.fabric.resting import IdleConnections
    from syncline.fabric.statistics import FabricStatistics

_log = logging.getLogger(__name__)


class Mesh(Protocol):
    """Who opens the connections."""

    acceptor: Acceptor
    reach: Reach

    @property
    def is_opening(self) -> bool:
        """Whether further classes are being opened."""

    def meet(self, peer: Peer) -> None:
        """Open the connections to a peer, unless that is under way."""

    async def open_classes(self, priorities: Priorities, *, timeout_s: float, only_check: bool) -> None:
        """Open further connections to every peer."""


class TcpFabric:
    """One rank's end of the TCP fabric; :func:`syncline.fabric.connect_tcp` opens it."""

    def __init__(
        self,
        *,
        rank: int,
        hosts: Iterable[str],
        numbers: Iterable[int] | None = None,
        options: FabricOptions,
        peer_options: Mapping[int, FabricOptions],
        transport_set: TransportSet,
        offers: MemoryOffers,
        is_sparse: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.rank = rank
        self._hosts = tuple(hosts)
        self.numbers = tuple(range(len(self._hosts)) if numbers is None else numbers)
        """What errors call the ranks."""
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._transport_set = transport_set
        self._trace = trace
        make_peer = partial(Peer, transport_set=transport_set, offers=offers, events=self)
        self._peers = {
            peer: make_peer(peer, self.describe_peer(peer), host, options=peer_options[peer])
            for peer, host in enumerate(self._hosts)
            if peer != rank
        }
        self._mesh: Mesh
        self._listener_slot = ListenerSlot()
        self._overlay = self._open_overlay() if is_sparse else None
        self._idle = self._watch_idle() if is_sparse else None
        self._neighbours = self._peers.keys() if self._overlay is None else self._overlay.neighbours
        self._connected: dict[int, Peer] = {}
        self.unconnected = self._peers.keys() - self._neighbours
        """Who is neither connected nor lost."""
        self._waiting: list[tuple[set[int], Callable[[], None]]] = []
        """Who is not connected yet, and what waits for that."""
        self._lost: dict[int, PeerLostError] = {}
        self._news = News()
        self._reasons: dict[int, str] = {}
        """Why a rank is lost by what was told of it last, also if that is not believed yet."""
        self._is_closing = self._has_ended = self._is_closed = False
        self._changed = asyncio.Event()
        self._liveness = Liveness(options, now_s=self._loop.time())
        self.progress = Progress()
        """Another's, once the training goes over from that one's connections to these."""
        self.stalls = Stalls(options.stall_s, lambda: self._listener_slot.tell(lambda listener: listener.on_stall()))
        transport_set.native_transport.keep_beating(interval_s=options.heartbeat_s, limit_s=options.held_s)
        self._timer = self._loop.call_later(self._liveness.interval_s, self._tick)

    def __repr__(self) -> str:
        num_ready = sum(peer.is_ready and not peer.is_gone for peer in self._peers.values())
        state = "closed" if self._is_closed else "closing" if self._is_closing else f"{num_ready} peers"
        return f"<TcpFabric rank {self.rank} of {self.world_size}: {state}>"

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return len(self._hosts)

    @property
    def missing_peers(self) -> tuple[int, ...]:
        """Peers to whom there must be connections from the start, and whose are not all there."""
        return tuple(rank for rank in sorted(self._neighbours) if not self._peers[rank].is_ready)

    @property
    def is_sparse(self) -> bool:
        """Whether ranks are connected only where they are neighbours, or send each other something."""
        return self._overlay is not None

    def set_listener(self, listener: FabricListener) -> None:
        """Tell ``listener`` from now on; what happened before is delivered at once."""
        self._listener_slot.listen(listener)

    def send(self, peer: int, tag: int, payload: memoryview, **settings: Unpack[SendSettings]) -> None:
        """Queue ``payload`` for ``peer`` (see the protocol)."""
        other = self._open_peer(peer)
        if other.is_gone:
            return
        if other.is_ready:
            other.transport.send(tag, payload, **settings)
        else:
            self.meet(other, partial(other.transport.send, tag, payload, **settings))

    def receive(self, peer: int, tag: int, destination: memoryview, **settings: Unpack[ReceiveSettings]) -> None:
        """Let the message ``tag`` of ``peer`` land in ``destination`` (see the protocol)."""
        self._open_peer(peer).transport.receive(tag, destination, **settings)

    def cancel(self, peer: int, tag: int) -> None:
        """Forget a posted receive."""
        self._peers[peer].transport.cancel(tag)

    def drop_streams(self, streams: range) -> None:
        """Throw away what comes in streams that are over, or has come, be it of peers that are gone."""
        for peer in self._peers.values():
            peer.transport.drop_streams(streams)

    def send_control(self, peer: int, payload: bytes) -> None:
        """Send a small message ahead of all data."""
        assert len(payload) <= MAX_CONTROL_BYTES, f"control message of {len(payload)} bytes"
        other = self._open_peer(peer)
        other.num_told += 1
        if other.is_ready:
            other.send_frame(FrameType.CONTROL, payload=bytes(payload))
        else:
            self.meet(other, partial(other.send_frame, FrameType.CONTROL, payload=bytes(payload)))

    def tell(self, peers: Collection[int], payload: bytes) -> None:
        """Send a control message to each of ``peers``, without a connection to each (see the protocol)."""
        self._check_open()
        if self._overlay is not None and any(peer not in self._neighbours for peer in peers):
            self._overlay.spread_message(peers, payload)
            return
        for peer in peers:
            if peer not in self._lost:
                self.send_control(peer, payload)

    def pass_on(self, peer: int, payload: bytes) -> None:
        """Send a control message that may get lost on its way (see the protocol)."""
        if self._overlay is None:
            self.send_control(peer, payload)
        else:
            self._overlay.pass_on(peer, payload)

    def when_connected(self, peers: Collection[int], then: Callable[[], None]) -> None:
        """Call ``then`` once this rank is connected to all of ``peers`` (see the protocol)."""
        missing = self.unconnected.intersection(peers)
        if not missing:
            then()
            return
        self._waiting.append((missing, then))
        for peer in missing:
            self._mesh.meet(self._peers[peer])

    def open_executor(self, reference: SliceExecutor, most_bytes: int, ranks: Sequence[int] = ()) -> SliceExecutor:  # noqa: ARG002 - this is compiled
        """Return who executes slices here (see the protocol)."""
        return self._transport_set.open_executor(most_bytes, ranks or range(self.world_size))

    async def open_classes(self, priorities: Priorities, *, timeout_s: float, only_check: bool = False) -> None:
        """Open further connections to every peer (see the protocol)."""
        self._check_open()
        await self._mesh.open_classes(priorities, timeout_s=timeout_s, only_check=only_check)

    def is_lost(self, peer: int) -> bool:
        """Whether ``peer`` was reported lost."""
        return peer in self._lost

    def is_local(self, peer: int) -> bool:
        """Whether the ends of the peer's connections have one address, and memory may be shared with it."""
        return self._peers[peer].is_local

    def describe_peer(self, peer: int) -> str:
        """``"rank 3 (host b1)"``."""
        return f"rank {self.numbers[peer]} (host {self._hosts[peer]})"

    def statistics(self) -> FabricStatistics:
        """Return a frozen record of all counters."""
        from syncline.fabric.statistics import FabricStatistics  # a start counts nothing

        native, peers = self._transport_set.native_transport, self._peers
        return FabricStatistics(
            rank=self.rank,
            time_s=self._loop.time(),
            connections=tuple(entry for peer in peers.values() for entry in peer.transport.connections()),
            unexpected_bytes=sum(map(native.unexpected_bytes, peers)),
            pending_receives=sum(map(native.num_pending, peers)),
            dropped_messages=sum(map(native.num_dropped, peers)),
            refused_connections=self._mesh.acceptor.num_refused,
            lost_peers=tuple(sorted(self._lost)),
            suspect_peers=tuple(sorted(self._liveness.suspects)),
        )

    async def close(self) -> None:
        """Send what is queued, say goodbye, and release everything, within ``close_s``."""
        if self._is_closing or self._is_closed:
            await self.wait_until(lambda: self._is_closed)
            return
        self._is_closing = True
        self._transport_set.tell_drained(self._changed.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.close_s):
                await self.wait_until(lambda: all(peer.is_drained for peer in self._peers.values()))
                if self._overlay is not None:
                    self._overlay.spread_leaving()
                self._has_ended = True
                for peer in self.living():
                    peer.transport.end()
                await self.wait_until(lambda: not self.living())
                await self._mesh.reach.drain()
        for peer in self.living():
            # Only those whose deadline passed: what was sent to them was not received, or they did not answer.
            reason = f"closed its fabric after waiting {self._options.close_s:.1f} s for this rank to receive"
            self._tell_peer(peer, tag=self.rank, reason=reason)
        await asyncio.gather(*self._release(), return_exceptions=True)

    def abort(self, reason: str = ABORTED) -> None:
        """Release everything at once; tell the others why, as far as that goes without waiting."""
        reason = f"is lost: {reason}"
        if not self._is_closed and self._overlay is not None and not self._has_ended:
            self._overlay.spread_loss(self.rank, reason)
            for peer in self.living():
                peer.flush_control()
        elif not self._is_closed:
            for peer in self.living():
                self._tell_peer(peer, tag=self.rank, reason=reason)
        self._release()

    def resize_grants(self, sizes: WindowSizes) -> None:
        """Grant with these sizes from now on."""
        self._transport_set.scheduler.resize(**sizes)

    def use_mesh(self, mesh: Mesh) -> None:
        """Own ``mesh``, of which this is the fabric, and close its acceptor in the end."""
        self._mesh = mesh

    def peer(self, rank: int) -> Peer:
        """Return the state of one peer (for whoever opens the connections)."""
        return self._peers[rank]

    @property
    def away_s(self) -> float:
        """For how long this process did not run, if that is just over, or not long ago."""
        return self._liveness.away_s(self._loop.time())

    def living(self) -> list[Peer]:
        """Return the peers to whom this rank is connected."""
        peers = (self._peers if self._overlay is None else self._connected).values()
        return [peer for peer in peers if peer.is_ready and not peer.is_gone]

    def meet(self, peer: Peer, then: Callable[[], None]) -> None:
        """Do something when a peer is connected, now or later; nothing if it is lost."""
        if peer.is_gone:
            return
        if peer.is_ready:
            then()
        else:
            peer.wait(then)
            self._mesh.meet(peer)

    async def wait_connected(self) -> None:
        """Wait until all connections to all peers are there; raise if a peer is lost before.

        A peer that left in good order was connected before that.
        """
        await self.wait_until(lambda: bool(self._failures()) or not self.missing_peers)
        for error in self._failures():
            raise error

    async def wait_for_peer(self, peer: Peer, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; raise if ``peer`` is lost or leaves before, or this fabric is closed."""
        await self.wait_until(lambda: peer.is_gone or condition())
        self._check_open()
        if not condition():
            raise self._lost[peer.rank]

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at whenever a connection or a peer has changed."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # --- what the peers tell (PeerEvents) ---

    def on_ready(self, peer: Peer) -> None:
        """Judge the peer's silence from now on, and send what waited for its connections."""
        self._connected[peer.rank] = peer
        self._liveness.add(peer.rank)
        self._changed.set()
        if self._overlay is None:
            return
        self.unconnected.discard(peer.rank)
        if self._idle is not None:
            self._idle.end(peer)
        self._overlay.on_ready(peer)
        peer.go_on()
        if self._has_ended:
            peer.transport.end()
        self._go_on_without(peer.rank)

    def on_opening(self, peer: Peer) -> None:  # noqa: ARG002 - whoever waits looks for themselves
        """Let who opens connections look again."""
        self._changed.set()

    def on_broken(self, peer: Peer, reason: str, *, must_tell: bool) -> None:
        """Report the peer as lost, and tell the others."""
        if peer.is_gone:
            return
        away_s = self.away_s
        if not must_tell and away_s >= self._options.dead_s:  # this rank was given up, and shall not blame the peer
            own = f"{self.describe_peer(self.rank)} {describe_absence(away_s)}"
            text = f"{own}, and then found {peer.name} gone: it {reason}"
            self.lose(peer, PeerLostError(text, rank=peer.rank, host=peer.host))
            return
        if must_tell:
            self._tell_peer(peer, tag=peer.rank, reason=reason)
        error = PeerLostError(f"{peer.name} {reason}", rank=peer.rank, host=peer.host)
        self.lose(peer, error, news=[(peer.rank, reason)])

    def on_ended(self, peer: Peer) -> None:
        """Report that the peer left; if this rank is closing too, wait for its farewell."""
        if not self._is_closing or peer.has_said_farewell:
            self.lose(peer, PeerLeftError(f"{peer.name} left: it closed its fabric", rank=peer.rank, host=peer.host))

    def on_farewell(self, peer: Peer) -> None:
        """Let go of a peer that has read everything, if it has nothing to send either."""
        self.lose(peer, PeerLeftError(f"{peer.name} left", rank=peer.rank, host=peer.host))

    def on_news(self, peer: Peer, tag: int, reason: str) -> None:
        """Believe a peer that another one is lost, if it is to be (:class:`News`), or that it gave up this rank."""
        lost, accuser = read_loss(tag, teller=peer.rank)
        if lost in self._peers:
            self._reasons[lost] = reason
        if lost == self.rank:
            text = f"{peer.name} closed its connections to this rank, because rank {self.numbers[lost]} {reason}"
            if away_s := self.away_s:
                text += f"; this rank {describe_absence(away_s)}"
            error = (PeerLostError if accuser == peer.rank else GivenUpError)(text, rank=peer.rank, host=peer.host)
            must_tell = accuser == peer.rank or is_believed(peer.rank, lost)  # of it this rank is not believed
            self.lose(
                peer,
                error,
                news=[(peer.rank, f"gave up rank {self.numbers[lost]}, which {reason}")] if must_tell else (),
            )
        elif lost in self._peers and self._news.hear(peer.rank, lost, known=self._lost.keys(), accuser=accuser):
            self.believe(accuser, lost, reason)
        else:
            _log.info("rank %d: %s reports that it lost rank %d, which %s", self.rank, peer.name, lost, reason)

    def on_control_message(self, peer: Peer, payload: bytes) -> None:
        """Pass a control message on."""
        if not self._listener_slot.has_room(peer.rank, len(payload)):
            reason = f"broke the protocol: it sent over {MAX_BACKLOG_BYTES >> 20} MiB of control messages to nobody yet"
            self.on_broken(peer, reason, must_tell=True)
            return
        self._listener_slot.tell(lambda listener: listener.on_control(peer.rank, payload))

    def on_rest(self, peer: Peer, tag: int) -> None:
        """Let connections rest that neither uses."""
        if self._idle is None:
            raise FrameError("it lets connections rest, and all ranks are connected")
        self._idle.on_frame(peer, tag, self._loop.time())

    def on_closed(self, peer: Peer) -> bool:
        """Let the others rest as well, if that was agreed."""
        if self._idle is not None and self._idle.has_agreed(peer):
            self.let_rest(peer)
            return True
        return False

    def on_memory_shared(self) -> None:
        """Divide the machine's cores with the ranks that run on it too."""
        if self._options.binds_thread:
            bind_thread(self.rank, [other.rank for other in self._peers.values() if other.is_local])

    # --- connections that rest (RestingFabric) ---

    @property
    def may_rest(self) -> bool:
        """Whether connections may be closed now."""
        return not (self._is_closing or self._mesh.is_opening)

    def let_rest(self, peer: Peer) -> None:
        """Close the connections to a peer until somebody needs them."""
        if self._idle is not None and peer.rest():
            self._idle.begin(peer)
            self._connected.pop(peer.rank, None)
            self.unconnected.add(peer.rank)
            self._liveness.remove(peer.rank)
            self._changed.set()
            self._note("connections rest", peer=peer.rank)

    def wake(self, peer: Peer) -> None:
        """Open them again."""
        self._mesh.meet(peer)

    # --- inside ---

    def believe(self, accuser: int, lost: int, reason: str) -> None:
        """Take a rank for lost as another says so, and let it know."""
        outcast = self._peers[lost]
        if outcast.is_gone:
            return
        if lost != accuser:
            reason = as_told(reason, self.describe_peer(accuser))
            self._tell_peer(outcast, tag=on_word_of(accuser, lost), reason=reason)
        error = PeerLostError(f"{outcast.name} {reason}", rank=lost, host=outcast.host)
        tag = lost if is_believed(self.rank, lost) else on_word_of(accuser, lost)
        # to whom the accuser has no link, but where gossip leads to all
        self.lose(outcast, error, news=[(tag, reason)] if self._overlay is None else ())

    def _tell_peer(self, peer: Peer, *, tag: int, reason: str) -> None:
        """Tell ``peer`` at once, before its connections are closed, that a rank (itself, or this one) is lost."""
        peer.send_frame(FrameType.LOST, tag=tag, payload=cut_reason(reason))
        peer.flush_control()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._liveness.interval_s, self._tick)
        living = self.living()
        heard = {peer.rank for peer in living if peer.transport.take_heard()}
        stuck = {peer.rank for peer in living if peer.transport.look_if_stuck()}
        tick = self._liveness.tick(self._loop.time(), heard=heard, stuck=stuck)
        if tick.gap_s:
            if advice := self._liveness.advise(tick.gap_s):
                _log.warning("rank %d: %s", self.rank, advice)
            self._note("loop stood still", gap_s=tick.gap_s)
        if tick.must_beat:
            for peer in self.living():
                peer.send_frame(FrameType.HEARTBEAT, tag=self.progress.value)
        for verdict in tick.verdicts:
            peer = self._peers[verdict.peer]
            if verdict.is_dead:
                self.on_broken(peer, _describe(verdict), must_tell=True)
            else:
                _log.warning("rank %d: %s has sent nothing for %.1f s", self.rank, peer.name, verdict.silence_s)
                self._note("peer is silent", peer=peer.rank, silence_s=verdict.silence_s)
        self.stalls.tick(tick.counted_s, {peer.rank: peer.transport.progress for peer in self.living()})
        if self._idle is not None:
            self._idle.look(self._loop.time(), self._connected.values())
        if self._overlay is not None and not self._is_closing:
            self._overlay.look(self._loop.time())

    def lose(self, peer: Peer, error: PeerLostError, *, news: Iterable[tuple[int, str]] = ()) -> None:
        """Report a peer as lost; others hear the ``news`` (each a tag and a reason) before whatever follows from it."""
        if peer.is_gone:
            return
        peer.close()
        self._connected.pop(peer.rank, None)
        self.unconnected.discard(peer.rank)
        self._liveness.remove(peer.rank)
        if self._idle is not None:
            self._idle.end(peer)
        self._lost[peer.rank] = error
        self._changed.set()
        has_left = isinstance(error, PeerLeftError)
        self._note("peer left" if has_left else "peer is lost", peer=peer.rank, reason=str(error))
        if not self._is_closing:
            self._listener_slot.tell(lambda listener: listener.on_peer_lost(peer.rank, error))
        for tag, reason in news:
            self._tell_loss(tag, reason)
        for accuser, lost in self._news.find(known=self._lost.keys()):
            self.believe(accuser, lost, self._reasons[lost])
        if self._overlay is not None and not self._is_closing:
            self._go_on_without(peer.rank)
            self._overlay.on_gone(peer, has_left=has_left)

    def _tell_loss(self, tag: int, reason: str) -> None:
        if self._overlay is not None:
            self._overlay.spread_loss(tag, reason)
            return
        for other in self.living():
            other.send_frame(FrameType.LOST, tag=tag, payload=cut_reason(reason))

    def _open_overlay(self) -> Overlay:
        from syncline.fabric.overlay import Overlay  # few ranks need none

        return Overlay(self.rank, self._peers, self, patience_s=self._options.dead_s)

    def _watch_idle(self) -> IdleConnections:
        from syncline.fabric.resting import IdleConnections  # few ranks need none

        return IdleConnections(self, idle_s=self._options.idle_s)

    def _go_on_without(self, rank: int) -> None:
        """Do what waits for no connection any more but that to ``rank``, which is there, or will never be."""
        for missing, _ in self._waiting:
            missing.discard(rank)
        ready = [then for missing, then in self._waiting if not missing]
        self._waiting = [(missing, then) for missing, then in self._waiting if missing]
        for then in ready:
            call_back(then)

    def _release(self) -> list[asyncio.Task[Admission]]:
        if self._is_closed:
            return []
        self._is_closing = self._is_closed = True
        self._timer.cancel()
        for peer in self._peers.values():
            peer.close()
        self._transport_set.close()
        self._changed.set()
        self._mesh.reach.close()
        return self._mesh.acceptor.close()

    def _failures(self) -> list[PeerLostError]:
        return [error for error in self._lost.values() if not isinstance(error, PeerLeftError)]

    def _check_open(self) -> None:
        if self._is_closing:
            raise FabricClosedError(f"rank {self.rank}: the fabric was closed; open a new one with syncline.init()")

    def _open_peer(self, peer: int) -> Peer:
        self._check_open()
        assert peer in self._peers, f"rank {self.rank} has no peer {peer} in a job of {self.world_size}"
        return self._peers[peer]

    def _note(self, name: str, **args: object) -> None:
        if self._trace is not None:
            self._trace.instant(name, "communication", **args)


def _describe(verdict: Suspect) -> str:
    if not verdict.is_heard:
        return f"sent nothing for {verdict.silence_s:.1f} s"
    return (
        f"is heard, but got nothing of the data that was sent to it for {verdict.silence_s:.1f} s, as only small "
        "packets pass; give all interfaces on the way between the hosts the same MTU (`ping -M do -s 1472 HOST` passes "
        "where it is 1500)"
    )
