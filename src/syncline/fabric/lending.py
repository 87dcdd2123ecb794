"""A rank that has no network uses that of its host: other ranks there make sockets for it.

A socket belongs to the network in which it was made, whoever holds it, and a process may hand one to another over a
socket in the file system (``SCM_RIGHTS``), be they in different containers. So a rank with a network hands out sockets
as they are made. Whoever has none binds them, listens on them and dials with them itself, and is then a rank of that
host like any other: what passes on its connections passes through nobody, and they outlive who lent.

It is lent to by whichever ranks of its host share one port with it (:mod:`syncline.fabric.shared_port`), for as long as
they listen there; of a new socket the first of them that answers has the making. Each is asked by a datagram in the
user's own folder, with a code of the job's secret and one end of a pair of sockets, to which it answers with its
address and the new socket; or closes it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from syncline.errors import ConfigurationError
from syncline.fabric.forks import close_in_children
from syncline.fabric.options import FabricOptions
from syncline.user_folder import opened, path_in, served_paths, user_folder
from syncline.variables import process_variables

NO_NETWORK = "none"
"""The interface of a rank that has no network."""
ANSWER_S = 1.0
"""A rank that has not answered by then is busy, or stopped, and the next one is asked."""
_PAUSE_S = 0.05
_FAMILIES = {b"4": socket.AF_INET, b"6": socket.AF_INET6}
_CODE_BYTES = 32
_MAX_ADDRESS_BYTES = 64
_FLAGS = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC


class _Loan(NamedTuple):
    sock: socket.socket
    address: str
    """Of who lends, in the network that is lent."""


def new_socket(family: int) -> socket.socket:
    """Return a TCP socket of this process's network."""
    return socket.socket(family, socket.SOCK_STREAM | _FLAGS)


def open_meeting_place() -> int:
    """Open the user's folder, where the ranks of a host find each other; the result is the caller's to close."""
    remedy = ": the ranks of a host that share one port meet there"
    with opened(user_folder(process_variables()), is_folder=True, remedy=remedy) as folder:
        return os.dup(folder)


def prefix_of_lent(network: str) -> str:
    """Return how the names begin in the user's folder that belong to the port of who lends ``network``."""
    return network[: network.index(".") + 1]


class Lender:
    """Makes sockets for ranks of ``host`` that know the job's secret; it is asked when it can be read from."""

    def __init__(self, folder: int, prefix: str, host: str, address: str, options: FabricOptions) -> None:
        name = f"{prefix}{_lends(host, options)}{secrets.token_hex(8)}"
        self._code = _code(name, options)
        self._address = address
        self._path = path_in(folder, name)
        self._inbox = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | _FLAGS))
        self._inbox.bind(str(self._path))

    def fileno(self) -> int:
        """Return what is readable while somebody asks."""
        return self._inbox.fileno()

    def answer(self) -> None:
        """Answer one who asks, or close what was to be answered; nothing is raised or waited for."""
        with contextlib.suppress(OSError):
            asked, descriptors, _, _ = socket.recv_fds(self._inbox, _CODE_BYTES + 2, 1, socket.MSG_CMSG_CLOEXEC)
            for descriptor in descriptors:
                with socket.socket(fileno=descriptor) as asker:
                    self._lend(asker, asked[:1], asked[1:])

    def close(self) -> None:
        """Lend no more; what was lent stays."""
        self._path.unlink(missing_ok=True)
        self._inbox.close()

    def _lend(self, asker: socket.socket, kind: bytes, code: bytes) -> None:
        if kind in _FAMILIES and hmac.compare_digest(code, self._code):
            asker.setblocking(False)
            with new_socket(_FAMILIES[kind]) as sock:
                socket.send_fds(asker, [self._address.encode()], [sock.fileno()])


def borrow(family: int, options: FabricOptions) -> socket.socket:
    """Return a TCP socket of the network that is lent; OSError where nobody lends it any more.

    Who lends is a rank of the same job, mostly: if it is stopped, so is the job, and it may be waited for.
    """
    assert options.network is not None, "it is lent"
    loan = _ask_first(f"{options.network}*", family, options)
    if loan is None:
        raise OSError(errno.ENETDOWN, "no rank of this host lends it a network any more")
    return loan[1].sock


def find_network(host: str, options: FabricOptions) -> FabricOptions:
    """Return ``options`` with the network and the address of a rank of ``host`` that lends; it is waited for.

    :class:`ConfigurationError` where none does within ``connect_s``, ranks of the host share no port, or there is no
    loopback, by which torch's store is led to rank 0's.
    """
    if options.shared_port is None:
        raise ConfigurationError(
            f"A rank without a network (SYNCLINE_INTERFACE={NO_NETWORK}) uses that of another rank of its host, and "
            "both must share one port: give all ranks of the host one number, as SYNCLINE_PORTS=29600"
        )
    _check_loopback()
    end_s = time.monotonic() + options.connect_s
    while time.monotonic() < end_s:
        if (found := _ask_first(f"port-*.{_lends(host, options)}*", socket.AF_INET, options)) is not None:
            path, loan = found
            loan.sock.close()
            return replace(options, address=loan.address, network=path.name.rpartition(".")[0] + ".")
        time.sleep(_PAUSE_S)
    raise ConfigurationError(
        f"no rank of host {host} has lent this one, which has no network (SYNCLINE_INTERFACE={NO_NETWORK}), its own "
        f"within {options.connect_s:.0f} s; start one there that has a network, as the same user, with the same "
        f"SYNCLINE_PORTS={options.shared_port}, SYNCLINE_HOST and secret, and let both see "
        f"{user_folder(process_variables())}"
    )


def _check_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # nothing is sent; it only learns its route
        except OSError as error:
            raise ConfigurationError(
                f"A rank without a network (SYNCLINE_INTERFACE={NO_NETWORK}) needs its own loopback, which is down "
                f"({error.strerror}): ip link set lo up"
            ) from error


def _ask_first(pattern: str, family: int, options: FabricOptions) -> tuple[Path, _Loan] | None:
    """Return what the first lends of those whose names match."""
    folder = open_meeting_place()
    try:
        for path in served_paths(folder, pattern):
            if (loan := _ask(path, family, options)) is not None:
                return path, loan
    finally:
        os.close(folder)
    return None


def _ask(path: Path, family: int, options: FabricOptions) -> _Loan | None:
    kind = next(kind for kind, of_kind in _FAMILIES.items() if of_kind == family)
    request = kind + _code(path.name, options)
    ours, theirs = socket.socketpair()
    with ours, contextlib.suppress(OSError):
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(ANSWER_S)
            sender.connect(str(path))
            socket.send_fds(sender, [request], [theirs.fileno()])
        ours.settimeout(ANSWER_S)
        address, descriptors, _, _ = socket.recv_fds(ours, _MAX_ADDRESS_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if descriptors:
            sock = socket.socket(fileno=descriptors[0])
            sock.setblocking(False)
            return _Loan(sock, address.decode())
    return None


def _lends(host: str, options: FabricOptions) -> str:
    """Return how the names of those that lend to ranks of ``host`` go on, behind that of their port."""
    return f"lends-{hashlib.sha256(f'{host} {options.shared_port}'.encode()).hexdigest()[:12]}."


def _code(name: str, options: FabricOptions) -> bytes:
    return hmac.digest(b"syncline lends\0" + (options.secret or b""), name.encode(), "sha256")
