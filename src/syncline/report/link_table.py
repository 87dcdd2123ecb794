"""The table of links: what crossed each of them in each direction, and how busy it was."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.table import Table

from syncline.topology import DirectedLink, Link, Node, Rank, Socket, Topology
from syncline.units import format_rate, format_size


def network_links(topology: Topology) -> list[tuple[str, Link, int]]:
    """List the links above switches and hosts, with their names and depth; the others are inside a machine.

    >>> [(name, depth) for name, _, depth in network_links(Topology.flat(2))]
    [('h0', 0), ('h1', 0)]
    """
    found: list[tuple[str, Link, int]] = []

    def visit(node: Node, depth: int) -> None:
        if isinstance(node, Rank | Socket):
            return
        if node.link is not None:
            found.append((node.name, node.link, depth))
        for child in node.children:
            visit(child, depth if node.link is None else depth + 1)

    visit(topology.root, 0)
    return found


def format_rates(link: Link) -> str:
    """Spell a link's rate in bits per second, or both where up and down differ.

    >>> from syncline.topology import Link
    >>> format_rates(Link(up_bytes_per_s=125e6, down_bytes_per_s=12.5e6))
    '1 Gbit/s / 100 Mbit/s'
    """
    up, down = format_rate(link.up_bytes_per_s), format_rate(link.down_bytes_per_s)
    return up if up == down else f"{up} / {down}"


def link_table(
    topology: Topology,
    amounts: Mapping[DirectedLink, int],
    *,
    title: str,
    beside: Mapping[str, Mapping[DirectedLink, int]] | None = None,
) -> Table:
    """Lay out ``amounts`` (bytes) for rich, a row for each link; the one that its bytes keep busy longest is marked.

    ``beside``: other amounts to compare with, by what stands above their columns: the bytes of the busier way.

    >>> from syncline.topology import DirectedLink
    >>> link_table(Topology.flat(2, rate=1e6), {DirectedLink("h0", "up"): 4096}, title="links").row_count
    2
    """
    links = network_links(topology)
    seconds = {name: _busy_s(name, link, amounts) for name, link, _ in links}
    busiest_s = max(seconds.values(), default=0.0)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("link above")
    others = beside or {}
    above = "\n" if others else ""
    for heading in ("up", "down", "rate", "needs"):
        table.add_column(above + heading, justify="right")
    for other in others:
        for heading in (f"{other}\nbytes", "\nneeds"):
            table.add_column(heading, justify="right")
    for name, link, depth in links:
        table.add_row(
            "  " * depth + name,
            format_size(amounts.get(DirectedLink(name, "up"), 0)),
            format_size(amounts.get(DirectedLink(name, "down"), 0)),
            format_rates(link),
            _format_s(seconds[name]),
            *(cell for each in others.values() for cell in _busier_way(name, link, each)),
            style="bold yellow" if seconds[name] == busiest_s > 0 else "",
        )
    return table


def _busier_way(name: str, link: Link, amounts: Mapping[DirectedLink, int]) -> tuple[str, str]:
    most = max(amounts.get(DirectedLink(name, "up"), 0), amounts.get(DirectedLink(name, "down"), 0))
    return format_size(most), _format_s(_busy_s(name, link, amounts))


def _format_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds > 0 else "-"


def _busy_s(name: str, link: Link, amounts: Mapping[DirectedLink, int]) -> float:
    """How long the link is busy at least; its two directions work at once."""
    up_s = amounts.get(DirectedLink(name, "up"), 0) / link.up_bytes_per_s
    down_s = amounts.get(DirectedLink(name, "down"), 0) / link.down_bytes_per_s
    return max(up_s, down_s)
