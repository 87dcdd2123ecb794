"""One port of a host for all its processes: whoever accepts a connection there hands it to whom it is meant for.

Where one port of a host is let through (``SYNCLINE_PORTS=29600``), all that the job's processes there would listen for
on ports of their own comes to that one. Each of these processes listens on it: the kernel deals the connections out
among them (``SO_REUSEPORT``), and the port stays open whoever dies. A thread accepts, looks at the first bytes without
taking them, and sends the socket itself to the process that they name (``SCM_RIGHTS``, through a folder that this user
alone can enter). From then on it is a connection like any other, at no cost, also if the one that accepted it dies.

What ranks say first names a job, a start of it and a rank (:func:`~syncline.fabric.dialling.addressee`); all else is
taken to be for the store, if one is served there. What is for nobody here, or not yet, is closed: who dials tries
again. Nothing is trusted that is only named: whoever is handed a connection lets it in, or not, as if it had accepted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from syncline.endpoints import format_endpoint
from syncline.errors import ConfigurationError
from syncline.fabric.compiled import check_compiled
from syncline.fabric.dialling import ADDRESSED_BYTES, addressee
from syncline.fabric.forks import close_in_children
from syncline.fabric.lending import Lender, open_meeting_place, prefix_of_lent
from syncline.fabric.options import FabricOptions
from syncline.fabric.sockets import listen_at, open_listening_socket
from syncline.user_folder import path_in, served_paths

STORE = "store"
"""What connections are for that do not begin as ours do."""
_OURS = b"SYNC"
"""How all that ranks say first begins."""
_LEAST_BYTES = 5
"""What a store's client sends at least before it waits for an answer."""
_LOOK_S = 10.0
"""For how long a connection may say nothing, or its process have no room for it."""
_RETRY_S = 0.01
CONNECT_S = 1.0
_LAST_MS = 10**14
"""Beyond any time, so that of several stores the newest comes first."""
LOOPBACK = "127.0.0.1"
_MOST_UNKNOWN = 512


def name_of(job: bytes, epoch: int, rank: int) -> str:
    """Return the name by which a rank's connections are handed on, for one start of a job."""
    return hashlib.sha256(job + epoch.to_bytes(8, "little") + rank.to_bytes(4, "little")).hexdigest()[:20]


def prefix_of(address: str, port: int) -> str:
    """Return how the names begin in the user's folder that belong to a port, in this network namespace."""
    network = Path("/proc/self/ns/net").stat().st_ino
    return f"port-{hashlib.sha256(f'{address} {port} {network}'.encode()).hexdigest()[:12]}."


def open_listener(address: str, options: FabricOptions, *, port: int = 0) -> socket.socket | SharedListener:
    """Listen on ``address`` at ``port`` (0: one that the options allow), alone or with the host's other processes.

    :class:`ConfigurationError` where that cannot be.
    """
    if (shared := options.shared_port) is not None and port in (0, shared):
        return SharedListener(address, shared, options)
    return open_listening_socket(address, options, port=port)


@contextlib.contextmanager
def lending(options: FabricOptions, host: str) -> Iterator[None]:
    """Lend this process's network to ranks of ``host`` that have none (:mod:`syncline.fabric.lending`).

    It begins here, before ranks meet, where they share one port; and ends with what listens there then.
    """
    if options.shared_port is None or options.network:
        yield
        return
    port = _SharedPort.join(options.address or LOOPBACK, options.shared_port, options)
    try:
        port.lend(host, options)
        yield
    finally:
        port.leave()


class SharedListener:
    """What is accepted from a shared port for one purpose, as a listening socket has it; any thread may use it."""

    def __init__(self, address: str, port: int, options: FabricOptions) -> None:
        self._port = _SharedPort.join(address, port, options)
        flags = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        self._inbox = close_in_children(socket.socket(socket.AF_UNIX, flags))
        self._path: Path | None = None

    def __repr__(self) -> str:
        return f"<SharedListener on {format_endpoint(*self.getsockname())}>"

    def serve(self, name: str, *, order: int = 0, is_alone: bool = False) -> None:
        """Be handed what comes for ``name``, from now on; again, to change the ``order``.

        Of several that serve one name the one with the lowest order is handed all, unless one ``is_alone`` with it.
        """
        if is_alone and self._port.living(f"{name}."):
            raise ConfigurationError(
                f"{format_endpoint(*self.getsockname())} is shared by another job's {name}; give this job another port "
                "(SYNCLINE_PORTS, and MASTER_PORT)"
            )
        path = self._port.path_of(f"{name}.{order:014d}.{secrets.token_hex(8)}")
        if self._path:
            self._path.rename(path)
        else:
            self._inbox.bind(str(path))
        self._path = path

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection, which does not block, and from where it is; ``BlockingIOError`` if none waits."""
        _, descriptors, _, _ = socket.recv_fds(self._inbox, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:  # this process may open no more
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        sock = socket.socket(fileno=descriptors[0])
        try:
            return sock, sock.getpeername()
        except OSError as error:
            sock.close()
            raise ConnectionAbortedError from error

    def fileno(self) -> int:
        """Return what is readable while a connection waits; -1 once closed."""
        return self._inbox.fileno()

    def getsockname(self) -> tuple[str, int]:
        """Return the address and the port."""
        return self._port.address, self._port.number

    def close(self) -> None:
        """Take nothing any more; what waits is closed."""
        if self._inbox.fileno() < 0:
            return
        if self._path:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                while True:
                    self.accept()[0].close()
        self._inbox.close()
        self._port.leave()


class StoreSplices:
    """A store's connections that pass through this process, as torch's store takes and makes none but its own.

    What ``listener`` accepts is carried to where ``dial`` connects (or raises OSError), and back.

    Compiled code carries; the thread here only opens and closes.
    """

    def __init__(self, listener: SharedListener | socket.socket, dial: Callable[[], socket.socket]) -> None:
        check_compiled()
        from syncline.fabric._native import Splices  # only where it can be imported

        self._listener, self._dial = listener, dial
        self._splices = Splices()
        self._joined: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._wake, self._woken = map(close_in_children, socket.socketpair())
        self._thread = threading.Thread(target=self._run, name="syncline-store-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Carry nothing any more."""
        if self._wake.fileno() < 0:  # in a forked child, which has none of it
            return
        self._wake.send(b".")
        self._thread.join()
        self._splices.close()
        self._listener.close()
        for sock in (self._wake, self._woken, *(sock for both in self._joined.values() for sock in both)):
            sock.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for readable in (self._woken, self._listener, self._splices):
                selector.register(readable, selectors.EVENT_READ)
            while True:
                found = {key.fileobj for key, _ in selector.select()}
                if self._woken in found:
                    return
                if self._listener in found:
                    self._accept()
                self._close_ended()

    def _close_ended(self) -> None:
        for number in self._splices.take_ended():
            for sock in self._joined.pop(number):
                sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        try:
            there = self._dial()
        except OSError:
            sock.close()
            return
        for each in (sock, there):
            close_in_children(each).setblocking(False)
        self._joined[self._splices.add(sock.fileno(), there.fileno())] = (sock, there)


def share_store(
    address: str, port: int, options: FabricOptions, *, is_alone: bool = True
) -> tuple[socket.socket, StoreSplices]:
    """Return where a store is to listen, in this machine, and what carries there what comes for it at a shared port.

    ``is_alone``: refuse where there is another store; else whoever comes now is for this one.
    """
    options.check_exposure(address)
    listener = SharedListener(address, port, options)
    try:
        listener.serve(STORE, order=_LAST_MS - int(1000 * time.time()), is_alone=is_alone)
        own = replace(options, network=None)
        listening = listen_at("::1" if ":" in address else LOOPBACK, own, 0)
    except BaseException:
        listener.close()
        raise
    store = listening.getsockname()[:2]
    return listening, StoreSplices(listener, lambda: socket.create_connection(store, timeout=CONNECT_S))


class _SharedPort:
    """This process's part in a shared port: a socket that listens, and a thread that hands on what it accepts."""

    _of_process: dict[tuple[str, int], _SharedPort] = {}  # noqa: RUF012 - of the class, under its lock
    _lock = threading.Lock()

    def __init__(self, address: str, number: int, options: FabricOptions) -> None:
        self.address, self.number = address, number
        self._num_listeners = 0
        self._folder = open_meeting_place()
        try:
            self._socket = listen_at(address, options, number, is_shared=True)
        except BaseException:
            os.close(self._folder)
            raise
        self._prefix = prefix_of_lent(options.network) if options.network else prefix_of(address, number)
        self._lenders: dict[str, Lender] = {}
        self.living("")  # removes what those left that were killed
        self._looks: dict[socket.socket, float] = {}
        """Connections whose first bytes, or whose process's room, are waited for; until when."""
        self._retries: list[socket.socket] = []
        self._wake, self._woken = map(close_in_children, socket.socketpair())
        self._sender = close_in_children(
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="syncline-port", daemon=True)
        self._thread.start()

    @classmethod
    def join(cls, address: str, number: int, options: FabricOptions) -> _SharedPort:
        """Return this process's part, which is there until as many have left as joined."""
        with cls._lock:
            port = cls._of_process.get((address, number)) or cls(address, number, options)
            cls._of_process[address, number] = port
            port._num_listeners += 1
            return port

    def leave(self) -> None:
        """End it with the last that leaves."""
        with self._lock:
            self._num_listeners -= 1
            if self._num_listeners:
                return
            del self._of_process[self.address, self.number]
            self._wake.send(b".")
            self._thread.join()
            for lender in self._lenders.values():
                lender.close()
            for sock in (self._socket, *self._looks, self._wake, self._woken, self._sender):
                sock.close()
            self._selector.close()
            os.close(self._folder)

    def path_of(self, name: str) -> Path:
        """Return the path at which a name is served, in the user's folder."""
        return path_in(self._folder, f"{self._prefix}{name}")

    def living(self, name: str) -> list[Path]:
        """Return the paths at which names that begin so are served; where the process is gone they are removed."""
        return served_paths(self._folder, f"{self._prefix}{name}*")

    def lend(self, host: str, options: FabricOptions) -> None:
        """Lend this process's network to ranks of ``host`` that have none."""
        with self._lock:
            if host not in self._lenders:
                self._lenders[host] = Lender(self._folder, self._prefix, host, self.address, options)
                self._selector.register(self._lenders[host], selectors.EVENT_READ)

    # --- on the thread ---

    def _run(self) -> None:
        while True:
            pause_s = _RETRY_S if self._retries else 1.0 if self._looks else None
            found = [key.fileobj for key, _ in self._selector.select(pause_s)]
            if self._woken in found:
                return
            if self._socket in found:
                self._accept()
            for lender in tuple(self._lenders.values()):  # another thread may add one
                if lender in found:
                    lender.answer()
            retries, self._retries = self._retries, []
            for sock in (*found, *retries):
                if sock in self._looks:
                    self._look(sock)
            now_s = time.monotonic()
            for sock in [sock for sock, end_s in self._looks.items() if end_s < now_s]:
                self._drop(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:  # it has gone again; or this process may open no more, and the backlog waits
            time.sleep(_RETRY_S)
            return
        close_in_children(sock).setblocking(False)
        if len(self._looks) >= _MOST_UNKNOWN:
            self._drop(next(iter(self._looks)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _LEAST_BYTES)
        self._looks[sock] = time.monotonic() + _LOOK_S
        self._selector.register(sock, selectors.EVENT_READ)

    def _look(self, sock: socket.socket) -> None:
        """Hand on a connection, if it has said whom it is for."""
        try:
            first = sock.recv(ADDRESSED_BYTES, socket.MSG_PEEK)
        except OSError:
            first = b""
        is_ours = first.startswith(_OURS)
        if len(first) < _LEAST_BYTES:  # it has ended
            self._drop(sock)
        elif is_ours and len(first) < ADDRESSED_BYTES:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == ADDRESSED_BYTES:  # it has ended
                self._drop(sock)
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, ADDRESSED_BYTES)
        elif self._hand_on(sock, _name_in(first) if is_ours else STORE):
            self._drop(sock)
        else:
            with contextlib.suppress(KeyError):
                self._selector.unregister(sock)
            self._retries.append(sock)

    def _hand_on(self, sock: socket.socket, name: str | None) -> bool:
        """Send a connection to whoever serves ``name``; False if there is no room for it yet."""
        if name is None:
            return True
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        descriptor = struct.pack("i", sock.fileno())
        for path in self.living(f"{name}."):
            try:
                # send_fds() leaves out the address before Python 3.12.
                self._sender.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)], 0, str(path))
            except BlockingIOError:
                return False
            except (ConnectionRefusedError, FileNotFoundError):  # it has gone meanwhile
                continue
            return True
        return True

    def _drop(self, sock: socket.socket) -> None:
        del self._looks[sock]
        if sock in self._retries:
            self._retries.remove(sock)
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)
        sock.close()


def _name_in(message: bytes) -> str | None:
    told = addressee(message)
    return None if told is None else name_of(*told)


os.register_at_fork(after_in_child=_SharedPort._of_process.clear)
