"""Opening connections: the handshake over a socket, from both sides, and dialling until a deadline.

Whoever waits to be dialled again may ask first whether the peer is still there: a *question* is one small message, and
its answer one byte. It says which connection is meant, as the peer's end may not know that it broke: then the peer
dials. Neither is authenticated: who could forge the answer could as well cut all connections.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import struct
from collections.abc import Awaitable, Callable
from itertools import count

from syncline.endpoints import format_endpoint
from syncline.errors import HandshakeError
from syncline.fabric import sockets
from syncline.fabric.handshake import (
    FINISH_BYTES,
    HELLO_BYTES,
    MAGIC,
    REASONS,
    REPLY_BYTES,
    WELCOME_BYTES,
    Admission,
    Dialer,
    Greeter,
    Refusal,
    RefusedError,
    Resume,
    Resumption,
    Terms,
)
from syncline.fabric.options import FabricOptions

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
_QUESTION_MAGIC = b"SYNCASKS"
_QUESTION = struct.Struct("<8s32sQIIhI16s")
_YES, _NO = b"Y", b"N"
CALL_MAGIC, CALL_BYTES = b"SYNCCALL", 110
"""A call (:mod:`syncline.fabric.reach`): whoever sends it wants the other side to begin the handshake."""
ADDRESSED_BYTES = 60
_ADDRESSED = {
    MAGIC: struct.Struct("<12x32sQ4xI"),
    _QUESTION_MAGIC: struct.Struct("<8x32sQ4xI"),
    CALL_MAGIC: struct.Struct("<8x32sQ4xI"),
}
"""Where the first message on a connection says whom it is for."""


class AskedError(Exception):
    """The other side only asked whether this rank is still connected to it, and was answered."""


class CalledError(Exception):
    """The other side waits for a handshake that somebody begins here: ``message`` says who and with whom."""

    def __init__(self, message: bytes) -> None:
        super().__init__()
        self.message = message


Open = Callable[[float | None], Awaitable[socket.socket]]
"""Return a connected socket, within so many seconds if not None."""

Holds = Callable[[int, int, Resumption], bool]
"""Whether a rank that asks for a connection class is still connected; the number is of the last attempt known there."""


def addressee(message: bytes) -> tuple[bytes, int, int] | None:
    """Return the job, the start and the rank that a message of at least ``ADDRESSED_BYTES`` is for; None of others."""
    fields = _ADDRESSED.get(message[: len(MAGIC)])
    return None if fields is None else fields.unpack_from(message)


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


async def greet(
    sock: socket.socket,
    terms: Terms,
    is_taken: Callable[[int, int], bool],
    resume: Resume = lambda *_: None,
    holds: Holds = lambda *_: False,
) -> Admission:
    """Shake hands on an accepted socket; return who the dialer is.

    ``holds`` answers what is asked here; :class:`AskedError` if that was all. :class:`CalledError` if it is called.
    """
    loop = asyncio.get_running_loop()
    greeter = Greeter(terms, is_taken=is_taken, resume=resume)
    try:
        magic = await read_exactly(sock, len(MAGIC))
        if magic == _QUESTION_MAGIC:
            question = magic + await read_exactly(sock, _QUESTION.size - len(MAGIC))
            await loop.sock_sendall(sock, _answer(question, terms, holds))
            raise AskedError
        if magic == CALL_MAGIC:
            raise CalledError(magic + await read_exactly(sock, CALL_BYTES - len(CALL_MAGIC)))
        await loop.sock_sendall(sock, greeter.reply(await _read_hello(sock, magic)))
        admission = greeter.finish(await read_exactly(sock, FINISH_BYTES))
    except RefusedError as refused:
        if refused.answer:
            await loop.sock_sendall(sock, refused.answer)
        raise
    await loop.sock_sendall(sock, greeter.welcome)
    return admission


def _answer(question: bytes, terms: Terms, holds: Holds) -> bytes:
    _, job, epoch, source, target, connection_class, number, connection_id = _QUESTION.unpack(question)
    resumption = Resumption(number, connection_id, 0)
    is_ours = hmac.compare_digest(job, terms.job) and (epoch, target) == (terms.epoch, terms.rank)
    is_peer = source < terms.world_size and source != terms.rank
    return _YES if is_ours and is_peer and holds(source, connection_class, resumption) else _NO


def make_question(terms: Terms, peer: int, connection_class: int, resumption: Resumption) -> bytes:
    """Return the question whether ``peer`` is still connected to this rank; ``resumption`` is what is known here."""
    about = (connection_class, resumption.number, resumption.connection_id)
    return _QUESTION.pack(_QUESTION_MAGIC, terms.job, terms.epoch, terms.rank, peer, *about)


async def connect_to(
    address: tuple[str, int], own_address: str, options: FabricOptions, *, connect_s: float | None = None
) -> socket.socket:
    """Return a socket from ``own_address`` that is connected to ``address``; OSError if not within ``connect_s``."""
    sock = sockets.open_socket(own_address, options)
    try:
        sock.bind((own_address, 0))
        async with asyncio.timeout(connect_s):
            await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def ask(
    options: FabricOptions, own_address: str, question: bytes, address: tuple[str, int], *, connect_s: float
) -> bool:
    """Return the answer of whoever listens at ``address``; OSError, EOFError if nobody answers.

    As in :func:`dial_once`, a live machine lets connect within ``connect_s``.
    """
    loop = asyncio.get_running_loop()
    with await connect_to(address, own_address, options, connect_s=connect_s) as sock:
        await loop.sock_sendall(sock, question)
        return await read_exactly(sock, len(_YES)) == _YES


async def _read_hello(sock: socket.socket, magic: bytes) -> bytes:
    """Read a hello; whoever does not begin with our magic is refused at once, not at the deadline."""
    if magic != MAGIC:
        raise RefusedError(Refusal.GARBAGE)
    return magic + await read_exactly(sock, HELLO_BYTES - len(MAGIC))


async def dial(
    terms: Terms,
    options: FabricOptions,
    *,
    peer: int,
    peer_name: str,
    address: tuple[str, int],
    connection_class: int,
    open_socket: Open,
    has_listened: bool = False,
) -> tuple[Admission, socket.socket]:
    """Connect to ``peer`` and shake hands; try again until cancelled, unless the peer says why it refuses.

    ``open_socket`` connects, and errors name the ``address``.

    It listens before it meets the others: if nobody listens there for as long as a handshake may take, or any more
    where it ``has_listened``, it is gone. One that has may refuse once in vain: a bit may have been changed.
    A peer that is only busy, as one of many that start on a few cores, answers in its turn: a try has twice the time of
    a handshake, and each one twice as long as the one before. After a try that may have been let in, for all that is
    known here, the next one asks to go on with it; where the peer does not know it, or knows it only then, the one
    after that begins anew, or asks again.
    """
    pause_s, try_s, began_s = FIRST_PAUSE_S, options.handshake_s, asyncio.get_running_loop().time()
    unsure: Dialer | None = None
    goes_on, can_err = False, has_listened
    for number in count(1):
        resumption = Resumption(number, unsure.connection_id, 0) if unsure is not None and goes_on else None
        dialer = Dialer(terms, peer=peer, connection_class=connection_class, resumption=resumption)
        try_s *= 2
        try:
            async with asyncio.timeout(try_s):
                sock, _ = await dial_once(dialer, open_socket)
            first = unsure if unsure is not None and goes_on else dialer
            return Admission(peer, connection_class, first.frame_keys, first.connection_id, resumption), sock
        except RefusedError as refused:
            if unsure is not None and refused.refusal is (Refusal.GONE if goes_on else Refusal.DUPLICATE):
                goes_on = not goes_on
            elif can_err and refused.refusal is not Refusal.CLASSES:
                can_err = False
                was_let_in = resumption is None and dialer.connection_id  # for all that is known here
                unsure, goes_on = (dialer, True) if was_let_in else (unsure, goes_on)
            else:
                ends = f"rank {terms.rank} and {peer_name} at {format_endpoint(*address)}"
                raise HandshakeError(f"{ends} cannot connect: {REASONS[refused.refusal]}") from refused
        except (OSError, EOFError) as error:
            waited_s = asyncio.get_running_loop().time() - began_s
            if isinstance(error, ConnectionRefusedError) and (has_listened or waited_s >= options.handshake_s):
                seen = "listens there any more" if has_listened else f"has listened there for {waited_s:.0f} s"
                is_near = ipaddress.ip_address(address[0]).is_loopback
                far = "it is on another machine: set SYNCLINE_INTERFACE there"
                raise HandshakeError(
                    f"rank {terms.rank} cannot connect to {peer_name} at {format_endpoint(*address)}: nobody {seen}; "
                    f"its process has ended, or {far if is_near else 'a firewall rejects connections'}"
                ) from error
            # Not there yet, too busy, or the network dropped it; TimeoutError is an OSError.
            if resumption is None and dialer.connection_id:  # its last message was made, and may have arrived
                unsure, goes_on = dialer, True
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise AssertionError("it tries until it is cancelled")


async def dial_once(dialer: Dialer, open_socket: Open, *, connect_s: float | None = None) -> tuple[socket.socket, int]:
    """Connect and shake hands, once; return how much has arrived at the peer of what was sent on this connection.

    A live machine lets connect within ``connect_s``, also for a process that is busy. Raises RefusedError, OSError or
    EOFError.
    """
    loop = asyncio.get_running_loop()
    sock = await open_socket(connect_s)
    try:
        await loop.sock_sendall(sock, dialer.hello)
        try:
            finish = dialer.finish(await read_exactly(sock, REPLY_BYTES))
        except RefusedError as refused:
            if refused.answer:
                await loop.sock_sendall(sock, refused.answer)
            raise
        await loop.sock_sendall(sock, finish)
        return sock, dialer.enter(await read_exactly(sock, WELCOME_BYTES))
    except BaseException:
        sock.close()
        raise
