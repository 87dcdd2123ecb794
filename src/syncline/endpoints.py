"""Where a process listens: a host and a port, read and written in one place. IPv6 addresses stand in brackets."""

from __future__ import annotations

import ipaddress

from syncline.errors import ConfigurationError

MAX_PORT = 65535
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


def format_endpoint(host: str, port: int) -> str:
    """Write ``"a1:29500"`` or ``"[fd00::1]:29500"``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_brackets(host: str) -> str:
    """Return ``"::1"`` for ``"[::1]"``, and anything else as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_ipv6(text: str) -> bool:
    """Whether ``text`` is an IPv6 address, with or without a scope such as ``%eth0``."""
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False
