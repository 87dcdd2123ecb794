"""A proxy between two ranks that changes one bit, as a bad switch would: TCP's own checksum is right again."""

import asyncio
import contextlib


class BitFlippingProxy:
    """Relays every connection to a port; flips one bit of the byte at ``place`` of what the dialer sends.

    Only connections that send so much have such a byte; ``num_flips`` of them are changed.
    """

    def __init__(self, place, num_flips):
        self.place = place
        self.num_flips = num_flips
        self.num_flipped = 0
        self._tasks = []

    async def listen(self):
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def _relay(self, reader, writer):
        self._tasks.append(asyncio.current_task())
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.target)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, other_writer, self.place), self._copy(other_reader, writer, None))

    async def _copy(self, reader, writer, place):
        position = 0
        try:
            while data := bytearray(await reader.read(1 << 16)):
                is_here = place is not None and position <= place < position + len(data)
                if is_here and self.num_flipped < self.num_flips:
                    data[place - position] ^= 4
                    self.num_flipped += 1
                position += len(data)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def close(self):
        self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
