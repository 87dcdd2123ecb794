"""``syncline doctor --path`` and ``--listen``: what becomes of DSCP marks between two machines."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from syncline.endpoints import PROBE_PORT, format_endpoint, parse_endpoint
from syncline.fabric.path_marks import PathMark, open_mark_socket, probe_path, respond
from syncline.fabric.sockets import CONTROL_DSCP
from syncline.priorities.settings import Priorities
from syncline.pytorch.secret import read_secret, read_secret_file
from syncline.report.terminal import new_table
from syncline.variables import process_variables


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
