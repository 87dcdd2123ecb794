"""A topology drawn as a tree for people."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.topology.tree import Host, Link, Node, Rank, Socket, walk
from syncline.units import format_duration, format_rate, format_size


def render_topology(name: str, root: Node) -> str:
    """Draw one node a line; the ranks of a host or socket stand on its own line where their links do not limit."""
    nodes = list(walk(root))
    num_hosts, num_ranks = (sum(isinstance(node, kind) for node in nodes) for kind in (Host, Rank))
    ranks, hosts = ("rank" if num_ranks == 1 else "ranks"), ("host" if num_hosts == 1 else "hosts")
    rows = [(root.name, _note(root)), *_rows(root, "")]
    width = max(len(branch) for branch, _ in rows) + 2
    lines = [f"{name}: {num_ranks} {ranks} on {num_hosts} {hosts}"]
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
    """Spell a link: ``"1 Gbit/s"``, ``"up 1 Gbit/s, down 2 Gbit/s, 5 ms"``."""
    up, down = format_rate(link.up_bytes_per_s), format_rate(link.down_bytes_per_s)
    rates = up if link.up_bytes_per_s == link.down_bytes_per_s else f"up {up}, down {down}"
    return f"{rates}, {format_duration(link.latency_s)}" if link.latency_s else rates


def _spell(numbers: list[int]) -> str:
    is_run = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]} to {numbers[-1]}" if is_run and len(numbers) > 2 else ", ".join(map(str, numbers))
