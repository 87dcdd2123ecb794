"""Opening connections: the handshake over a socket, from both sides, and dialling until a deadline."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from syncline.endpoints import format_endpoint
from syncline.errors import HandshakeError
from syncline.fabric.frame_checks import FrameKeys
from syncline.fabric.handshake import (
    FINISH_BYTES,
    HELLO_BYTES,
    MAGIC,
    REASONS,
    REPLY_BYTES,
    Admission,
    Dialer,
    Greeter,
    Refusal,
    RefusedError,
    Terms,
)
from syncline.fabric.options import FabricOptions
from syncline.fabric.sockets import open_dialling_socket

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


async def read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Read ``num_bytes`` and not one more: frames may follow at once."""
    loop = asyncio.get_running_loop()
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    while view:
        received = await loop.sock_recv_into(sock, view)
        if not received:
            raise EOFError
        view = view[received:]
    return bytes(buffer)


async def greet(sock: socket.socket, terms: Terms, is_taken: Callable[[int, int], bool]) -> Admission:
    """Shake hands on an accepted socket; return who the dialer is."""
    loop = asyncio.get_running_loop()
    greeter = Greeter(terms, is_taken=is_taken)
    try:
        await loop.sock_sendall(sock, greeter.reply(await _read_hello(sock)))
        return greeter.finish(await read_exactly(sock, FINISH_BYTES))
    except RefusedError as refused:
        if refused.answer:
            await loop.sock_sendall(sock, refused.answer)
        raise


async def _read_hello(sock: socket.socket) -> bytes:
    """Read a hello; whoever does not begin with our magic is refused at once, not at the deadline."""
    magic = await read_exactly(sock, len(MAGIC))
    if magic != MAGIC:
        raise RefusedError(Refusal.GARBAGE)
    return magic + await read_exactly(sock, HELLO_BYTES - len(MAGIC))


async def dial(
    terms: Terms,
    options: FabricOptions,
    *,
    own_address: str,
    peer: int,
    peer_name: str,
    address: tuple[str, int],
    connection_class: int,
) -> tuple[socket.socket, FrameKeys | None]:
    """Connect to ``peer`` and shake hands; try again until cancelled, unless the peer says why it refuses.

    The keys are those of the connection's frames, if they are authenticated.

    It listens before it meets the others: if nobody listens there for as long as a handshake may take, it is gone.
    """
    pause_s, began_s = FIRST_PAUSE_S, asyncio.get_running_loop().time()
    while True:
        try:
            async with asyncio.timeout(options.handshake_s):
                return await dial_once(
                    options, own_address, Dialer(terms, peer=peer, connection_class=connection_class), address
                )
        except RefusedError as refused:
            raise HandshakeError(
                f"rank {terms.rank} and {peer_name} at {format_endpoint(*address)} cannot connect: "
                f"{REASONS[refused.refusal]}"
            ) from refused
        except (OSError, EOFError) as error:
            waited_s = asyncio.get_running_loop().time() - began_s
            if isinstance(error, ConnectionRefusedError) and waited_s >= options.handshake_s:
                raise HandshakeError(
                    f"rank {terms.rank} cannot connect to {peer_name} at {format_endpoint(*address)}: nobody has "
                    f"listened there for {waited_s:.0f} s; its process has ended, or a firewall rejects connections"
                ) from error
            # Not there yet, too busy, or the network dropped it; TimeoutError is an OSError.
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def dial_once(
    options: FabricOptions, own_address: str, dialer: Dialer, address: tuple[str, int]
) -> tuple[socket.socket, FrameKeys | None]:
    """Connect and shake hands, once; the keys are those of the frames, if they are authenticated."""
    loop = asyncio.get_running_loop()
    sock = open_dialling_socket(own_address, options)
    try:
        await loop.sock_connect(sock, address)
        await loop.sock_sendall(sock, dialer.hello())
        try:
            finish = dialer.finish(await read_exactly(sock, REPLY_BYTES))
        except RefusedError as refused:
            if refused.answer:
                await loop.sock_sendall(sock, refused.answer)
            raise
        await loop.sock_sendall(sock, finish)
    except BaseException:
        sock.close()
        raise
    return sock, dialer.frame_keys
