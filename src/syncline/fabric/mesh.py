"""Opening the TCP fabric: meet, listen, dial, and have every connection or a clear error by the deadline."""

from __future__ import annotations

import asyncio
import socket
from itertools import product

from syncline.errors import HandshakeError
from syncline.fabric.acceptor import MAX_UNAUTHENTICATED, Acceptor
from syncline.fabric.dialling import dial
from syncline.fabric.fitting import build_scheduler, fit_options
from syncline.fabric.frames import CONTROL_CLASS
from syncline.fabric.handshake import Terms, derive_key
from syncline.fabric.options import FabricOptions
from syncline.fabric.rendezvous import Generation, Member, Rendezvous
from syncline.fabric.sockets import open_listening_socket, prepare_connected, resolve_address
from syncline.fabric.tcp import TcpFabric, TraceSink
from syncline.topology.topology import Topology


async def connect_tcp(
    options: FabricOptions,
    *,
    rank: int,
    world_size: int,
    rendezvous: Rendezvous,
    topology: Topology | None = None,
    trace: TraceSink | None = None,
) -> TcpFabric:
    """Open the TCP fabric of ``rank`` on the running loop; it is connected to all peers when this returns.

    Raises ``ConfigurationError`` (address, exposure without a secret), ``RendezvousError`` (who did not come),
    ``HandshakeError`` (who refused and why, or did not connect in time), ``PeerLostError`` (who died meanwhile).
    """
    address = resolve_address(options.address)
    options.check_exposure(address)
    listening = open_listening_socket(address, options)
    try:
        member = Member(
            rank=rank,
            host=topology.host_of(rank).name if topology else socket.gethostname(),
            address=address,
            port=listening.getsockname()[1],
        )
        generation = await rendezvous.meet(member, world_size=world_size, timeout_s=options.connect_s)
        fabric = TcpFabric(
            rank=rank,
            hosts=[other.host for other in generation.members],
            options=options,
            peer_options=fit_options(options, rank=rank, world_size=world_size, topology=topology),
            scheduler=build_scheduler(options, rank=rank, world_size=world_size, topology=topology),
            trace=trace,
        )
    except BaseException:
        listening.close()
        raise
    opening = _Opening(fabric, listening, generation, options)
    try:
        await opening.connect()
    except BaseException:
        fabric.abort()
        raise
    return fabric


class _Opening:
    """The connections of one fabric while they are being opened: dialled to lower ranks, accepted from higher ones."""

    def __init__(
        self, fabric: TcpFabric, listening: socket.socket, generation: Generation, options: FabricOptions
    ) -> None:
        self._fabric = fabric
        self._options = options
        self._members = generation.members
        self._own_address = listening.getsockname()[0]
        self._places = asyncio.Semaphore(MAX_UNAUTHENTICATED // 2)
        self._terms = Terms(
            rank=fabric.rank,
            world_size=fabric.world_size,
            job_id=options.job_id,
            epoch=generation.epoch,
            key=derive_key(options.secret or generation.job_nonce, job_id=options.job_id),
            num_classes=options.num_classes,
        )
        self._acceptor = Acceptor(
            listening,
            self._terms,
            handshake_s=options.handshake_s,
            is_taken=lambda peer, connection_class: fabric.peer(peer).has_connection(connection_class),
            on_connection=self._attach,
        )
        fabric.use_acceptor(self._acceptor)

    async def connect(self) -> None:
        """Wait until every connection is there; raise a clear error if not."""
        classes = range(CONTROL_CLASS, self._options.num_classes)
        try:
            async with asyncio.timeout(self._options.connect_s), asyncio.TaskGroup() as group:
                for member, connection_class in product(self._members[: self._fabric.rank], classes):
                    group.create_task(self._dial(member, connection_class))
                group.create_task(self._fabric.wait_connected())
        except TimeoutError:
            raise HandshakeError(self._describe_missing()) from None
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    async def _dial(self, member: Member, connection_class: int) -> None:
        async with self._places:
            sock = await dial(
                self._terms,
                self._options,
                own_address=self._own_address,
                peer=member.rank,
                peer_name=self._fabric.describe_peer(member.rank),
                address=(member.address, member.port),
                connection_class=connection_class,
            )
        self._attach(member.rank, connection_class, sock)

    def _attach(self, peer: int, connection_class: int, sock: socket.socket) -> None:
        state = self._fabric.peer(peer)
        if state.has_connection(connection_class):
            sock.close()  # the peer was lost meanwhile
            return
        try:
            prepare_connected(sock, connection_class, state.options)
        except OSError:
            sock.close()  # it broke meanwhile, and the deadline names the peer
            return
        state.attach(connection_class, sock)

    def _describe_missing(self) -> str:
        fabric, acceptor = self._fabric, self._acceptor
        missing = ", ".join(fabric.describe_peer(peer) for peer in fabric.missing_peers)
        refused = f"; {acceptor.num_refused} were refused ({acceptor.last_refusal})" if acceptor.num_refused else ""
        return (
            f"rank {fabric.rank} is not connected to {missing} after {self._options.connect_s:.0f} s{refused}; check "
            "that these processes run, and that a firewall lets the hosts connect to each other on any port"
        )
