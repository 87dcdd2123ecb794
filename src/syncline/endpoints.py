"""Where a process listens: a host and a port, read and written in one place, and which address others reach.

IPv6 addresses stand in brackets.
"""

from __future__ import annotations

import ipaddress
import socket

from syncline.errors import ConfigurationError

MAX_PORT = 65535
LOOPBACK = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
"""What torchrun listens on, so that habits and firewalls fit."""
PROBE_PORT = 29499
"""Where `syncline doctor --listen` answers probes."""


def parse_endpoint(text: str, *, default_port: int, what: str) -> tuple[str, int]:
    """Read ``"a1:29500"``, ``"a1"``, ``"[fd00::1]:29500"`` or ``"fd00::1"``; ``what`` names it in an error."""
    if is_ipv6(text):
        return text, default_port
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise ConfigurationError(f"{what} must be HOST:PORT with a port from 1 to {MAX_PORT}, got '{text}'")
    bare = without_brackets(host)
    if ":" in bare and not is_ipv6(bare):
        raise ConfigurationError(f"{what} must be HOST:PORT, with an IPv6 address in brackets, got '{text}'")
    return bare, int(port)


def metrics_endpoint(place: str, *, what: str) -> tuple[str, int] | None:
    """Read where rank 0 serves its metrics: ``"9090"``, on loopback, or ``"0.0.0.0:9090"``; None of any other place."""
    if not place.isdecimal() and ":" not in place:
        return None
    return parse_endpoint(place if ":" in place else f"127.0.0.1:{place}", default_port=0, what=what)


def format_endpoint(host: str, port: int) -> str:
    """Write ``"a1:29500"`` or ``"[fd00::1]:29500"``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_ports(text: str) -> tuple[int, int] | None:
    """Read ``"29600-29631"``, or ``"29600"`` for that one alone; None of an empty text."""
    if not text:
        return None
    first, dash, last = (part.strip() for part in text.partition("-"))
    numbers = (first, last if dash else first)
    if not all(number.isdecimal() for number in numbers) or not 0 < int(first) <= int(numbers[1]) <= MAX_PORT:
        raise ConfigurationError(
            f"ports must be PORT or FIRST-LAST, from 1 to {MAX_PORT}, as 29600-29631, not {text!r}"
        )
    return int(first), int(numbers[1])


def only_port(ports: tuple[int, int] | None) -> int | None:
    """Return the port of a range that has one."""
    return ports[0] if ports is not None and ports[0] == ports[1] else None


def without_brackets(host: str) -> str:
    """Return ``"::1"`` for ``"[::1]"``, and anything else as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_ipv6(text: str) -> bool:
    """Whether ``text`` is an IPv6 address, with or without a scope such as ``%eth0``."""
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def own_address(master_address: str | None, *, what: str = "MASTER_ADDR") -> str | None:
    """Return the address from which this machine reaches another; None if that is this machine's IPv4 loopback.

    ``what`` names it in an error.
    """
    if master_address is None:
        return None
    try:
        found = socket.getaddrinfo(master_address, 9, type=socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"{what} {master_address!r} cannot be resolved ({error}); give a name that this host knows, or an address"
        ) from error
    family, kind, protocol, _, address = found
    master = ipaddress.ip_address(str(address[0]))
    if master.is_loopback:
        return str(master) if master.version == 6 else None
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(address)  # a datagram socket sends nothing here; it only learns its route
        except OSError as error:
            raise ConfigurationError(
                f"There is no route to {what} {master_address!r} ({error}); give init(interface=), or "
                "SYNCLINE_INTERFACE, the address that the other ranks reach"
            ) from error
        return str(probe.getsockname()[0])
