"""A network of virtual sockets between virtual hosts: streams with delays, cuts, resets and flipped bits.

A stream keeps its order and loses nothing; while its direction is cut, what is sent waits, as TCP sends it again.
"""

from __future__ import annotations

import errno
import itertools
import socket
import zlib
from collections import deque
from collections.abc import Sequence

from virtual_time import Host, VirtualTime

WINDOW_BYTES = 64 << 10
"""What may be on its way in one direction of a connection, or wait to be read."""
END = b""


class VirtualNetwork:
    """Who listens where, which directions are cut, and how long bytes take."""

    def __init__(self, time: VirtualTime, *, delay_s: float = 0.001, bytes_per_s: float = 50e6) -> None:
        self.time = time
        self.delay_s = delay_s
        self.bytes_per_s = bytes_per_s
        self.listeners: dict[tuple[str, int], VirtualSocket] = {}
        self.connections: list[VirtualSocket] = []
        """The dialling ends, in the order in which they were connected."""
        self.most_bytes = WINDOW_BYTES
        """So much is taken from or given to a process at once, at most; less where that is a fault."""
        self.num_flipped = 0
        self._cuts: dict[tuple[int, int], int] = {}
        self._held: dict[Pipe, None] = {}
        self._descriptors = itertools.count(1 << 20)
        self._ports = itertools.count(20_000)

    def open(self, host: Host) -> VirtualSocket:
        """Return a new socket of ``host``."""
        return VirtualSocket(self, host)

    def cut(self, source: Host, target: Host, for_s: float) -> None:
        """Let nothing pass from one host to another for a while."""
        pair = (source.number, target.number)
        self.time.note(f"cut {pair} for {for_s}")
        self._cuts[pair] = self._cuts.get(pair, 0) + 1
        self.time.after(for_s, self._heal, pair)

    def is_cut(self, source: Host, target: Host) -> bool:
        """Whether nothing passes now."""
        return bool(self._cuts.get((source.number, target.number)))

    def hold(self, pipe: Pipe) -> None:
        """Let a pipe go on when its direction is there again."""
        self._held[pipe] = None

    def kill(self, host: Host, *, says_so: bool = True) -> None:
        """End the process of ``host``; its kernel closes its connections, unless the machine is gone as well."""
        self.time.note(f"host {host.number} dies{'' if says_so else ' with its machine'}")
        host.is_dead = True
        for sock in list(host.watched.values()):
            if says_so and isinstance(sock, VirtualSocket):
                sock.close()

    def token(self) -> int:
        """Return a descriptor that no file has."""
        return next(self._descriptors)

    def free_port(self) -> int:
        """Return a port that nobody has."""
        return next(self._ports)

    def _heal(self, pair: tuple[int, int]) -> None:
        self._cuts[pair] -= 1
        if not self._cuts[pair]:
            self.time.note(f"healed {pair}")
            held, self._held = self._held, {}
            for pipe in held:
                pipe.arrive()


class Pipe:
    """One direction of a connection."""

    def __init__(self, network: VirtualNetwork, source: VirtualSocket, target: VirtualSocket) -> None:
        self.network, self.source, self.target = network, source, target
        self.num_bytes = 0
        """On their way, or not read yet."""
        self.must_flip = False
        self._queue: deque[tuple[float, bytes]] = deque()
        self._due_s = 0.0

    def push(self, data: bytes) -> None:
        """Send ``data``, or the end of the stream."""
        time = self.network.time
        if self.must_flip and data:
            self.must_flip = False
            data = self._flip(data)
        delay_s = self.network.delay_s * time.random.uniform(0.5, 2.0) + len(data) / self.network.bytes_per_s
        self._due_s = max(self._due_s, time.now_s + delay_s)
        self.num_bytes += len(data)
        self._queue.append((self._due_s, data))
        time.at(self._due_s, self.arrive)

    def arrive(self) -> None:
        """Hand over what is due, unless the direction is cut."""
        now_s = self.network.time.now_s
        if self.network.is_cut(self.source.host, self.target.host):
            self.network.hold(self)
            return
        while self._queue and self._queue[0][0] <= now_s:
            self.target.take(self._queue.popleft()[1])

    def _flip(self, data: bytes) -> bytes:
        place = self.network.time.random.randrange(len(data) * 8)
        changed = bytearray(data)
        changed[place // 8] ^= 1 << (place % 8)
        self.network.num_flipped += 1
        self.network.time.note(f"bit {place} of {len(data)} bytes is flipped")
        return bytes(changed)


class VirtualSocket:
    """What the fabric uses of a socket."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM
    proto = 0

    def __init__(self, network: VirtualNetwork, host: Host) -> None:
        self.network, self.host = network, host
        self.pipe: Pipe | None = None
        """What is sent goes there; None before the connection is there."""
        self.peer: VirtualSocket | None = None
        self.address: tuple[str, int] = (host.address, 0)
        self.sent = bytearray()
        """The first bytes that were sent, for whoever plays them again."""
        self.is_listening = self.is_ended = self.is_closed = False
        self._pending: deque[VirtualSocket] = deque()
        self._received = bytearray()
        self._error = 0
        self.wakes_at_bytes = 1
        """It is readable when so much is here."""
        self._descriptor = network.token()
        host.watched[self._descriptor] = self

    def __repr__(self) -> str:
        return f"<VirtualSocket of {self.host}>"

    @property
    def is_readable(self) -> bool:
        is_enough = len(self._received) >= self.wakes_at_bytes
        return bool(is_enough or self.is_ended or self._error or self._pending)

    @property
    def is_writable(self) -> bool:
        return bool(self._error or (self.pipe is not None and self.pipe.num_bytes < WINDOW_BYTES))

    # What the network does.

    def take(self, data: bytes) -> None:
        """Bytes arrive, or the end of the stream."""
        time = self.network.time
        if self.is_closed:
            assert self.peer is not None
            if data and not self.peer.is_closed:
                time.after(self.network.delay_s, self.peer.reset)
            return
        time.note(f"{self.peer and self.peer.host.number}>{self.host.number} {len(data)} {zlib.crc32(data):x}")
        if data:
            self._received += data
        else:
            self.is_ended = True
        self.host.is_touched = True

    def reset(self, number: int = errno.ECONNRESET) -> None:
        """The connection breaks."""
        if not self.is_closed:
            self._error = number
            self.host.is_touched = True

    def _on_syn(self, listener: VirtualSocket | None, dialler: VirtualSocket) -> None:
        """A dialler knocks at this host."""
        network = self.network
        if network.is_cut(dialler.host, self.host) or network.is_cut(self.host, dialler.host):
            network.time.after(1.0, self._on_syn, listener, dialler)  # the kernel tries again
            return
        if dialler.is_closed:
            return
        if listener is None or listener.is_closed or self.host.is_dead:
            network.time.after(network.delay_s, dialler.reset, errno.ECONNREFUSED)
            return
        accepted = VirtualSocket(network, listener.host)
        accepted.address = listener.address
        accepted.peer, dialler.peer = dialler, accepted
        accepted.pipe, dialler.pipe = Pipe(network, accepted, dialler), Pipe(network, dialler, accepted)
        network.connections.append(dialler)
        network.time.note(f"host {dialler.host.number} connects to {listener.host.number}")
        listener._pending.append(accepted)
        listener.host.is_touched = dialler.host.is_touched = True

    # What the process does.

    def __enter__(self) -> VirtualSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return -1 if self.is_closed else self._descriptor

    def bind(self, address: tuple[str, int]) -> None:
        self.address = (address[0], self.network.free_port())

    def listen(self, _backlog: int) -> None:
        self.is_listening = True
        self.network.listeners[self.address] = self

    def accept(self) -> tuple[VirtualSocket, tuple[str, int]]:
        if not self._pending:
            raise BlockingIOError
        sock = self._pending.popleft()
        assert sock.peer is not None
        return sock, sock.peer.address

    def connect(self, address: tuple[str, int]) -> None:
        listener = self.network.listeners.get(address)
        if listener is not None:
            self.network.time.after(self.network.delay_s, listener._on_syn, listener, self)
        else:
            self.network.time.after(self.network.delay_s, self.reset, errno.ECONNREFUSED)
        raise BlockingIOError

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        return self.send(b"".join(buffers))

    def send(self, data: bytes | memoryview) -> int:
        if self._error:
            raise OSError(self._error, "broken")
        assert self.pipe is not None
        room = WINDOW_BYTES - self.pipe.num_bytes
        if room <= 0:
            raise BlockingIOError
        taken = bytes(data[: min(room, self._at_once())])
        if len(self.sent) < 1024:
            self.sent += taken
        self.pipe.push(taken)
        return len(taken)

    def recv_into(self, view: memoryview) -> int:
        if self._received:
            num_bytes = min(len(view), len(self._received), self._at_once())
            view[:num_bytes] = self._received[:num_bytes]
            del self._received[:num_bytes]
            assert self.peer is not None
            assert self.peer.pipe is not None
            self.peer.pipe.num_bytes -= num_bytes
            self.peer.host.is_touched = True
            return num_bytes
        if self._error:
            raise OSError(self._error, "broken")
        if self.is_ended:
            return 0
        raise BlockingIOError

    def _at_once(self) -> int:
        most_bytes = self.network.most_bytes
        return most_bytes if most_bytes == WINDOW_BYTES else self.network.time.random.randint(1, most_bytes)

    def getsockopt(self, level: int, name: int, num_bytes: int = 0) -> int:
        if num_bytes:
            raise OSError(errno.ENOPROTOOPT, "nothing is known of a virtual connection")
        return self._error if (level, name) == (socket.SOL_SOCKET, socket.SO_ERROR) else 0

    def setsockopt(self, *_: object) -> None:
        pass

    def setblocking(self, _flag: bool) -> None:
        pass

    def gettimeout(self) -> float:
        return 0.0

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def getpeername(self) -> tuple[str, int]:
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.peer.address

    def detach(self) -> int:
        return -1

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.host.watched.pop(self._descriptor, None)
        self.network.listeners.pop(self.address, None) if self.is_listening else None
        for sock in self._pending:
            sock.close()
        if self.pipe is not None:
            self.pipe.push(END)
