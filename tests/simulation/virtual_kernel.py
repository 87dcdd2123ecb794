"""What the compiled transport asks of the machine, answered by virtual sockets and virtual time.

See ``native/kernel.hpp``. One thread runs all: what the heartbeat's thread would do, :meth:`VirtualKernel.beat` does.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from select import EPOLLIN
from weakref import ref

from virtual_network import VirtualNetwork, VirtualSocket
from virtual_time import Host, VirtualEpoll

from syncline.fabric._native import GrantScheduler, Kernel, NativeTransport


class VirtualKernel(Kernel):
    """The machine of one transport, which a host's loop watches as one."""

    is_writable = False

    def __init__(self, network: VirtualNetwork, host: Host) -> None:
        super().__init__()
        self._host = host
        self._epoll = VirtualEpoll(host)
        self._descriptor = network.token()
        self._is_awake = False
        host.watched[self._descriptor] = self

    @property
    def is_readable(self) -> bool:
        return self._is_awake or self._epoll.has_ready()

    def now_s(self) -> float:
        return self._host.time.now_s

    def receive(self, fd: int, parts: Sequence[memoryview]) -> int:
        sock = self._host.watched.get(fd)
        if not isinstance(sock, VirtualSocket):
            return -errno.EBADF
        try:
            num_bytes = sock.recv_into(parts[0])
            if num_bytes == len(parts[0]) and len(parts) > 1:
                with contextlib.suppress(OSError):  # it is told the next time
                    num_bytes += sock.recv_into(parts[1])
        except OSError as error:
            return -(error.errno or errno.EAGAIN)
        return num_bytes

    def send(self, fd: int, parts: Sequence[memoryview]) -> int:
        sock = self._host.watched.get(fd)
        if not isinstance(sock, VirtualSocket):
            return -errno.EBADF
        try:
            return sock.sendmsg(parts)
        except OSError as error:
            return -(error.errno or errno.EAGAIN)

    def wake_at(self, fd: int, num_bytes: int) -> None:
        sock = self._host.watched.get(fd)
        if isinstance(sock, VirtualSocket):
            sock.wakes_at_bytes = num_bytes

    def fileno(self) -> int:
        return self._descriptor

    def watch(self, fd: int, events: int) -> None:
        self._epoll.register(fd, events)
        self._host.is_touched = True

    def forget(self, fd: int) -> None:
        self._epoll.unregister(fd)

    def wake(self) -> None:
        self._is_awake = self._host.is_touched = True

    def wait(self, set_fd: int) -> list[tuple[int, int]]:
        if set_fd != self._descriptor:
            return self._host.epoll.poll()
        found = self._epoll.poll()
        if self._is_awake:
            self._is_awake = False
            found.append((self._descriptor, EPOLLIN))
        return found

    def close(self) -> None:
        self._host.watched.pop(self._descriptor, None)


def open_transport(network: VirtualNetwork, host: Host, scheduler: GrantScheduler) -> NativeTransport:
    """Return a transport on a machine that is not there; the thread of its heartbeat runs with the host."""
    native_transport = NativeTransport(scheduler, kernel=VirtualKernel(network, host))
    known = ref(native_transport)

    def beat() -> None:
        living = known()
        if living is not None:
            living.beat_if_late()

    host.threads.append(beat)
    return native_transport
