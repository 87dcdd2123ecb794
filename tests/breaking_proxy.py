"""A proxy between two ranks that breaks connections as networks do: resets, ends and changed bits, in mid-frame."""

import asyncio
import contextlib
import random
import socket
import struct

BREAKS = ("reset", "end", "flip")


def reset(sock):
    """Close a socket so that its other end sees a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class _ResetError(Exception):
    """Both sides of a connection are to see a reset."""


class BreakingProxy:
    """Relays every connection to ``target``, and breaks one after each ``between_bytes`` or so, ``num_breaks`` times.

    What is done, and where, comes from the seed; the handshakes, of some 300 bytes each, are broken too.
    """

    def __init__(self, seed, *, kinds=BREAKS, num_breaks, between_bytes):
        self._random = random.Random(seed)
        self._kinds = kinds
        self.num_left = num_breaks
        self._between_bytes = between_bytes
        self._rest = self._next()
        self._tasks = set()
        self._held = []
        self.num_done = 0
        self.is_open = True
        """Whether new connections are relayed; else they are reset."""
        self.is_deaf = False
        """Whether new connections are accepted and not relayed."""
        self.swallows_ends = False
        """Whether the end of a connection that one side has closed is kept from the other."""
        self.most_bytes = float("inf")
        """What each connection moves in one direction, before it is reset."""

    def _next(self):
        return self._random.randrange(1, 2 * self._between_bytes)

    async def listen(self):
        """Begin; return the port."""
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())
        return self._listening.getsockname()[1]

    async def close(self):
        """End all that is relayed."""
        self._accepting.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._accepting, *self._tasks, return_exceptions=True)
        for sock in (*self._held, self._listening):
            sock.close()

    async def _accept(self):
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listening)
            if not self.is_open:
                reset(sock)
                continue
            if self.is_deaf:
                self._held.append(sock)
                continue
            task = asyncio.create_task(self._relay(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _, sock=sock: sock.close())  # also where it was cancelled before it began

    async def _relay(self, near):
        far = socket.socket()
        far.setblocking(False)
        near.setblocking(False)
        try:
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_connect(far, ("127.0.0.1", self.target))
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._copy(near, far))
                    group.create_task(self._copy(far, near))
        except* _ResetError:
            for sock in (near, far):  # now that nobody waits for them
                reset(sock)
        except* OSError:
            pass
        finally:
            for sock in (near, far):
                sock.close()

    async def _copy(self, source, sink):
        loop, num_bytes = asyncio.get_running_loop(), 0
        while data := bytearray(await loop.sock_recv(source, 1 << 16)):
            num_bytes += len(data)
            if num_bytes > self.most_bytes:
                raise _ResetError
            if len(data) < self._rest or not self.num_left:
                self._rest -= min(len(data), self._rest)
                await loop.sock_sendall(sink, data)
                continue
            place, self._rest = self._rest - 1, self._next()
            await self._break(data, place, source, sink)
        if self.swallows_ends:
            await asyncio.Event().wait()
        sink.shutdown(socket.SHUT_WR)

    async def _break(self, data, place, source, sink):
        """Do something at one byte."""
        loop = asyncio.get_running_loop()
        kind = self._random.choice(self._kinds)
        self.num_left -= 1
        self.num_done += 1
        if kind == "flip":
            data[place] ^= 1 << self._random.randrange(8)
            await loop.sock_sendall(sink, data)
            return
        await loop.sock_sendall(sink, data[:place])
        raise _ResetError if kind == "reset" else ConnectionAbortedError
