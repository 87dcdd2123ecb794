"""Opening the TCP fabric: meet, listen, dial, and have every connection or a clear error by the deadline."""

from __future__ import annotations

import asyncio
import socket

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
    ``HandshakeError`` (who refused and why, or did not connect in time).
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
    try:
        await _connect(fabric, listening, generation, options)
    except BaseException:
        fabric.abort()
        raise
    return fabric


async def _connect(fabric: TcpFabric, listening: socket.socket, generation: Generation, options: FabricOptions) -> None:
    terms = Terms(
        rank=fabric.rank,
        world_size=fabric.world_size,
        job_id=options.job_id,
        epoch=generation.epoch,
        key=derive_key(options.secret or generation.job_nonce, job_id=options.job_id),
        num_classes=options.num_classes,
    )

    def attach(peer: int, connection_class: int, sock: socket.socket) -> None:
        if fabric.peer(peer).has_connection(connection_class):
            sock.close()  # the peer was lost meanwhile
            return
        prepare_connected(sock, connection_class, fabric.peer(peer).options)
        fabric.peer(peer).attach(connection_class, sock)

    acceptor = Acceptor(
        listening,
        terms,
        handshake_s=options.handshake_s,
        is_taken=lambda peer, connection_class: fabric.peer(peer).has_connection(connection_class),
        on_connection=attach,
    )
    fabric.use_acceptor(acceptor)
    places = asyncio.Semaphore(MAX_UNAUTHENTICATED // 2)

    async def open_connection(member: Member, connection_class: int) -> None:
        async with places:
            sock = await dial(
                terms,
                options,
                own_address=listening.getsockname()[0],
                peer=member.rank,
                peer_name=fabric.describe_peer(member.rank),
                address=(member.address, member.port),
                connection_class=connection_class,
            )
        attach(member.rank, connection_class, sock)

    try:
        async with asyncio.timeout(options.connect_s), asyncio.TaskGroup() as group:
            for member in generation.members[: fabric.rank]:
                for connection_class in range(CONTROL_CLASS, options.num_classes):
                    group.create_task(open_connection(member, connection_class))
            group.create_task(fabric.wait_connected())
    except TimeoutError:
        missing = ", ".join(fabric.describe_peer(peer) for peer in fabric.missing_peers)
        refused = f"; {acceptor.num_refused} were refused ({acceptor.last_refusal})" if acceptor.num_refused else ""
        raise HandshakeError(
            f"rank {fabric.rank} is not connected to {missing} after {options.connect_s:.0f} s{refused}; check that "
            "these processes run, and that a firewall lets the hosts connect to each other on any port"
        ) from None
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
