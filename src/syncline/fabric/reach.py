"""Connections to ranks that nobody can dial, as those behind a router that hands no port on to them.

Such a rank says so (:data:`NOWHERE` is where others reach it), and connects itself. Of two ranks it is the higher that
opens a connection's handshake. Where the lower cannot be dialled, it *calls*: it connects to the higher and says for
which connection, and the higher begins the handshake on that socket as if it had dialled. Where neither can be dialled,
both call at a third rank that can, the lowest that lives, which joins their sockets and passes on what comes, without
knowing what it means: handshake, frames and codes are those of the two. Ranks of one host dial each other.

A call bears a code of the job's key, so that only ranks of the job are called for or joined. Nothing more follows from
it: whoever repeats one that was overheard gets no further than a handshake.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from syncline.errors import ConfigurationError
from syncline.fabric.dialling import CALL_BYTES, CALL_MAGIC, connect_to
from syncline.fabric.frames import CONTROL_CLASS
from syncline.fabric.handshake import Terms
from syncline.fabric.options import FabricOptions
from syncline.fabric.rendezvous import Member
from syncline.fabric.sockets import prepare_connected

if TYPE_CHECKING:
    from syncline.fabric._native import Splices

_CALL = struct.Struct("<8s32sQIIIh16s32s")
_MAC_BYTES = 32
assert _CALL.size == CALL_BYTES

_log = logging.getLogger(__name__)


class _Call(NamedTuple):
    """Who wants a connection of which class to whom."""

    source: int
    target: int
    connection_class: int


def check_reach(members: Sequence[Member]) -> None:
    """Refuse a job in which two ranks could meet nowhere."""
    if any(member.is_reachable for member in members):
        return
    for member in members:
        if member.host != members[0].host:
            raise ConfigurationError(
                f"rank 0 (host {members[0].host}) and rank {member.rank} (host {member.host}) cannot be dialled "
                "(SYNCLINE_ADVERTISE=none), and neither can any other rank at which they could meet; let the ranks of "
                "one host be reached: forward ports to it, and name them with SYNCLINE_PORTS and SYNCLINE_ADVERTISE"
            )


class Reach:
    """How one rank's connections are opened to and from ranks that cannot be dialled.

    ``is_gone`` says which ranks are lost; ``on_call`` hears that a lower rank has called for one of its connections.
    """

    def __init__(
        self,
        terms: Terms,
        options: FabricOptions,
        *,
        own_address: str,
        members: Sequence[Member],
        is_gone: Callable[[int], bool],
        on_call: Callable[[int, int], None],
    ) -> None:
        self._terms = terms
        self._options = options
        self.own_address = own_address
        self._members = members
        self._own = members[terms.rank]
        self._is_gone = is_gone
        self._on_call = on_call
        self._called: defaultdict[tuple[int, int], asyncio.Queue[socket.socket]] = defaultdict(asyncio.Queue)
        self._waiting: dict[_Call, socket.socket] = {}
        self._splices: Splices | None = None
        self._joined: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._ended = asyncio.Event()
        self._told: set[tuple[int, int]] = set()

    def __repr__(self) -> str:
        return f"<Reach of rank {self._terms.rank}: {len(self._joined)} connections pass>"

    def address_of(self, peer: int) -> tuple[str, int]:
        """Return where ``peer`` listens."""
        return self._members[peer].address, self._members[peer].port

    def is_dialled(self, peer: int) -> bool:
        """Whether this rank can dial ``peer``."""
        return self._members[peer].is_reachable or self._members[peer].host == self._own.host

    def calls(self, peer: int) -> bool:
        """Whether this rank must call for its connections to ``peer``, as it is the lower and cannot be dialled."""
        return self._terms.rank < peer and not self._own.is_reachable and self._members[peer].host != self._own.host

    def is_direct(self, peer: int) -> bool:
        """Whether the sockets of the two are each other's ends, on one machine maybe."""
        return self.is_dialled(peer) or self._own.is_reachable

    async def open(self, peer: int, connection_class: int, connect_s: float | None) -> socket.socket:
        """Return a socket on which this rank, the higher, begins a handshake with ``peer``; OSError if it has none."""
        if self.is_dialled(peer):
            return await self._connect(peer, connect_s)
        if self._own.is_reachable:
            async with asyncio.timeout(connect_s):
                return await self._called[peer, connection_class].get()
        return await self._call_at(self._third(), peer, connection_class, connect_s)

    async def call(self, peer: int, connection_class: int, connect_s: float | None = None) -> socket.socket:
        """Return a socket on which ``peer``, the higher, begins a handshake; OSError if nobody answers there."""
        where = peer if self._members[peer].is_reachable else self._third()
        return await self._call_at(where, peer, connection_class, connect_s)

    def take(self, message: bytes, sock: socket.socket) -> bool:
        """Take a socket on which somebody has called; False if the call is none of this job, or nothing for us."""
        _, job, epoch, source, where, target, connection_class, _, mac = _CALL.unpack(message)
        is_ours = hmac.compare_digest(mac, _mac(self._terms, message[:-_MAC_BYTES])) and job == self._terms.job
        own, num_ranks = self._terms.rank, self._terms.world_size
        if not is_ours or (epoch, where) != (self._terms.epoch, own) or source == target:
            return False
        if not CONTROL_CLASS <= connection_class < self._terms.num_classes:
            return False
        if source == own or max(source, target) >= num_ranks:
            return False
        if target != own:
            self._meet(_Call(source, target, connection_class), sock)
            return True
        if source > own:
            return False
        self.drop_call(source, connection_class)  # given up there
        self._called[source, connection_class].put_nowait(sock)
        self._on_call(source, connection_class)
        return True

    def drop_call(self, peer: int, connection_class: int) -> None:
        """Close a socket on which the peer has called, if one is left: the connection is there, or comes otherwise."""
        called = self._called[peer, connection_class]
        while not called.empty():
            called.get_nowait().close()

    def use_terms(self, terms: Terms) -> None:
        """Take calls by these terms from now on."""
        self._terms = terms

    async def drain(self) -> None:
        """Wait until the ranks whose connections pass here have closed them."""
        while self._joined:
            self._ended.clear()
            await self._ended.wait()

    def close(self) -> None:
        """Close what was joined here, and what waits."""
        if self._splices is not None:
            asyncio.get_running_loop().remove_reader(self._splices)
            self._splices.close()
        for calls in self._called.values():
            while not calls.empty():
                calls.get_nowait().close()
        for sock in (*self._waiting.values(), *(sock for both in self._joined.values() for sock in both)):
            sock.close()
        self._waiting.clear()
        self._joined.clear()

    # --- inside ---

    def _third(self) -> int:
        """Return where two ranks meet of which neither can be dialled."""
        for member in self._members:
            if member.is_reachable and not self._is_gone(member.rank):
                return member.rank
        raise ConnectionRefusedError("no rank that can be dialled is left")

    async def _connect(self, rank: int, connect_s: float | None) -> socket.socket:
        return await connect_to(self.address_of(rank), self.own_address, self._options, connect_s=connect_s)

    async def _call_at(self, where: int, peer: int, connection_class: int, connect_s: float | None) -> socket.socket:
        sock = await self._connect(where, connect_s)
        terms, nonce = self._terms, self._terms.nonce(16)
        named = (CALL_MAGIC, terms.job, terms.epoch, terms.rank, where, peer, connection_class, nonce)
        body = _CALL.pack(*named, bytes(_MAC_BYTES))[:-_MAC_BYTES]
        try:
            await asyncio.get_running_loop().sock_sendall(sock, body + _mac(terms, body))
        except BaseException:
            sock.close()
            raise
        return sock

    def _meet(self, call: _Call, sock: socket.socket) -> None:
        """Join the socket with that of the other rank, or let it wait."""
        other = self._waiting.pop(_Call(call.target, call.source, call.connection_class), None)
        if (before := self._waiting.pop(call, None)) is not None:
            before.close()
        if other is None:
            self._waiting[call] = sock
            return
        if self._splices is None:
            from syncline.fabric._native import Splices  # only where it can be imported

            self._splices = Splices()
            asyncio.get_running_loop().add_reader(self._splices, self._close_ended)
        try:
            for end in (sock, other):
                prepare_connected(end, call.connection_class, self._options)
            self._joined[self._splices.add(sock.fileno(), other.fileno())] = (sock, other)
        except OSError:  # one of the two has given up
            sock.close()
            other.close()
        self._tell(min(call.source, call.target), max(call.source, call.target))

    def _close_ended(self) -> None:
        assert self._splices is not None, "something was joined"
        for number in self._splices.take_ended():
            for end in self._joined.pop(number):
                end.close()
        self._ended.set()

    def _tell(self, lower: int, higher: int) -> None:
        """Say it once of two ranks: it costs them speed, and this rank's links carry it twice."""
        if (lower, higher) in self._told:
            return
        self._told.add((lower, higher))
        hosts = (self._members[lower].host, self._members[higher].host)
        _log.warning(
            "rank %d passes on what ranks %d and %d say to each other: neither of hosts %s and %s can be dialled",
            self._terms.rank,
            lower,
            higher,
            *hosts,
        )


def _mac(terms: Terms, body: bytes) -> bytes:
    return hmac.digest(terms.key, b"L" + body, "sha256")
