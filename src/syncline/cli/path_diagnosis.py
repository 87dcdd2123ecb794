"""``syncline doctor --path`` and ``--listen``: whether DSCP marks survive to another machine and back.

A probe is a datagram that says with which mark it was sent. The responder answers with the mark under which it arrived,
by the same mark, so both directions are seen. A responder is harmless: it answers with no more bytes than it got, a
bounded number of times and for a bounded time, and where a secret is shared only to those who have it.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from syncline.endpoints import PROBE_PORT, format_endpoint, parse_endpoint
from syncline.errors import ConfigurationError
from syncline.fabric.sockets import CONTROL_DSCP
from syncline.priorities.settings import Priorities
from syncline.pytorch.secret import read_secret, read_secret_file
from syncline.report.terminal import new_table
from syncline.variables import process_variables

MAX_ANSWERS = 10_000
TRIES = 3
WAIT_S = 0.5
_MAGIC_PROBE, _MAGIC_ANSWER = b"SLmarkQ1", b"SLmarkA1"
_BODY = struct.Struct("!8s16sBB6x")
_MAC_BYTES = 32
PACKET_BYTES = _BODY.size + _MAC_BYTES
UNKNOWN = 255
"""In place of a mark that the kernel did not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathMark:
    """What became of one mark; None where no answer came or the kernel did not tell."""

    sent: int
    arrived: int | None
    """Under which mark the probe arrived at the other end."""
    returned: int | None
    """Under which mark the answer, sent with ``sent``, arrived here."""

    @property
    def survived(self) -> bool:
        """Whether the mark was kept in both directions."""
        return self.arrived == self.returned == self.sent


def make_probe(mark: int, nonce: bytes, key: bytes) -> bytes:
    """Return a probe that is sent with ``mark``."""
    return _sign(_BODY.pack(_MAGIC_PROBE, nonce, mark, UNKNOWN), key)


def make_answer(probe: bytes, arrived: int | None, key: bytes) -> tuple[bytes, int] | None:
    """Return the answer to a probe and the mark to send it with; None if the probe is not one of ours."""
    body = _verify(probe, key)
    if body is None or body[0] != _MAGIC_PROBE or body[2] > 63:
        return None
    _, nonce, mark, _ = body
    return _sign(_BODY.pack(_MAGIC_ANSWER, nonce, mark, UNKNOWN if arrived is None else arrived), key), mark


def read_answer(answer: bytes, nonce: bytes, mark: int, key: bytes) -> int | None:
    """Return the mark under which the probe arrived (``UNKNOWN``: not told); None if this is no answer to it."""
    body = _verify(answer, key)
    if body is None or body[:3] != (_MAGIC_ANSWER, nonce, mark):
        return None
    return int(body[3])


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
    except OSError as error:
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
        answer = make_answer(packet, arrived, key)
        if answer is not None:
            _set_mark(sock, answer[1], sender)
            sock.sendto(answer[0], sender)
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
    sock.send(make_probe(mark, nonce, key))
    while (left_s := ends_s - time.monotonic()) > 0:
        received = _receive(sock, left_s)
        arrived = read_answer(received[0], nonce, mark, key) if received else None
        if received is not None and arrived is not None:
            return PathMark(sent=mark, arrived=None if arrived == UNKNOWN else arrived, returned=received[1])
    return None


def _receive(sock: socket.socket, wait_s: float) -> tuple[bytes, int | None, tuple[str, int]] | None:
    """Return a datagram, the mark under which it came, and its sender; None if none comes in time."""
    sock.settimeout(wait_s)
    try:
        packet, ancillary, _, sender = sock.recvmsg(PACKET_BYTES + 1, socket.CMSG_SPACE(4) * 2)
    except TimeoutError:
        return None
    wanted = {(socket.IPPROTO_IP, socket.IP_TOS), (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)}
    fields = [int.from_bytes(data, sys.byteorder) for level, kind, data in ancillary if (level, kind) in wanted]
    return packet, fields[0] >> 2 if fields else None, sender


def _set_mark(sock: socket.socket, mark: int, peer: tuple[str, int]) -> None:
    """Mark what is sent to ``peer``; an IPv6 socket that talks to an IPv4 address has two kinds of mark."""
    if sock.family == socket.AF_INET6 and not peer[0].startswith("::ffff:"):
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, mark << 2)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, mark << 2)


def _sign(body: bytes, key: bytes) -> bytes:
    return body + hmac.digest(b"syncline path marks 1\0" + key, body, "sha256")


def _verify(packet: bytes, key: bytes) -> tuple[bytes, bytes, int, int] | None:
    if len(packet) != PACKET_BYTES or not hmac.compare_digest(_sign(packet[: _BODY.size], key), packet):
        return None
    magic, nonce, mark, arrived = _BODY.unpack(packet[: _BODY.size])
    return magic, nonce, mark, arrived


def choose_key(secret_file: Path | None) -> bytes:
    """Return what probes are authenticated with: the secret of the file, else of the variables; empty without one."""
    if secret_file is not None:
        return read_secret_file(secret_file, who="--secret-file")
    return read_secret(process_variables()) or b""


def show_path(text: str, *, as_json: bool, key: bytes) -> int:
    """Probe every mark that Syncline uses by default, print what became of it, and return the exit code."""
    host, port = parse_endpoint(text, default_port=PROBE_PORT, what="--path")
    names = class_names(Priorities())
    found = probe_path(host, port, list(names), key=key)
    verdict = judge_path(found, host, port)
    if as_json:
        marks = [asdict(one) | {"classes": names[one.sent], "survived": one.survived} for one in found]
        print(json.dumps({"path": format_endpoint(host, port), "marks": marks, "verdict": verdict}, indent=2))
    else:
        _print_table(found, names, host, port)
        Console(highlight=False).print(verdict)
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
    control = CONTROL_DSCP
    names = {control: "control"}
    for number, mark in enumerate(priorities.dscp or ()):
        names[mark] = f"{names[mark]}, class {number}" if mark in names else f"class {number}"
    return names


def judge_path(found: Sequence[PathMark], host: str, port: int) -> str:
    """Say what the marks' fate means, and what to do."""
    where = format_endpoint(host, port)
    if all(one.arrived is None and one.returned is None for one in found):
        return (
            f"No answer from {where}: run `syncline doctor --listen --port {port}` there (with the same secret file, "
            "if there is one), and let UDP through to that port."
        )
    if all(one.survived for one in found):
        return "All marks survive in both directions: switches on the way can order what Syncline sends."
    lost_there = [one.sent for one in found if one.arrived != one.sent]
    lost_back = [one.sent for one in found if one.returned != one.sent]
    ways = [
        f"{_list(marks)} {verb}"
        for marks, verb in ((lost_there, "on the way there"), (lost_back, "on the way back"))
        if marks
    ]
    return (
        f"Marks are changed or lost: {'; '.join(ways)}. On each switch and router of the path, trust DSCP on the ports "
        "of these hosts (often `mls qos trust dscp`, `qos trust dscp`, or no policy that rewrites it); clouds and "
        "providers often clear marks for good. Training works without: then the receivers' grants alone order the "
        "senders."
    )


def _open_everywhere(port: int) -> socket.socket:
    """Listen on IPv4 and IPv6; on IPv4 alone where the machine has no IPv6."""
    if socket.has_ipv6:
        try:
            return open_mark_socket(socket.AF_INET6, ("::", port))
        except OSError:  # the kernel was started without it
            pass
    return open_mark_socket(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104 - others are to reach it


def _print_table(found: Sequence[PathMark], names: dict[int, str], host: str, port: int) -> None:
    title = f"DSCP marks to {format_endpoint(host, port)}"
    table = new_table("what", "sent", "arrived there", "came back", title=title, pad_edge=True)
    table.add_column("")
    for one in found:
        verdict = "[green]kept[/]" if one.survived else "[yellow]changed[/]"
        if one.arrived is None and one.returned is None:
            verdict = "[red]no answer[/]"
        table.add_row(names[one.sent], str(one.sent), _text(one.arrived), _text(one.returned), verdict)
    Console().print(table)


def _text(mark: int | None) -> str:
    return "-" if mark is None else str(mark)


def _list(marks: Sequence[int]) -> str:
    return ", ".join(map(str, marks))
