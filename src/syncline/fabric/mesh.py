"""The mesh of the TCP fabric: meet, listen, dial, and have every connection or a clear error by the deadline.

Further connection classes are opened later by the same handshake. The ranks first tell each other which, so that no one
dials before the other knows what to expect, and at the end that they are there, so that no one leaves before.

Of more than ``most_connected`` ranks each connects to its neighbours alone, and *meets* another when one of the two has
something to send: the higher dials, for which the lower calls (:mod:`syncline.fabric.reach`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from syncline.endpoints import is_ipv6
from syncline.errors import ConfigurationError, FabricError, HandshakeError
from syncline.fabric.acceptor import MAX_UNAUTHENTICATED, Acceptor
from syncline.fabric.compiled import check_compiled
from syncline.fabric.dialling import FIRST_PAUSE_S, LONGEST_PAUSE_S, dial
from syncline.fabric.frames import CONTROL_CLASS, FrameType
from syncline.fabric.handshake import (
    Admission,
    Refusal,
    RefusedError,
    Terms,
    derive_key,
    derive_offer_key,
)
from syncline.fabric.options import NOWHERE, FabricOptions
from syncline.fabric.peer import Peer
from syncline.fabric.reach import Reach, check_reach
from syncline.fabric.rendezvous import AnyRendezvous, Generation, Member
from syncline.fabric.reopening import NEWS_S, Reopener
from syncline.fabric.shared_host import MemoryOffers
from syncline.fabric.shared_port import SharedListener, name_of, open_listener
from syncline.fabric.sizing import fit_grants, fit_options, fit_window_sizes
from syncline.fabric.sockets import advertised_endpoint, check_open_files, prepare_connected, resolve_address
from syncline.fabric.tcp import TcpFabric
from syncline.observe import Trace
from syncline.priorities.settings import Priorities
from syncline.topology.topology import Topology


async def connect_tcp(
    options: FabricOptions,
    *,
    rank: int,
    world_size: int,
    rendezvous: AnyRendezvous,
    topology: Topology | None = None,
    numbers: Iterable[int] | None = None,
    trace: Trace | None = None,
    timeout_s: float | None = None,
) -> TcpFabric:
    """Open the TCP fabric of ``rank`` on the running loop; it is connected to all peers, or of many to its neighbours.

    ``timeout_s`` is for all of it; None is ``options.connect_s``. ``numbers``: what errors call the ranks.
    Raises ``ConfigurationError`` (address, exposure without a secret, nothing compiled), ``RendezvousError`` (who did
    not come), ``HandshakeError`` (who refused and why, or did not connect in time), ``PeerLostError`` (who died
    meanwhile).

    >>> class DictStore(dict):  # where all ranks are in one process
    ...     set = dict.__setitem__
    >>> async def connect():
    ...     meeting = Rendezvous(DictStore(), job_id="example")
    ...     fabric = await connect_tcp(FabricOptions(address="127.0.0.1"), rank=0, world_size=1, rendezvous=meeting)
    ...     await fabric.close()
    ...     return fabric.world_size
    >>> asyncio.run(connect())
    1
    """
    check_compiled()
    from syncline.fabric.peer_transport import TransportSet  # only where it can be imported

    timeout_s = options.connect_s if timeout_s is None else timeout_s
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    address = resolve_address(options.address)
    options.check_exposure(address)
    check_open_files(rank, num_peers=_num_peers(world_size, options), num_classes=options.num_classes)
    listening = open_listener(address, options)
    try:
        host = topology.host_of(rank).name if topology else socket.gethostname()
        reached_at, port = advertised_endpoint(address, listening.getsockname()[1], options)
        is_reachable = options.advertised != NOWHERE
        member = Member(rank=rank, host=host, address=reached_at, port=port, is_reachable=is_reachable)
        generation = await rendezvous.meet(member, world_size=world_size, timeout_s=timeout_s, silence_s=options.dead_s)
        _check_one_family(generation.members)
        check_reach(generation.members)
        options = options.decided_for({other.address for other in generation.members})
        key = derive_key(options.secret or generation.job_nonce, job_id=options.job_id)
        grants = fit_grants(options, rank=rank, world_size=world_size, topology=topology)
        fabric = TcpFabric(
            rank=rank,
            hosts=[other.host for other in generation.members],
            numbers=numbers,
            options=options,
            peer_options=fit_options(options, rank=rank, world_size=world_size, topology=topology),
            transport_set=TransportSet(grants),
            offers=MemoryOffers(rank=rank, key=derive_offer_key(key, epoch=generation.epoch)),
            is_sparse=world_size > options.most_connected and all(each.is_reachable for each in generation.members),
            trace=trace,
        )
    except BaseException:
        listening.close()
        raise
    # Who came late must still have the time for a handshake.
    left_s = max(deadline_s - asyncio.get_running_loop().time(), options.handshake_s)
    mesh = _Mesh(fabric, listening, generation, options, topology, trace)
    await _connect_or_abort(fabric, mesh.connect(left_s), rendezvous)
    return fabric


async def _connect_or_abort(
    fabric: TcpFabric, connecting: Coroutine[Any, Any, None], rendezvous: AnyRendezvous
) -> None:
    try:
        await _unless_told(connecting, rendezvous)
    except HandshakeError as error:
        fabric.abort(str(error))  # a third rank may hear this before it hears the cause from the store
        raise
    except BaseException:
        fabric.abort()
        raise


async def _unless_told(connecting: Coroutine[Any, Any, None], rendezvous: AnyRendezvous) -> None:
    """Connect, unless some rank is gone or says that it cannot; say so to the others if it is this one."""
    watch = asyncio.create_task(rendezvous.watch())
    work = asyncio.create_task(connecting)
    try:
        await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and (error := watch.exception()) is not None:
            raise error
        await work
        await rendezvous.rest()
    except FabricError as error:
        if not watch.done():
            await rendezvous.give_up(str(error))
        raise
    finally:
        for task in (watch, work):
            task.cancel()
        await asyncio.gather(watch, work, return_exceptions=True)


def _check_one_family(members: Sequence[Member]) -> None:
    """Refuse a job in which some ranks listen on IPv4 and some on IPv6: they could never connect."""
    on_v6 = [member for member in members if is_ipv6(member.address)]
    if on_v6 and len(on_v6) < len(members):
        other = next(member for member in members if not is_ipv6(member.address))
        raise ConfigurationError(
            f"All ranks must use IPv4, or all IPv6, but rank {on_v6[0].rank} (host {on_v6[0].host}) has the address "
            f"{on_v6[0].address} and rank {other.rank} (host {other.host}) {other.address}; set SYNCLINE_INTERFACE "
            "to an address of the same kind on every host"
        )


class _IdleError(OSError):
    """Why connections are opened again that nobody had used."""

    def __str__(self) -> str:
        return "its connections were closed for want of use, and cannot be opened again"


class _Mesh:
    """How the connections of one fabric are opened: dialled to lower ranks, accepted from higher ones."""

    def __init__(
        self,
        fabric: TcpFabric,
        listening: socket.socket | SharedListener,
        generation: Generation,
        options: FabricOptions,
        topology: Topology | None,
        trace: Trace | None,
    ) -> None:
        self._fabric = fabric
        self._options = options
        self._topology = topology
        self._members = generation.members
        self._places = asyncio.Semaphore(MAX_UNAUTHENTICATED // 2)
        self._terms = _terms_of(fabric, generation, options)
        self._opening = asyncio.Lock()
        self._expected = options
        """What may be opened at last; what is open are ``_options``."""
        self._failure: BaseException | None = None
        self._meeting: dict[int, asyncio.Task[None]] = {}
        self.reach = Reach(
            self._terms,
            options,
            own_address=listening.getsockname()[0],
            members=self._members,
            is_gone=fabric.is_lost,
            on_call=self._called,
        )
        self.acceptor = Acceptor(
            listening,
            self._terms,
            handshake_s=options.handshake_s,
            num_expected=sum(peer > fabric.rank for peer in fabric.missing_peers) * (options.num_classes + 1),
            is_taken=lambda peer, connection_class: fabric.peer(peer).has_connection(connection_class),
            on_connection=self._accept,
            resume=lambda peer, *which: self._reopener.give_up_socket(fabric.peer(peer), *which),
            holds=lambda peer, *which: self._reopener.holds(fabric.peer(peer), *which),
            on_call=self.reach.take,
        )
        self._reopener = Reopener(
            self._terms, options, places=self._places, reach=self.reach, greet=self.acceptor.greet, trace=trace
        )
        self._prepare_peers()
        fabric.use_mesh(self)
        if isinstance(listening, SharedListener):
            listening.serve(name_of(self._terms.job, self._terms.epoch, self._terms.rank))

    def _prepare_peers(self) -> None:
        own_address = self._members[self._fabric.rank].address
        for peer in self._peers():
            peer.reopen = self._reopener.reopen
            if not self.reach.is_direct(peer.rank):  # the other end of its sockets may be another rank of this machine
                peer.expect(replace(peer.options, shares_memory=False))
            peer.looks_local = peer.options.shares_memory and self._members[peer.rank].address == own_address

    async def connect(self, timeout_s: float) -> None:
        """Wait until every connection is there that must be from the start; raise a clear error if not."""
        classes = range(CONTROL_CLASS, self._options.num_classes)
        wanted = [peer for peer in self._fabric.missing_peers if peer < self._fabric.rank]
        dials = [self._dial(self._members[peer], each) for peer, each in product(wanted, classes)]
        calls = [self._call(*each) for each in product(self._callers(self._peers()), classes)]
        with self._reopener.patient(timeout_s):
            await self._run(
                *dials, *calls, self._fabric.wait_connected(), timeout_s=timeout_s, describe=self._describe_missing
            )

    # --- one by one ---

    def meet(self, peer: Peer) -> None:
        """Open the connections to a peer, unless that is under way; who cannot be reached is lost."""
        if peer.rank not in self._meeting and not peer.is_ready:
            task = self._meeting[peer.rank] = asyncio.create_task(self._meet(peer))
            peer.tasks.add(task)
            task.add_done_callback(peer.tasks.discard)
            task.add_done_callback(lambda _: self._meeting.pop(peer.rank))

    async def _meet(self, peer: Peer) -> None:
        """Connect to a peer: once its machine answers it may be held up for long, and others see whether it lives."""
        loop, options = asyncio.get_running_loop(), self._options
        began_s = loop.time()
        try:
            check_open_files(self._fabric.rank, num_peers=1, num_classes=options.num_classes)
            async with asyncio.timeout(options.dead_s) as limit:
                await self._meet_by(peer, lambda: limit.reschedule(began_s + max(options.held_s, options.dead_s)))
        except TimeoutError:
            if self._fabric.away_s:  # that time does not count against others
                await self._meet(peer)
                return
            took_s = loop.time() - began_s
            self._fabric.on_broken(peer, f"is lost: it could not be connected to in {took_s:.1f} s", must_tell=False)
        except (HandshakeError, ConfigurationError) as error:
            await asyncio.sleep(NEWS_S)
            self._fabric.on_broken(peer, f"is lost: {error}", must_tell=False)

    async def _meet_by(self, peer: Peer, on_answer: Callable[[], None]) -> None:
        if peer.rank > self._fabric.rank:
            await self._ask_to_dial(peer, on_answer)
            return
        if peer.rests:
            peer.is_waking = True
            self._reopener.wake(peer, _IdleError(), on_answer)
            await self._until_ready(peer)
        while not (peer.is_ready or peer.is_gone):
            all_classes = range(CONTROL_CLASS, peer.options.num_classes)
            classes = [each for each in all_classes if not peer.has_connection(each)]
            dials = [self._dial(self._members[peer.rank], each, on_answer) for each in classes]
            try:
                await _run_all(dials)
            except HandshakeError as error:
                refused = error.__cause__
                if not isinstance(refused, RefusedError) or refused.refusal is not Refusal.CLASSES:
                    raise
                await asyncio.sleep(FIRST_PAUSE_S)  # one of the two has opened further classes, as the other will
            else:
                await self._until_ready(peer)
        self.reach.drop_call(peer.rank, CONTROL_CLASS)

    async def _until_ready(self, peer: Peer) -> None:
        """Wait for its connections, in the end too: what is queued for it is still to be sent."""
        await self._fabric.wait_until(lambda: peer.is_ready or peer.is_gone)

    async def _ask_to_dial(self, peer: Peer, on_answer: Callable[[], None]) -> None:
        """Call a higher rank, which dials then, until it has done so."""
        pause_s = FIRST_PAUSE_S
        while not (peer.is_ready or peer.is_gone):
            try:
                sock = await self.reach.call(peer.rank, CONTROL_CLASS, self._options.handshake_s)
            except ConnectionRefusedError as error:
                raise HandshakeError("nobody listens there any more; its process has ended") from error
            except OSError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            on_answer()
            with sock, contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * self._options.handshake_s):
                    await self._until_ready(peer)

    def _called(self, source: int, connection_class: int) -> None:
        """Dial a rank that calls, or go on with a connection of which it alone knows that it broke."""
        peer = self._fabric.peer(source)
        if not self._fabric.is_sparse:
            self._reopener.called(peer, connection_class)
        elif peer.is_ready or peer.is_gone:
            self.reach.drop_call(source, connection_class)
        else:
            self.meet(peer)

    # --- further classes ---

    @property
    def is_opening(self) -> bool:
        """Whether further classes are being opened."""
        return self._opening.locked()

    async def open_classes(self, priorities: Priorities, *, timeout_s: float, only_check: bool) -> None:
        """Open what was expected, these among them, and mark all; sizes become those of several classes, or of one."""
        async with self._opening:
            if self._failure is not None:
                raise self._failure
            self._expect(priorities)
            if only_check:
                return
            if priorities == Priorities.off():
                self._size_for(replace(self._options, num_classes=1, dscp=None))
                return
            if self._fabric.is_sparse:
                await self._settle(timeout_s)
            first, is_open = self._options.num_classes, self._options == self._expected
            self._options = self._expected
            self._size_for(self._options)
            if is_open:
                return
            self._terms = self._terms._replace(num_classes=self._options.num_classes)
            self.acceptor.use_terms(self._terms)
            self._reopener.use_terms(self._terms)
            self.reach.use_terms(self._terms)
            try:
                connected = [peer for peer in self._peers() if peer.is_ready or not self._fabric.is_sparse]
                await self._open_to_all(connected, range(first, self._options.num_classes), timeout_s)
            except BaseException as error:
                self._failure = error  # some peers may have what others have not: the ranks no longer agree
                raise

    async def _settle(self, timeout_s: float) -> None:
        """Wait until whoever is being met has its connections, as both must see this alike when classes are added."""
        if self.acceptor.handshakes:
            await asyncio.wait(self.acceptor.handshakes, timeout=self._options.handshake_s)
        for peer in self._peers():
            if peer.rests:
                self.meet(peer)
        with contextlib.suppress(TimeoutError):  # who is late then will be missed by name
            async with asyncio.timeout(timeout_s):
                await self._fabric.wait_until(
                    lambda: not any(each.is_half_open or each.rests for each in self._peers())
                )

    def _expect(self, priorities: Priorities) -> None:
        """Check that these classes can be opened, with what is open and what else is expected."""
        before, wanted = self._expected, _with_classes(self._expected, priorities)
        if _has_classes(before, wanted):
            return
        self._check_can_become(wanted)
        num_more = wanted.num_classes - self._options.num_classes - 1  # the control connections are there
        num_peers = sum(peer.is_ready or not self._fabric.is_sparse for peer in self._peers())
        check_open_files(self._fabric.rank, num_peers=num_peers, num_classes=num_more)
        self._expected = wanted

    def _size_for(self, options: FabricOptions) -> None:
        """Size grants and messages by ``options``; connections and marks are those that are open, or about to be."""
        rank, world_size, topology = self._fabric.rank, self._fabric.world_size, self._topology
        fitted = fit_options(options, rank=rank, world_size=world_size, topology=topology)
        self._fabric.resize_grants(fit_window_sizes(options, rank, world_size, topology))
        for peer in self._peers():
            if not peer.is_gone:
                sized = fitted[peer.rank]
                peer.expect(replace(sized, num_classes=self._options.num_classes, dscp=self._options.dscp))

    def _peers(self) -> list[Peer]:
        return [self._fabric.peer(member.rank) for member in self._members if member.rank != self._fabric.rank]

    async def _open_to_all(self, peers: list[Peer], classes: range, timeout_s: float) -> None:
        opening = _describe_classes(self._options)
        for peer in peers:
            peer.send_frame(FrameType.OPEN, payload=opening.encode())
        silent = {peer.rank for peer in peers}
        await self._run(
            *(self._open_to(peer, opening, classes, silent) for peer in peers),
            timeout_s=timeout_s,
            describe=lambda: self._describe_unopened(peers, silent, timeout_s),
        )

    async def _open_to(self, peer: Peer, opening: str, classes: range, silent: set[int]) -> None:
        """Agree with one peer, open the connections to it, and wait until it has them too."""
        await self._fabric.wait_for_peer(peer, lambda: bool(peer.opening))
        theirs, peer.opening = peer.opening, ""
        silent.discard(peer.rank)
        if theirs != opening:
            raise ConfigurationError(
                f"All ranks must open the same connection classes, but {self._fabric.describe_peer(self._fabric.rank)} "
                f"asks for {opening} and {peer.name} for {theirs}; give all ranks the same priorities"
            )
        if peer.rank < self._fabric.rank:
            await _run_all(self._dial(self._members[peer.rank], connection_class) for connection_class in classes)
        await _run_all(self._call(*each) for each in product(self._callers([peer]), classes))
        await self._fabric.wait_for_peer(peer, lambda: peer.num_classes == classes.stop)
        peer.send_frame(FrameType.OPENED, tag=classes.stop)
        await self._fabric.wait_for_peer(peer, lambda: peer.num_confirmed == classes.stop)

    async def _run(self, *openings: Coroutine[Any, Any, None], timeout_s: float, describe: Callable[[], str]) -> None:
        """Run all of ``openings``, or raise the first error of one."""
        try:
            async with asyncio.timeout(timeout_s):
                await _run_all(openings)
        except TimeoutError:
            raise HandshakeError(describe()) from None

    def _check_can_become(self, wanted: FabricOptions) -> None:
        before = self._expected
        if wanted.num_classes < before.num_classes or before.dscp not in (
            None,
            (wanted.dscp or ())[: before.num_classes],
        ):
            raise ConfigurationError(
                f"rank {self._fabric.rank} has connections for {_describe_classes(before)} and cannot make them "
                f"{_describe_classes(wanted)}; give all models of a job the same priorities"
            )

    async def _dial(self, member: Member, connection_class: int, on_answer: Callable[[], None] | None = None) -> None:
        """Open a connection; ``on_answer`` hears that the machine answers, of a peer that has listened before."""

        async def open_socket(connect_s: float | None) -> socket.socket:
            sock = await self.reach.open(member.rank, connection_class, connect_s)
            if on_answer is not None:
                on_answer()
            return sock

        async with self._places:
            admission, sock = await dial(
                self._terms,
                self._options,
                peer=member.rank,
                peer_name=self._fabric.describe_peer(member.rank),
                address=(member.address, member.port),
                connection_class=connection_class,
                open_socket=open_socket,
                has_listened=on_answer is not None,
            )
        self._attach(admission, sock)

    def _callers(self, peers: list[Peer]) -> list[Peer]:
        return [peer for peer in peers if self.reach.calls(peer.rank)]

    async def _call(self, peer: Peer, connection_class: int) -> None:
        """Connect to where ``peer``, which cannot dial this rank, begins the handshake, until it has done so."""
        pause_s = FIRST_PAUSE_S
        while not peer.has_connection(connection_class):
            try:
                sock = await self.reach.call(peer.rank, connection_class)
            except OSError:  # not there yet, or the network dropped it
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                await asyncio.wait([self.acceptor.greet(sock, self._members[peer.rank].address)])

    def _accept(self, admission: Admission, sock: socket.socket) -> None:
        if admission.resumption is None:
            self._attach(admission, sock)
        else:
            peer = self._fabric.peer(admission.rank)
            self._reopener.accept(peer, admission.connection_class, admission.resumption, sock)

    def _attach(self, admission: Admission, sock: socket.socket) -> None:
        peer, connection_class = self._fabric.peer(admission.rank), admission.connection_class
        if peer.has_connection(connection_class):
            sock.close()  # the peer was lost meanwhile
            return
        try:
            prepare_connected(sock, connection_class, peer.options)
        except OSError:
            sock.close()  # it broke meanwhile, and the deadline names the peer
            return
        self._reopener.opened(admission)
        peer.attach(connection_class, sock, admission.frame_keys)

    def _describe_missing(self) -> str:
        fabric, acceptor = self._fabric, self.acceptor
        missing = ", ".join(fabric.describe_peer(peer) for peer in fabric.missing_peers)
        refused = f"; {acceptor.num_refused} were refused ({acceptor.last_refusal})" if acceptor.num_refused else ""
        remedy = (
            acceptor.last_remedy or f"check that these processes run, and that {what_passes_firewalls(self._options)}"
        )
        return (
            f"rank {fabric.rank} is not connected to {missing} after {self._options.connect_s:.0f} s{refused}; {remedy}"
        )

    def _describe_unopened(self, peers: list[Peer], silent: set[int], timeout_s: float) -> str:
        late = [peer for peer in peers if peer.num_confirmed < self._options.num_classes]
        reasons = (
            f"{peer.name} {'did not ask for them' if peer.rank in silent else 'has not all connections'}"
            for peer in late
        )
        return (
            f"rank {self._fabric.rank} cannot open {_describe_classes(self._options)} within {timeout_s:g} s: "
            f"{'; '.join(reasons)}; check that all ranks make the same calls in the same order, and that "
            f"{what_passes_firewalls(self._options)}"
        )


async def _run_all(openings: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of ``openings``, or raise the first error of one."""
    try:
        async with asyncio.TaskGroup() as group:
            for opening in openings:
                group.create_task(opening)
    except BaseExceptionGroup as group_error:
        error: BaseException = group_error
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__


def _num_peers(world_size: int, options: FabricOptions) -> int:
    """Return to how many others a rank is connected from the start."""
    if world_size <= options.most_connected:
        return world_size - 1
    from syncline.fabric.gossip import distances  # few ranks need none

    return len(distances(world_size))


def _terms_of(fabric: TcpFabric, generation: Generation, options: FabricOptions) -> Terms:
    return Terms(
        rank=fabric.rank,
        world_size=fabric.world_size,
        job_id=options.job_id,
        epoch=generation.epoch,
        key=derive_key(options.secret or generation.job_nonce, job_id=options.job_id),
        num_classes=options.num_classes,
        authenticates_frames=bool(options.authenticate_frames),  # decided by now
    )


def what_passes_firewalls(options: FabricOptions) -> str:
    """Say what ranks need of a firewall."""
    first, last = options.ports or (0, 0)
    where = "any port" if not last else f"port {first}" if first == last else f"ports {first} to {last}"
    return f"a firewall lets the hosts connect to each other on {where}"


def _with_classes(options: FabricOptions, priorities: Priorities) -> FabricOptions:
    """Return the options with the connections and the marks that ``priorities`` ask for."""
    return replace(options, num_classes=priorities.num_classes, dscp=priorities.dscp)


def _has_classes(options: FabricOptions, wanted: FabricOptions) -> bool:
    """Whether there are as many classes as are wanted, with the marks that are wanted, if any are."""
    marks = (options.dscp or ())[: wanted.num_classes]
    return wanted.num_classes <= options.num_classes and wanted.dscp in (None, marks)


def _describe_classes(options: FabricOptions) -> str:
    """Say which classes these are; equal texts mean equal classes."""
    marks = "unmarked" if options.dscp is None else f"DSCP {' '.join(map(str, options.dscp))}"
    return f"{options.num_classes} connection classes ({marks})"
