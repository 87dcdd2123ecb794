"""Sockets as the fabric wants them: bound to one address, unbuffered, marked, and never silent for ever."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from syncline.endpoints import format_endpoint, without_brackets
from syncline.errors import ConfigurationError
from syncline.fabric.forks import close_in_children
from syncline.fabric.lending import borrow, new_socket
from syncline.fabric.options import NOWHERE, FabricOptions

BACKLOG = 1024
CONTROL_DSCP = 46
"""The mark of the control connection, where classes have marks: expedited forwarding."""
_TCP_NOTSENT_LOWAT = 25  # Linux; the socket module names it from Python 3.12 on
_TCP_RTO_MAX_MS, _TCP_RTO_MIN_US = 44, 45  # Linux 6.15
RESEND_US = 60_000
"""How long TCP waits at least, beyond a round trip, before it takes what it sent last for lost. The kernel's 0.2 s are
many times what a message takes; but the other end may acknowledge 0.04 s late, and that must not look like a loss."""
_TOTAL_RETRANS, _DSACK_DUPS, _NUM_INFO_BYTES = 100, 216, 220  # of `struct tcp_info`, in <linux/tcp.h>
_MIN_RTT_US, _BUSY_US, _WAITED_US, _BYTES_RETRANS = 148, 168, 176, 208
_NUM_TIMEOUTS, _UNACKED, _BYTES_ACKED = 2, 24, 120
_NO_RTT = 0xFFFFFFFF

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def resolve_address(text: str | None) -> str:
    """Return the IP address of this machine that ``text`` means: an address, an interface, or a host name."""
    if text is None:
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(without_brackets(text))
    except ValueError:
        pass
    else:
        if address.is_unspecified:
            raise ConfigurationError(
                f"address {address} means every address of this machine, so others cannot dial it; name one of "
                f"{', '.join(sorted(_interfaces()))}"
            )
        return str(address)
    of_interface = _interface_address(text)
    if of_interface is not None:
        return of_interface
    try:
        found = socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"address {text!r} is neither an IP address, nor an interface of this machine "
            f"({', '.join(sorted(_interfaces()))}), nor a host name; name one of these"
        ) from error
    return str(found[0][4][0])


def _interfaces() -> dict[str, Any]:
    """Return the addresses of each interface of this machine."""
    import psutil  # where an address is not given as one

    return psutil.net_if_addrs()


def _interface_address(name: str) -> str | None:
    """Return an address of an interface: IPv4 first, and one that means something elsewhere before a link-local one."""
    entries = _interfaces().get(name, ())
    found = [
        (entry.family == socket.AF_INET6, ipaddress.ip_address(entry.address).is_link_local, entry.address)
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return min(found)[2] if found else None


def open_listening_socket(address: str, options: FabricOptions, *, port: int = 0) -> socket.socket:
    """Listen on ``address`` at ``port`` (0: a free one, of those it may use); what is accepted inherits buffer sizes.

    Raises :class:`ConfigurationError` also where the kernel refuses the congestion control that was asked for.
    """
    if port:
        return listen_at(address, options, port)
    return listen_in_range(address, options.ports, lambda number: listen_at(address, options, number))


def listen_in_range(
    address: str, ports: tuple[int, int] | None, listen: Callable[[int], socket.socket]
) -> socket.socket:
    """Listen by ``listen``, which is given a port, on the first that is free of those from the first to the last."""
    if ports is None:
        return listen(0)
    first, last = ports
    for number in range(first, last + 1):
        try:
            return listen(number)
        except (OSError, ConfigurationError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                raise
    raise ConfigurationError(
        f"no port from {first} to {last} is free on {address}: each rank of a host listens on one for the job, and on "
        "one for each further process group; give more (SYNCLINE_PORTS, or init(ports=))"
    )


def listen_at(address: str, options: FabricOptions, port: int, *, is_shared: bool = False) -> socket.socket:
    """Listen at ``port`` (0: a free one); ``is_shared``: beside other processes of this user that share it too."""
    sock: socket.socket | None = None
    try:
        sock = open_socket(address, options)
        _check_congestion(sock, options)
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the next start need not wait for the last one
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((address, port))
        sock.listen(BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        where = format_endpoint(address, port) if port else address
        raise ConfigurationError(
            f"cannot listen on {where}: {error.strerror}; give an address or interface of this machine"
            f"{', and a port that no other program uses' if port else ''}"
        ) from error
    return sock


def advertised_endpoint(address: str, port: int, options: FabricOptions) -> tuple[str, int]:
    """Return where others reach this rank, which listens on ``address`` at ``port``."""
    if options.advertised is None or options.advertised == NOWHERE:
        return address, port
    host, fixed_port = options.advertised
    return resolve_address(host), fixed_port or port


def _check_congestion(sock: socket.socket, options: FabricOptions) -> None:
    if options.congestion is None:
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, options.congestion.encode())
    except OSError as error:
        sock.close()
        is_missing = error.errno == errno.ENOENT
        place = "tcp_available_congestion_control" if is_missing else "tcp_allowed_congestion_control"
        remedy = f"modprobe tcp_{options.congestion}" if is_missing else "let root add it there"
        raise ConfigurationError(
            f"congestion must be a control that the kernel lets this user choose, not {options.congestion!r} "
            f"({error.strerror}); see /proc/sys/net/ipv4/{place}, or {remedy}"
        ) from error


def open_socket(address: str, options: FabricOptions) -> socket.socket:
    """Return a socket for ``address``, of this rank's network; OSError if nobody lends it that any more."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return close_in_children(borrow(family, options) if options.network else new_socket(family))


def prepare_connected(sock: socket.socket, connection_class: int, options: FabricOptions) -> None:
    """Set up an authenticated socket of ``connection_class`` (-1: control)."""
    sock.setblocking(False)
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, max(1, int(options.dead_s)))
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, max(1, int(options.heartbeat_s)))
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, 5)
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(options.send_s * 1000))
    sock.setsockopt(tcp, _TCP_NOTSENT_LOWAT, options.unsent_bytes)
    with contextlib.suppress(OSError):  # kernels before 6.15 wait for 0.2 s, and each time twice as long
        sock.setsockopt(tcp, _TCP_RTO_MIN_US, RESEND_US)
        # Else TCP sends again 4, 8 and 15 s after a cut, and who was cut off for 8 s would not be heard in time.
        sock.setsockopt(tcp, _TCP_RTO_MAX_MS, max(1000, int(options.dead_s * 1000 / 4)))
    congestion = options.congestion or _loopback_congestion(sock)
    if congestion is not None:
        _choose_congestion(sock, congestion)
    mark(sock, connection_class, options)


def is_same_machine(sock: socket.socket) -> bool:
    """Whether both ends of a connected socket have the same address, and so the same machine and network namespace."""
    return bool(sock.getsockname()[0] == sock.getpeername()[0])


def _choose_congestion(sock: socket.socket, name: str) -> None:
    """Take this control, else the usual one, else the one that every user may choose and that heeds losses as well."""
    for control in dict.fromkeys((name, "cubic", "reno")):
        if _try_option(sock, socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode(), "TCP_CONGESTION"):
            return


class TcpCounters(NamedTuple):
    """What a kernel has counted of one connection; zeros where it does not tell (before Linux 4.19), or is no TCP."""

    busy_s: float = 0.0
    """For how long this end had something to send, and the other end room for it."""
    lost_bytes: int = 0
    """What was sent again because it was lost: not what the peer then had twice."""
    round_trip_s: float = 0.0
    """The shortest round trip to the other end's kernel in the last minutes."""


def tcp_counters(sock: socket.socket) -> TcpCounters:
    """Return what the kernel has counted of a connection."""
    info = _tcp_info(sock)
    if not info:
        return TcpCounters()
    total_resent, resent_twice, min_rtt_us = (
        int.from_bytes(info[place : place + 4], sys.byteorder) for place in (_TOTAL_RETRANS, _DSACK_DUPS, _MIN_RTT_US)
    )
    busy_us, waited_us, resent_bytes = (
        int.from_bytes(info[place : place + 8], sys.byteorder) for place in (_BUSY_US, _WAITED_US, _BYTES_RETRANS)
    )
    return TcpCounters(
        busy_s=max(0, busy_us - waited_us) / 1e6,
        lost_bytes=resent_bytes * max(0, total_resent - resent_twice) // max(1, total_resent),
        round_trip_s=0.0 if min_rtt_us == _NO_RTT else min_rtt_us / 1e6,
    )


def sent_in_vain(sock: socket.socket) -> int | None:
    """Return how many bytes the other end has, by its acknowledgements, where what follows was sent twice in vain."""
    info = _tcp_info(sock)
    if not info or info[_NUM_TIMEOUTS] < 2 or not any(info[_UNACKED : _UNACKED + 4]):
        return None
    return int.from_bytes(info[_BYTES_ACKED : _BYTES_ACKED + 8], sys.byteorder)


def _tcp_info(sock: socket.socket) -> bytes:
    """Return the kernel's ``struct tcp_info``; nothing of a socket that has none, or an older one."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NUM_INFO_BYTES)
    except OSError:
        return b""
    return info if len(info) == _NUM_INFO_BYTES else b""


def _loopback_congestion(sock: socket.socket) -> str | None:
    """Prefer a loss-based control within a machine: BBR paces, and halves the rate of loopback."""
    return "cubic" if ipaddress.ip_address(sock.getpeername()[0]).is_loopback else None


def mark(sock: socket.socket, connection_class: int, options: FabricOptions) -> None:
    """Give a socket the DSCP mark and the priority of its class (-1: control), as far as the kernel allows it."""
    if options.dscp is None:
        return
    is_control = connection_class < 0
    field = (CONTROL_DSCP if is_control else options.dscp[connection_class]) << 2
    if sock.family == socket.AF_INET6:
        _try_option(sock, socket.IPPROTO_IPV6, socket.IPV6_TCLASS, field, "IPV6_TCLASS")
    else:
        _try_option(sock, socket.IPPROTO_IP, socket.IP_TOS, field, "IP_TOS")
    # After IP_TOS, which sets a socket priority of its own. Up to 6 needs no privilege.
    priority = 6 if is_control else max(0, 5 - connection_class)
    _try_option(sock, socket.SOL_SOCKET, socket.SO_PRIORITY, priority, "SO_PRIORITY")


def _try_option(sock: socket.socket, level: int, name: int, value: int | bytes, text: str) -> bool:
    """Set an option that the job can do without; say once where it is refused, and return whether it is set."""
    try:
        sock.setsockopt(level, name, value)
    except OSError as error:
        if text not in _warned:
            _warned.add(text)
            _log.warning("the kernel refuses %s = %r (%s); going on without it", text, value, error.strerror)
        return False
    return True


NUM_OWN_FILES = 16
"""What a fabric needs beside its connections: the loop (3), compiled code (2), the listening socket, the store, and
handshakes with those who connect meanwhile."""


def check_open_files(rank: int, *, num_peers: int, num_classes: int) -> None:
    """Raise ``ConfigurationError`` unless ``num_classes`` connections and that of control fit for each peer.

    Each connection is a file. Where the limit is too low, connections fail one by one and other ranks wait for this one
    until their deadline, so it is said before the first.
    """
    allowed, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = _count_open(allowed)
    per_peer = num_classes + 1
    needed = num_open + NUM_OWN_FILES + num_peers * per_peer
    if allowed == resource.RLIM_INFINITY or needed <= allowed:
        return
    roof = (
        "" if hard == resource.RLIM_INFINITY or hard >= needed else f", for which root must raise the hard limit {hard}"
    )
    raise ConfigurationError(
        f"rank {rank} needs {needed} open files, {per_peer} for each of {num_peers} other ranks, {NUM_OWN_FILES} of "
        f"its own and {num_open} that are open, but RLIMIT_NOFILE allows {allowed}; say ulimit -n {needed} or more in "
        f"the shell that starts it{roof}"
    )


def _count_open(allowed: int) -> int:
    try:
        return len(list(Path("/proc/self/fd").iterdir())) - 1  # without that of the folder itself
    except OSError as error:
        if error.errno == errno.EMFILE:  # not even this one can be opened
            return allowed
        raise ConfigurationError(
            f"/proc/self/fd of process {os.getpid()} cannot be read ({error.strerror}), but Linux tells there of what "
            "processes hold and share; give this container a /proc: mount -t proc proc /proc"
        ) from error
