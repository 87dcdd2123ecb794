"""A topology as text: a tree for people, a flowchart, a picture, and YAML, of which reading gives an equal topology."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from html import escape

import yaml

from syncline.priorities.settings import Priorities
from syncline.topology.tree import Host, Link, Node, Rank, Socket, Switch, walk
from syncline.units import counted, format_duration, format_rate, format_share, format_size

BOX, COLUMN, ROW, NOTES = 110, 310, 28, 210
"""Of a picture: widths of a node, of it and the link beside it, height of a host, and width of what is told of it."""


def render_topology(name: str, root: Node) -> str:
    """Draw one node a line; the ranks of a host or socket stand on its own line where their links do not limit."""
    nodes = list(walk(root))
    num_hosts, num_ranks = (sum(isinstance(node, kind) for node in nodes) for kind in (Host, Rank))
    rows = [(root.name, _note(root)), *_rows(root, "")]
    width = max(len(branch) for branch, _ in rows) + 2
    lines = [f"{name}: {counted(num_ranks, 'rank')} on {counted(num_hosts, 'host')}"]
    lines += [f"{branch.ljust(width)}{note}".rstrip() for branch, note in rows]
    return "\n".join(lines)


def render_flowchart(root: Node) -> str:
    """Write the tree as a Mermaid flowchart: links that limit nothing have no rate on them."""
    nodes = [node for node in walk(root) if not isinstance(node, Rank)]
    numbers = {node.name: f"n{number}" for number, node in enumerate(nodes)}
    lines = ["flowchart TD"]
    lines += [f'    {numbers[node.name]}["{node.name}"]' for node in nodes]
    for node in nodes:
        for child in node.children:
            if isinstance(child, Rank) or child.link is None:
                continue
            label = "" if child.link == Link.unlimited() else f'|"{describe_link(child.link)}"|'
            lines.append(f"    {numbers[node.name]} ---{label} {numbers[child.name]}")
    return "\n".join(lines)


def render_picture(name: str, root: Node) -> str:
    """Draw the tree as SVG, the root on the left; the more a link carries, the broader it is."""
    links = [node.link for node in walk(root) if node.link is not None and node.link != Link.unlimited()]
    slowest = min((_slower_way(link) for link in links), default=1.0)
    drawn: list[str] = []
    height = _draw(root, 0, 0, slowest, drawn)
    depth = 1 + max(_depths(root, 0))
    size = f'viewBox="0 0 {COLUMN * depth + NOTES} {ROW * height}" font-family="sans-serif" font-size="12"'
    title = f"<title>{escape(name)}</title>"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', title, *drawn, "</svg>"])


def _draw(node: Node, depth: int, row: int, slowest: float, drawn: list[str]) -> int:
    """Draw a node and all below it from this row on; return how many rows they take."""
    x, y = COLUMN * depth, ROW * row + ROW // 2
    below = row
    for child in _shown_children(node):
        child_y, end_x = ROW * below + ROW // 2, x + COLUMN
        width = 1.5
        if child.link is not None and child.link != Link.unlimited():
            width += math.log2(_slower_way(child.link) / slowest)
        way = f"M {x + BOX} {y} H {x + BOX + 8} V {child_y} H {end_x}"
        drawn.append(f'<path d="{way}" fill="none" stroke="#5b7a99" stroke-width="{width:.1f}"/>')
        below += _draw(child, depth + 1, below, slowest, drawn)
    kind = "#dfe9f3" if isinstance(node, Switch) else "#e8f2e0"
    box = f'x="{x + 1}" y="{y - 10}" width="{BOX - 1}" height="20" rx="4"'
    drawn.append(f'<rect {box} fill="{kind}" stroke="#5b7a99"/>')
    drawn.append(f'<text x="{x + BOX / 2}" y="{y + 4}" text-anchor="middle">{escape(node.name)}</text>')
    if note := _note(node):
        above = x - COLUMN + BOX + 12, y - 6
        at = (x + BOX + 6, y + 4) if not _shown_children(node) else above
        drawn.append(f'<text x="{at[0]}" y="{at[1]}" fill="#555">{escape(note)}</text>')
    return max(1, below - row)


def _depths(node: Node, depth: int) -> Iterator[int]:
    yield depth
    for child in _shown_children(node):
        yield from _depths(child, depth + 1)


def _slower_way(link: Link) -> float:
    return min(link.up_bytes_per_s, link.down_bytes_per_s)


def _rows(node: Node, indent: str) -> Iterator[tuple[str, str]]:
    children = _shown_children(node)
    for child in children:
        is_last = child is children[-1]
        yield f"{indent}{'└── ' if is_last else '├── '}{child.name}", _note(child)
        yield from _rows(child, indent + ("    " if is_last else "│   "))


def _shown_children(node: Node) -> tuple[Node, ...]:
    if all(isinstance(child, Rank) and child.link == Link.unlimited() for child in node.children):
        return ()
    return node.children


def _note(node: Node) -> str:
    parts = [] if node.link is None else [describe_link(node.link)]
    if isinstance(node, Host | Socket) and not _shown_children(node):
        numbers = [rank.rank for rank in node.children if isinstance(rank, Rank)]
        parts.append(f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {_spell(numbers)}")
    if isinstance(node, Host):
        parts += _host_notes(node)
    return "  ".join(parts)


def _host_notes(host: Host) -> Iterator[str]:
    if host.gateway in ("one", "helper"):
        yield f"{'gateway' if host.gateway == 'one' else 'helper'} rank {host.ranks[0].rank}"
    elif host.gateway == "auto":
        yield "gateway auto"
    if host.memory_bytes is not None:
        yield format_size(host.memory_bytes)
    if host.features:
        yield ", ".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in host.features.items()
        )


def describe_link(link: Link) -> str:
    """Spell a link: ``"1 Gbit/s"``, ``"up 1 Gbit/s, down 2 Gbit/s, 5 ms, 0.2 % lost"``."""
    up, down = format_rate(link.up_bytes_per_s), format_rate(link.down_bytes_per_s)
    rates = up if link.up_bytes_per_s == link.down_bytes_per_s else f"up {up}, down {down}"
    latency = f", {format_duration(link.latency_s)}" if link.latency_s else ""
    return rates + latency + (f", {format_share(link.loss_share)} lost" if link.loss_share else "")


def _spell(numbers: list[int]) -> str:
    is_run = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]} to {numbers[-1]}" if is_run and len(numbers) > 2 else ", ".join(map(str, numbers))


def write_document(name: str, root: Node, priorities: Priorities | None) -> str:
    """Write the whole file."""
    document: dict[str, object] = {"topology": name}
    numbers = [node.rank for node in walk(root) if isinstance(node, Rank)]
    if numbers != sorted(numbers):
        document["rank_numbers"] = numbers
    if priorities is not None:
        document["priorities"] = _priorities_entry(priorities)
    text: str = yaml.safe_dump(document | _entry(root), default_flow_style=None, width=10**9, sort_keys=False)
    return text


def _priorities_entry(priorities: Priorities) -> dict[str, object]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(priorities).items()}


def _entry(node: Node) -> dict[str, object]:
    if isinstance(node, Host):
        return _host_entry(node)
    uplink = {} if node.link is None else {"uplink": _link_entry(node.link)}
    return {"switch": node.name} | uplink | {"children": [_entry(child) for child in node.children]}


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
    more = {"latency": format_duration(link.latency_s, exact=True)} if link.latency_s else {}
    if link.loss_share:
        more["loss"] = format_share(link.loss_share)
    if link.up_bytes_per_s != link.down_bytes_per_s:
        return {"up": up, "down": down, **more}
    return {"rate": up, **more} if more else up
