"""``syncline doctor --path`` and ``--listen``: whether DSCP marks survive to another machine and back.

A probe is a datagram that says with which mark it was sent. The responder answers with the mark under which it arrived,
by the same mark, so both directions are seen. A responder is harmless: it answers with no more bytes than it got, a
bounded number of times and for a bounded time, and where a secret is shared only to those who have it.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from syncline.endpoints import PROBE_PORT, format_endpoint, parse_endpoint
from syncline.errors import ConfigurationError
from syncline.fabric.sockets import CONTROL_DSCP
from syncline.priorities.settings import Priorities
from syncline.report.terminal import answer, new_table

MAX_ANSWERS = 10_000
TRIES = 3
WAIT_S = 0.5
PROBE, ANSWER = b"probe", b"answer"
_BODY = struct.Struct("!16sBB")
"""A nonce, the mark that it was sent with, and in an answer the mark under which that arrived."""
PACKET_BYTES = _BODY.size + 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PathMark:
    """What became of one mark; None where no answer came."""

    sent: int
    arrived: int | None
    """Under which mark the probe arrived at the other end."""
    returned: int | None
    """Under which mark the answer, sent with ``sent``, arrived here."""

    @property
    def survived(self) -> bool:
        """Whether the mark was kept in both directions."""
        return self.arrived == self.returned == self.sent


def seal(kind: bytes, key: bytes, nonce: bytes, mark: int, arrived: int = 0) -> bytes:
    """Return a packet, all of the same length."""
    body = _BODY.pack(nonce, mark, arrived)
    return body + hmac.digest(b"syncline path marks 2\0" + kind + key, body, "sha256")


def unseal(kind: bytes, key: bytes, packet: bytes) -> tuple[bytes, int, int] | None:
    """Return nonce, mark and the mark under which that arrived; None if this is no packet of the kind and key."""
    if len(packet) != PACKET_BYTES:
        return None
    nonce, mark, arrived = _BODY.unpack(packet[: _BODY.size])
    return (nonce, mark, arrived) if hmac.compare_digest(seal(kind, key, nonce, mark, arrived), packet) else None


def probe_path(
    host: str,
    port: int,
    marks: Sequence[int],
    *,
    key: bytes = b"",
    wait_s: float = WAIT_S,
) -> tuple[PathMark, ...]:
    """Send each mark to the responder at ``host`` and return what became of it; at most ``TRIES * wait_s`` for each."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"'{host}' cannot be resolved ({error}); give a host name or an address") from error
    with open_mark_socket(family) as sock:
        try:
            sock.connect(address)
        except OSError as error:
            raise ConfigurationError(
                f"there is no route to {format_endpoint(host, port)} ({error.strerror}); check address and network"
            ) from error
        return tuple(_probe(sock, mark, key, wait_s) for mark in marks)


def respond(
    sock: socket.socket, *, for_s: float, key: bytes = b"", max_answers: int = MAX_ANSWERS, is_over: Callable[[], bool]
) -> int:
    """Answer probes on ``sock`` until ``for_s`` have passed, ``max_answers`` were given or ``is_over``; count them.

    Whatever is not a probe with the right key is ignored.
    """
    ends_s = time.monotonic() + for_s
    num_answers = 0
    while num_answers < max_answers and not is_over() and (left_s := ends_s - time.monotonic()) > 0:
        received = _receive(sock, min(left_s, 0.2))
        if received is None:
            continue
        packet, arrived, sender = received
        told = unseal(PROBE, key, packet)
        if told is not None and told[1] < 64:  # a mark has six bits
            _set_mark(sock, told[1], sender)
            sock.sendto(seal(ANSWER, key, *told[:2], arrived), sender)
            num_answers += 1
    return num_answers


def open_mark_socket(family: int, address: tuple[str, int] | None = None) -> socket.socket:
    """Return a datagram socket that is told the mark of what arrives; bound to ``address``, if there is one.

    An IPv6 socket on the wildcard address takes IPv4 too.
    """
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, 1)
        if address is not None:
            sock.bind(address)
    except OSError as error:
        sock.close()
        where = format_endpoint(*address) if address else "any port"
        raise ConfigurationError(f"cannot listen on {where}: {error.strerror}; give another port") from error
    return sock


def _probe(sock: socket.socket, mark: int, key: bytes, wait_s: float) -> PathMark:
    nonce = secrets.token_bytes(16)
    _set_mark(sock, mark, sock.getpeername())
    for _ in range(TRIES):
        ends_s = time.monotonic() + wait_s
        try:
            found = _ask(sock, mark, nonce, key, ends_s)
        except OSError:  # nobody listens there, or not yet
            found = None
            time.sleep(max(0.0, ends_s - time.monotonic()))
        if found is not None:
            return found
    return PathMark(sent=mark, arrived=None, returned=None)


def _ask(sock: socket.socket, mark: int, nonce: bytes, key: bytes, ends_s: float) -> PathMark | None:
    """Send one probe and wait for its answer."""
    sock.send(seal(PROBE, key, nonce, mark))
    while (left_s := ends_s - time.monotonic()) > 0:
        packet, returned, _ = _receive(sock, left_s) or (b"", 0, None)
        told = unseal(ANSWER, key, packet)
        if told is not None and told[:2] == (nonce, mark):
            return PathMark(sent=mark, arrived=told[2], returned=returned)
    return None


def _receive(sock: socket.socket, wait_s: float) -> tuple[bytes, int, tuple[str, int]] | None:
    """Return a datagram, the mark under which it came, and its sender; None if none comes in time."""
    sock.settimeout(wait_s)
    try:
        packet, ancillary, _, sender = sock.recvmsg(PACKET_BYTES + 1, socket.CMSG_SPACE(4) * 2)
    except TimeoutError:
        return None
    kinds = {(socket.IPPROTO_IP, socket.IP_TOS), (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)}
    field = next(data for level, kind, data in ancillary if (level, kind) in kinds)
    return packet, int.from_bytes(field, sys.byteorder) >> 2, sender


def _set_mark(sock: socket.socket, mark: int, peer: tuple[str, int]) -> None:
    """Mark what is sent to ``peer``; an IPv6 socket that talks to an IPv4 address has two kinds of mark."""
    if sock.family == socket.AF_INET6 and not peer[0].startswith("::ffff:"):
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, mark << 2)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, mark << 2)


def show_path(text: str, *, as_json: bool, key: bytes) -> int:
    """Probe every mark that Syncline uses by default, print what became of it, and return the exit code."""
    host, port = parse_endpoint(text, default_port=PROBE_PORT, what="--path")
    names = class_names(Priorities())
    found = probe_path(host, port, list(names), key=key)
    verdict = judge_path(found, host, port)
    marks = [asdict(one) | {"classes": names[one.sent], "survived": one.survived} for one in found]
    told = {"path": format_endpoint(host, port), "marks": marks, "verdict": verdict}

    def show(console: Console) -> None:
        console.print(_table(found, names, host, port))
        console.print(verdict)

    answer(told, show, as_json=as_json)
    return 0 if any(one.survived for one in found) else 1


def listen_for_probes(port: int, *, for_s: float, key: bytes) -> None:
    """Answer probes until the time is over or the user has enough."""
    with _open_everywhere(port) as sock:
        print(f"answering on port {sock.getsockname()[1]} for {for_s:g} s", flush=True)
        try:
            num_answers = respond(sock, for_s=for_s, key=key, is_over=lambda: False)
        except KeyboardInterrupt:
            return
    print(f"gave {num_answers} answers")


def class_names(priorities: Priorities) -> dict[int, str]:
    """Return what travels under each mark."""
    names = {CONTROL_DSCP: "control"}
    for number, mark in enumerate(priorities.dscp or ()):
        names[mark] = f"{names[mark]}, class {number}" if mark in names else f"class {number}"
    return names


def judge_path(found: Sequence[PathMark], host: str, port: int) -> str:
    """Say what the marks' fate means, and what to do."""
    where = format_endpoint(host, port)
    if all(one.arrived is None for one in found):
        return (
            f"No answer from {where}: run `syncline doctor --listen --port {port}` there (with the same secret file, "
            "if there is one), and let UDP through to that port."
        )
    if all(one.survived for one in found):
        return "All marks survive in both directions: switches on the way can order what Syncline sends."
    lost = {
        "on the way there": [str(one.sent) for one in found if one.arrived != one.sent],
        "on the way back": [str(one.sent) for one in found if one.returned != one.sent],
    }
    ways = [f"{', '.join(marks)} {way}" for way, marks in lost.items() if marks]
    return (
        f"Marks are changed or lost: {'; '.join(ways)}. On each switch and router of the path, trust DSCP on the ports "
        "of these hosts (often `mls qos trust dscp`, `qos trust dscp`, or no policy that rewrites it); clouds and "
        "providers often clear marks for good. Training works without: then the receivers' grants alone order the "
        "senders."
    )


def _open_everywhere(port: int) -> socket.socket:
    """Listen on IPv4 and IPv6; on IPv4 alone where the kernel was started without IPv6."""
    with contextlib.suppress(OSError):
        return open_mark_socket(socket.AF_INET6, ("::", port))
    return open_mark_socket(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104 - others are to reach it


def _table(found: Sequence[PathMark], names: dict[int, str], host: str, port: int) -> Table:
    title = f"DSCP marks to {format_endpoint(host, port)}"
    table = new_table("what", "sent", "arrived there", "came back", title=title, pad_edge=True)
    table.add_column("")
    for one in found:
        verdict = "[green]kept[/]" if one.survived else "[yellow]changed[/]"
        if one.arrived is None:
            verdict = "[red]no answer[/]"
        marks = ("-" if mark is None else str(mark) for mark in (one.sent, one.arrived, one.returned))
        table.add_row(names[one.sent], *marks, verdict)
    return table
