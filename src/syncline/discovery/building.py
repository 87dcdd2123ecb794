"""A fitted tree as a topology: hosts and switches with names, the root where most of them are near.

Measurements tell which hosts a link divides from which others, and not which of the two sides is the upper one. So the
root is put where every link has at least as many hosts above it as below.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace

from syncline.discovery.tree_search import FittedTree, Set, children
from syncline.topology import Host, Link, Switch, Topology
from syncline.units import format_rate

ALIKE = 1.25
"""Rates that differ by less are told as one."""


def build_topology(tree: FittedTree, flat: Topology, *, name: str) -> Topology:
    """Return ``flat``, which has one switch for all of its hosts, with the switches and rates that were found.

    ``flat.hosts[k]`` is the tree's host k.
    """
    sides = _downward(tree)
    taken = {node.name for node in flat.walk()}
    names = (each for each in _switch_names() if each not in taken)

    def build(above: Set, link: Link | None, name: str) -> Switch:
        nodes = sorted(children(tree.num_hosts, sides, above), key=min)
        parts: list[Switch | Host] = []
        for node in nodes:
            if node in sides:
                parts.append(build(node, sides[node], next(names)))
            else:
                (host,) = node
                link_of_host = Link(up_bytes_per_s=tree.up[node], down_bytes_per_s=tree.down[node])
                parts.append(replace(flat.hosts[host], link=link_of_host))
        return Switch(name=name, link=link, children=tuple(parts))

    root = next(each for each in ("switch", *map("switch-{}".format, range(len(taken)))) if each not in taken)
    return Topology(name=name, root=build(frozenset(range(tree.num_hosts)), None, root))


def _downward(tree: FittedTree) -> dict[Set, Link]:
    """Return the link above each switch, as the set of hosts below it: the side with fewer hosts.

    Where one link divides all, both sides get a switch: two racks look like two racks.
    """
    everyone = frozenset(range(tree.num_hosts))
    links: dict[Set, Link] = {}
    for switch in tree.switches:
        link = Link(up_bytes_per_s=tree.up[switch], down_bytes_per_s=tree.down[switch])
        below = min(switch, everyone - switch, key=lambda side: (len(side), min(side)))
        links[below] = link if below == switch else _turned(link)
    if len(links) == 1:
        ((below, link),) = links.items()
        if len(everyone - below) > 1:
            links[everyone - below] = _turned(link)
    return {below: link for below, link in links.items() if len(below) > 1}


def _turned(link: Link) -> Link:
    return Link(up_bytes_per_s=link.down_bytes_per_s, down_bytes_per_s=link.up_bytes_per_s)


def _switch_names() -> Iterator[str]:
    yield from (f"rack-{letter}" for letter in string.ascii_lowercase)
    yield from (f"rack-{number}" for number in range(10**6))


def describe_topology(topology: Topology) -> str:
    """Say in a few words what was found: ``"2 racks of 5 and 3 hosts, uplinks about 200 Mbit/s"``."""
    racks = [child for child in topology.root.children if isinstance(child, Switch)]
    alone = len(topology.root.children) - len(racks)
    if not racks:
        return f"{len(topology.hosts)} hosts at one switch, {_rates(topology.hosts)}"
    sizes = [sum(rack in topology.path(host.ranks[0].rank) for host in topology.hosts) for rack in racks]
    *most, last = map(str, sorted(sizes, reverse=True))
    named = f"{', '.join(most)} and {last}" if most else last
    beside = f" and {alone} host{'s' * (alone > 1)} beside" if alone else ""
    return f"{len(racks)} rack{'s' * (len(racks) > 1)} of {named} hosts{beside}, uplinks {_rates(racks)}"


def _rates(nodes: Sequence[Switch | Host]) -> str:
    rates = [rate for node in nodes if node.link for rate in (node.link.up_bytes_per_s, node.link.down_bytes_per_s)]
    least, most = min(rates), max(rates)
    if most < ALIKE * least:
        return f"about {_rounded(math.sqrt(least * most))}"
    return f"of {_rounded(least)} to {_rounded(most)}"


def _rounded(bytes_per_s: float) -> str:
    return format_rate(float(f"{8 * bytes_per_s:.2g}") / 8)
