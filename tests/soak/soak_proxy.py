"""A proxy before one rank's port: it relays every connection, and on order changes a bit, or closes within a frame.

TCP's own checksum is right again, as behind a bad switch. It is ordered about through a datagram socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
from typing import Any

CHUNK_BYTES = 1 << 16
LEAST_BYTES = 2048
"""Only reads of at least so much are struck: heartbeats are not what training moves."""


def tell_proxy(control: str, **order: Any) -> None:
    """Order the proxy about."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(json.dumps(order).encode(), control)


class Proxy:
    """What it is ordered to do, and to whom it relays."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._pipe = os.open(config["events"], os.O_WRONLY)
        self._choose = random.Random(config["seed"])
        self._orders: list[str] = []
        self._target: tuple[str, int] | None = None
        self._has_target = asyncio.Event()

    async def serve(self) -> None:
        """Relay until it is killed."""
        control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        control.setblocking(False)
        control.bind(self._config["control"])
        asyncio.get_running_loop().add_reader(control, self._obey, control)
        server = await asyncio.start_server(self._relay, self._config["address"], 0)
        self._tell(event="proxy", port=server.sockets[0].getsockname()[1])
        await server.serve_forever()

    def _tell(self, **event: Any) -> None:
        os.write(self._pipe, (json.dumps({"rank": self._config["rank"], "at_s": 0.0, **event}) + "\n").encode())

    def _obey(self, control: socket.socket) -> None:
        order = json.loads(control.recv(4096))
        if "target" in order:
            self._target = (order["target"][0], order["target"][1])
            self._has_target.set()
        else:
            self._orders.append(order["strike"])

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._has_target.wait()
        assert self._target is not None
        dialler = writer.get_extra_info("peername")[0]
        with contextlib.suppress(OSError):
            others = await asyncio.open_connection(*self._target)
            ways = (self._copy(reader, others[1], dialler), self._copy(others[0], writer, dialler))
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # a relay has no half-closed connections
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            others[1].close()
        writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, dialler: str) -> None:
        while data := bytearray(await reader.read(CHUNK_BYTES)):
            if self._orders and len(data) >= LEAST_BYTES:
                strike = self._orders.pop(0)
                self._tell(event="struck", kind=strike, dialler=dialler)
                if strike == "closed-in-a-frame":
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    return
                data[self._choose.randrange(len(data))] ^= 1 << self._choose.randrange(8)
            writer.write(data)
            await writer.drain()


def main(config: dict[str, Any]) -> None:
    """Be a proxy; it ends when it is killed."""
    asyncio.run(Proxy(config).serve())
