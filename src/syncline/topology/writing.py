"""A topology written as YAML, one host a line, so that reading it gives an equal topology."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import yaml

from syncline.priorities.settings import Priorities
from syncline.topology.tree import Host, Link, Node, Rank, Socket, Switch, walk
from syncline.units import format_duration, format_rate

_INDENT = "  "


def write_document(name: str, root: Node, priorities: Priorities | None) -> str:
    """Write the whole file."""
    lines = [f"topology: {_scalar(name)}"]
    numbers = [node.rank for node in walk(root) if isinstance(node, Rank)]
    if numbers != sorted(numbers):
        lines.append(f"rank_numbers: {_flow(numbers)}")
    if priorities is not None:
        lines.append(f"priorities: {_flow(_priorities_entry(priorities))}")
    if isinstance(root, Host):
        lines += [f"{key}: {_flow(value)}" for key, value in _host_entry(root).items()]
    else:
        lines += [f"switch: {_scalar(root.name)}", "children:"]
        lines += [line for child in root.children for line in _child_lines(child, _INDENT)]
    return "\n".join(lines) + "\n"


def _priorities_entry(priorities: Priorities) -> dict[str, object]:
    entry = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(priorities).items()}
    return entry | {"max_message_bytes": f"{priorities.max_message_bytes} B"}


def _child_lines(node: Node, indent: str) -> Iterator[str]:
    if isinstance(node, Host):
        yield f"{indent}- {_flow(_host_entry(node))}"
        return
    assert isinstance(node, Switch)
    assert node.link is not None
    yield f"{indent}- switch: {_scalar(node.name)}"
    yield f"{indent}  uplink: {_flow(_link_entry(node.link))}"
    yield f"{indent}  children:"
    for child in node.children:
        yield from _child_lines(child, indent + _INDENT * 2)


def _host_entry(host: Host) -> dict[str, object]:
    entry: dict[str, object] = {"host": host.name}
    if host.link is not None:
        entry["uplink"] = _link_entry(host.link)
    entry |= _inner_entry(host)
    if host.features:
        entry["features"] = dict(host.features)
    if host.memory_bytes is not None:
        entry["memory"] = f"{host.memory_bytes} B"
    if host.gateway != "every":
        entry["gateway"] = host.gateway
    return entry


def _inner_entry(node: Host | Socket) -> dict[str, object]:
    """Write the sockets below ``node``, or else its ranks."""
    sockets = [child for child in node.children if isinstance(child, Socket)]
    if sockets:
        return {"children": [_socket_entry(socket) for socket in sockets]}
    links = [child.link for child in node.children if isinstance(child, Rank)]
    entry: dict[str, object] = {"ranks": len(links)} if len(links) > 1 else {}
    if any(link != links[0] for link in links):
        entry["local"] = [_link_entry(link) for link in links]
    elif links[0] != Link.unlimited():
        entry["local"] = _link_entry(links[0])
    return entry


def _socket_entry(socket: Socket) -> dict[str, object]:
    return {"socket": socket.own_name, "uplink": _link_entry(socket.link)} | _inner_entry(socket)


def _link_entry(link: Link) -> object:
    up, down = (format_rate(rate, exact=True) for rate in (link.up_bytes_per_s, link.down_bytes_per_s))
    latency = {"latency": format_duration(link.latency_s, exact=True)} if link.latency_s else {}
    if link.up_bytes_per_s != link.down_bytes_per_s:
        return {"up": up, "down": down, **latency}
    return {"rate": up, **latency} if latency else up


def _flow(value: object) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _scalar(text: str) -> str:
    return _flow(text)
