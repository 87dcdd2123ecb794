"""A connection between a newcomer, or a member, and the member that it asks: messages in JSON, all authenticated.

It opens with the fabric's own handshake, so the same secret, job and version are asked for, with the same refusals;
without a secret, which an insecure job alone may lack, anyone can ask. Every message carries a code over its number and
its bytes, keyed by the handshake. Everything here is called on one asyncio loop.

::

    length (4 bytes, little endian)    HMAC-SHA-256 over number and text (32 bytes)    text: one JSON object
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import struct
from typing import Any

from syncline.endpoints import format_endpoint
from syncline.errors import HandshakeError
from syncline.fabric import FabricOptions
from syncline.fabric.dialling import FIRST_PAUSE_S, LONGEST_PAUSE_S, connect_to, dial_once
from syncline.fabric.handshake import REASONS, Dialer, FrameKeys, Refusal, RefusedError, Terms, derive_key
from syncline.fabric.sockets import prepare_connected
from syncline.members.job_record import Address

MAX_MESSAGE_BYTES = 4 << 20
"""A topology of a thousand hosts has some hundred KiB."""
_LENGTH = struct.Struct("<I")
_MAC_BYTES = 32
_MEMBER, _ASKER = 0, 1
_ANY_EPOCH = 1
"""Who asks knows no epoch yet: the answer tells it."""

Message = dict[str, Any]


class JoinConnection:
    """One end of an open connection; ``receive`` raises ``EOFError`` when the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: FrameKeys) -> None:
        self._reader, self._writer, self._keys = reader, writer, keys
        self._num_sent = self._num_received = 0
        writer.transport.set_write_buffer_limits(0)  # what was sent is with the kernel, and the socket may be closed

    @classmethod
    async def over(cls, sock: socket.socket, keys: FrameKeys | None) -> JoinConnection:
        """Go on with a socket on which the handshake is over, and which is this one's to close."""
        assert keys is not None, "these handshakes always ask for keys"
        return cls(*await asyncio.open_connection(sock=sock), keys)

    async def send(self, kind: str, **fields: object) -> None:
        """Send a message; one to an end that is gone is dropped, and ``receive`` tells of it."""
        text = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
        self._writer.write(_LENGTH.pack(len(text)) + _code(self._keys.sending, self._num_sent, text) + text)
        self._num_sent += 1
        try:
            await self._writer.drain()
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the socket, and let who receives on it find its end; a second call does nothing."""
        self._writer.transport.abort()

    async def receive(self) -> Message:
        """Return the next message: a JSON object with a text ``kind``."""
        try:
            (num_bytes,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if num_bytes > MAX_MESSAGE_BYTES:
                raise EOFError
            code = await self._reader.readexactly(_MAC_BYTES)
            text = await self._reader.readexactly(num_bytes)
        except OSError as error:
            raise EOFError from error
        if not hmac.compare_digest(code, _code(self._keys.receiving, self._num_received, text)):
            raise EOFError
        self._num_received += 1
        return _parse(text)


def join_terms(options: FabricOptions, *, is_member: bool) -> Terms:
    """Return what a side brings to the handshake of such a connection."""
    return Terms(
        rank=_MEMBER if is_member else _ASKER,
        world_size=2,
        job_id=options.job_id,
        epoch=_ANY_EPOCH,
        key=derive_key(options.secret or b"", job_id=f"{options.job_id}/join"),
        num_classes=1,
        authenticates_frames=True,
    )


async def dial_member(
    addresses: list[Address], options: FabricOptions, *, own_address: str, timeout_s: float, is_once: bool = False
) -> JoinConnection:
    """Connect to the first of ``addresses`` that answers, and try until the deadline; or each one ``is_once``.

    Raises ``HandshakeError`` at once where a member refuses, else at the deadline, with who did not answer; EOFError
    where none of those that were asked once has answered.
    """
    reasons: list[str] = []
    try:
        async with asyncio.timeout(timeout_s):
            return await _dial_until_one_answers(addresses, options, own_address, reasons, is_once=is_once)
    except TimeoutError:
        where = ", ".join(format_endpoint(*address) for address in addresses)
        reason = reasons[-1] if reasons else f"no answer within {timeout_s:g} s"
        raise HandshakeError(
            f"No member of the job answers at {where} within {timeout_s:g} s ({reason}); give join= the "
            "fleet.join_address of a rank that runs, and check that its job calls distribute(..., elastic=True), or "
            "reconfigure()"
        ) from None


async def _dial_until_one_answers(
    addresses: list[Address], options: FabricOptions, own_address: str, reasons: list[str], *, is_once: bool
) -> JoinConnection:
    """Dial one after the other, again and again; ``reasons`` are why not."""
    pause_s = FIRST_PAUSE_S
    while True:
        for address in addresses:
            try:
                return await _dial(address, options, own_address)
            except (OSError, EOFError) as error:  # TimeoutError is an OSError
                reasons.append(_describe(error, options.handshake_s))
        if is_once:
            raise EOFError
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _dial(address: Address, options: FabricOptions, own_address: str) -> JoinConnection:
    dialer = Dialer(join_terms(options, is_member=False), peer=_MEMBER, connection_class=0)
    try:
        async with asyncio.timeout(options.handshake_s):
            sock, _ = await dial_once(
                dialer, lambda limit_s: connect_to(address, own_address, options, connect_s=limit_s)
            )
    except RefusedError as refused:
        raise HandshakeError(
            f"The member at {format_endpoint(*address)} refuses this process: {_reason(refused.refusal)}"
        ) from refused
    prepare_connected(sock, 0, options)
    return await JoinConnection.over(sock, dialer.frame_keys)


def _reason(refusal: Refusal) -> str:
    if refusal in (Refusal.EPOCH, Refusal.FRAMES, Refusal.CLASSES, Refusal.RANK):
        return "it is a rank's own port, where only ranks connect; give join= the fleet.join_address of a rank"
    return REASONS[refusal]


def _describe(error: BaseException, handshake_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {handshake_s:g} s"
    return "the connection was closed" if isinstance(error, EOFError) else str(error)


def _code(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + text, "sha256")


def _parse(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except ValueError as error:
        raise EOFError from error
    if isinstance(message, dict) and isinstance(message.get("kind"), str):
        return message
    raise EOFError
