"""The stores through which ranks find each other: torch's TCPStore, used for the meeting and dropped after it.

Rank 0's store listens on one address, that of MASTER_ADDR or else the one that its fabric uses, and never on all.
Opening a TCPStore blocks for as long as whatever accepts there stays silent, so it happens on a thread of its own,
which is left behind at the deadline.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from weakref import finalize

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from syncline.endpoints import LOOPBACK, format_endpoint
from syncline.errors import ConfigurationError, RendezvousError
from syncline.fabric import FabricOptions
from syncline.fabric.rendezvous import begin_on_thread
from syncline.fabric.shared_port import CONNECT_S, StoreSplices, share_store
from syncline.fabric.sockets import listen_at, listen_in_range, open_socket
from syncline.observe import EVERY_S, FIRST_S, tell_if_long
from syncline.pytorch.environment import Environment
from syncline.updates.private_torch import default_store

ANSWER_S = 30.0
"""How long the store may take to answer."""
PROBE_S = 1.0


class TorchStore:
    """A ``torch.distributed`` store as the fabric's rendezvous uses it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``."""
        self._store.set(key, value)  # type: ignore[arg-type]  # the binding takes bytes as well

    def get(self, key: str) -> bytes | None:
        """Return the value that is there now; None if there is none."""
        return bytes(self._store.get(key)) if self._store.check([key]) else None


def open_store(environment: Environment) -> TorchStore:
    """Open the store of the job: the agent's, that of torch.distributed, or one that rank 0 serves.

    Whoever holds the result keeps the store open; dropping it closes it. :class:`RendezvousError` at the latest after
    ``environment.fabric.connect_s``.
    """
    if environment.world_size == 1:
        return TorchStore(HashStore())
    if dist.is_available() and dist.is_initialized():
        return store_of_group()
    assert environment.master_address is not None, "checked when the environment was read"
    assert environment.master_port is not None, "checked when the environment was read"
    host, port, options = environment.master_address, environment.master_port, environment.fabric
    assert options.address is not None, "resolved before ranks meet"
    if not environment.uses_agent_store:
        host = _beyond_loopback(host, port, options.address)
    if environment.rank != 0 or environment.uses_agent_store:
        first_s = FIRST_S if environment.rank <= 1 else EVERY_S  # one of many that wait says so first
        return TorchStore(dial_store(host, port, options, first_s=first_s))
    if port == options.shared_port:
        return TorchStore(_serve_shared(options.address, port, options))
    if options.network:
        raise ConfigurationError(
            f"rank 0, without a network, can serve its store at the shared port alone: set MASTER_PORT="
            f"{options.shared_port}, or give rank 0 to a process that has a network"
        )
    listening = _listen(host, port, options, address=options.address)
    host = listening.getsockname()[0]  # it dials itself where it listens, whatever the name means elsewhere
    return TorchStore(_open_in_time(host, port, listening, timeout_s=options.connect_s))


def store_of_group() -> TorchStore:
    """Return the part of the default process group's store in which the ranks of a fleet meet."""
    return TorchStore(PrefixStore("syncline", default_store()))


def serve_store(options: FabricOptions) -> tuple[Store, int]:
    """Serve a store of this rank's own, on the address that its fabric uses; return it and its port."""
    address = options.address or LOOPBACK
    if (port := options.shared_port) is not None:
        return _serve_shared(address, port, options, is_alone=False), port
    here = replace(options, network=None, congestion=None)
    listening = listen_in_range(address, options.ports, lambda port: listen_at(address, here, port))
    port = listening.getsockname()[1]
    return _open_in_time(address, port, listening, timeout_s=options.connect_s), port


def _serve_shared(address: str, port: int, options: FabricOptions, *, is_alone: bool = True) -> Store:
    """Serve a store at a port that it shares with the ranks of this host, as long as it is held."""
    listening, splices = share_store(address, port, options, is_alone=is_alone)
    host, own_port = listening.getsockname()[:2]
    return _open_while(splices, lambda: _open_in_time(host, own_port, listening, timeout_s=options.connect_s))


def dial_store(host: str, port: int, options: FabricOptions, *, first_s: float = FIRST_S) -> Store:
    """Open the store that another rank serves; :class:`RendezvousError` at the latest after ``connect_s``.

    After ``first_s`` it is said what is waited for.
    """
    where = format_endpoint(host, port)
    waiting = f"waiting for the store of rank 0 at {where}; check that rank 0 runs, and that this host reaches it"
    with tell_if_long(waiting, first_s=first_s):
        if options.network:
            return _dial_lent(host, port, options)
        return _open_in_time(host, port, None, timeout_s=options.connect_s)


def _dial_lent(host: str, port: int, options: FabricOptions) -> Store:
    """Lead torch's store, which dials by itself, there from this rank's own loopback."""
    listening = listen_at(LOOPBACK, replace(options, network=None), 0)
    splices = StoreSplices(listening, lambda: _connect_lent(host, port, options))
    own, own_port = listening.getsockname()
    timeout_s = options.connect_s
    return _open_while(splices, lambda: _open_in_time(own, own_port, None, timeout_s=timeout_s, meant=(host, port)))


def _open_while(splices: StoreSplices, open_it: Callable[[], Store]) -> Store:
    """Open a store whose connections pass there, as long as it is held."""
    try:
        store = open_it()
    except BaseException:
        splices.close()
        raise
    finalize(store, splices.close)
    return store


def _connect_lent(host: str, port: int, options: FabricOptions) -> socket.socket:
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    sock = open_socket(str(address[0]), options)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _beyond_loopback(host: str, port: int, address: str) -> str:
    """Return where the store is: at ``address``, that of this rank, where ``host`` means loopback and other hosts come.

    A host's own name often means loopback on the host itself, and there alone.
    """
    with contextlib.suppress(OSError):  # who dials says what is wrong with the name
        named = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        if ipaddress.ip_address(named).is_loopback and not ipaddress.ip_address(address).is_loopback:
            return address
    return host


def _listen(host: str, port: int, options: FabricOptions, *, address: str) -> socket.socket:
    """Listen where ``host`` leads, if that is this machine; else, behind a service's address, on ``address``."""
    named = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    options.check_exposure(named)
    try:
        return listen_at(named, replace(options, congestion=None), port)
    except ConfigurationError as error:
        cause = error.__cause__
        assert isinstance(cause, OSError), "the kernel says why"
        if cause.errno != errno.EADDRNOTAVAIL or named == address:
            raise RendezvousError(
                f"rank 0 cannot serve the store at MASTER_ADDR:MASTER_PORT {format_endpoint(named, port)}: "
                f"{cause.strerror}; give all ranks a MASTER_PORT that no other program on rank 0's host uses"
            ) from cause
    return _listen(address, port, options, address=address)


def _open_in_time(
    host: str,
    port: int,
    listening: socket.socket | None,
    *,
    timeout_s: float,
    meant: tuple[str, int] | None = None,
) -> Store:
    """Open a TCPStore, and serve it if ``listening``, within ``timeout_s``.

    ``meant``: where the store is, if what is dialled only leads there.
    """
    where = format_endpoint(*(meant or (host, port)))
    _, opened = begin_on_thread(partial(_tcp_store, host, port, listening, timeout_s=timeout_s), "syncline-store")
    deadline_s = time.monotonic() + timeout_s
    try:
        return opened.result(timeout_s)
    except TimeoutError:
        reason = f"nothing that accepts connections there speaks as a store within {timeout_s:g} s"
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        reason = str(error).splitlines()[0]
    if time.monotonic() >= deadline_s and not meant and _accepts(host, port):
        reason = (
            f"something accepts connections there, but did not answer as a store within {timeout_s:g} s: another "
            "program holds the port, or rank 0's process is stopped"
        )
    raise RendezvousError(
        f"The store at MASTER_ADDR:MASTER_PORT {where} cannot be opened: {reason}; check that "
        "rank 0 runs, that the port is free there, and that this host reaches it"
    )


def _tcp_store(host: str, port: int, listening: socket.socket | None, *, timeout_s: float) -> Store:
    store = TCPStore(
        host,
        port,
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=False,
        master_listen_fd=None if listening is None else listening.detach(),  # the store closes it
    )
    store.set_timeout(timedelta(seconds=min(ANSWER_S, timeout_s)))
    return store


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_S):
            return True
    except OSError:
        return False
