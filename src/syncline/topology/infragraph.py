"""InfraGraph's graph of devices (infragraph.dev) made into switches; its links carry rates.

A graph has loops where switches stand beside each other: those with the same neighbours (spines, rails) are taken for
one whose links are as wide as theirs together. What is no tree after that is an error.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from syncline.errors import TopologyError
from syncline.topology.cluster_formats import HostPlace, Switches, SwitchPlace
from syncline.topology.marked import MarkedData, read_marked, value_at

Location = tuple[str | int, ...]
Edges = dict[frozenset[str], float]
"""Bytes per second between two devices, all their connections together."""
_COMPUTING = ("npu", "xpu", "gpu", "cpu")
_ACCELERATORS = _COMPUTING[:3]
_BYTES = {"gigabitspersecond": 1e9 / 8, "gbitspersecond": 1e9 / 8, "gbps": 1e9 / 8}
_BYTES |= {"gigabytespersecond": 1e9, "gbytespersecond": 1e9, "gbs": 1e9}
_SLICED = re.compile(r"(?P<name>[\w-]+)(?:\[(?P<start>\d*)(?P<colon>:?)(?P<stop>\d*)\])?", re.ASCII)


def read_infragraph(text: str, label: str) -> Switches:
    """Read an ``infrastructure``: ``instances`` of ``devices``, with ``edges``, or ``connections`` as in older ones."""
    marked = read_marked(text, label=label)
    above = ("infrastructure",) if value_at(marked, ("infrastructure",), dict, None) is not None else ()
    rates = _link_rates(marked, above)
    edges: Edges = defaultdict(float)
    lines: dict[str, int] = {}
    for place, one, other, link in _connections(marked, above):
        if link not in rates:
            raise marked.error(place, f"link {link!r} is not among 'links', which are {', '.join(rates)}; add it")
        edges[frozenset((one, other))] += rates[link]
        for name in (one, other):
            lines.setdefault(name, marked.line_of(place))
    if not edges:
        raise marked.error(above, "nothing is connected; write 'edges:' between instances")
    ranks = _ranks_of(marked, above, lines)
    neighbours = _neighbours(edges)
    hosts = set(ranks) or {name for name, near in neighbours.items() if len(near) == 1}
    edges = _merged(edges, hosts)
    return _tree(marked, edges, hosts, ranks, lines)


def _link_rates(marked: MarkedData, above: tuple[str, ...]) -> dict[str, float]:
    rates = {}
    for index in range(len(value_at(marked, (*above, "links"), list))):
        place: Location = (*above, "links", index)
        told: dict[str, Any] = value_at(marked, (*place, "physical", "bandwidth"), dict, None) or value_at(
            marked, (*place, "bandwidth"), dict, {}
        )
        known = [
            float(value) * _BYTES[key.replace("_", "").lower()]
            for key, value in told.items()
            if key.replace("_", "").lower() in _BYTES
        ]
        rates[value_at(marked, (*place, "name"), str)] = known[0] if known else float("inf")
    return rates


def _connections(marked: MarkedData, above: tuple[str, ...]) -> Iterator[tuple[Location, str, str, str]]:
    """Yield each connection: where it stands, two devices, and the name of its link."""
    for index, told in enumerate(value_at(marked, (*above, "connections"), list, [])):
        parts = str(told).split(".")
        if len(parts) != 9:
            raise marked.error(
                (*above, "connections", index),
                f"{told!r} is not a connection; write 'host.0.nic.0.LINK.switch.0.port.0'",
            )
        yield (*above, "connections", index), f"{parts[0]}-{parts[1]}", f"{parts[5]}-{parts[6]}", parts[4]
    counts = {
        value_at(marked, (*above, "instances", index, "name"), str): value_at(
            marked, (*above, "instances", index, "count"), int, 1
        )
        for index in range(len(value_at(marked, (*above, "instances"), list)))
    }
    for index in range(len(value_at(marked, (*above, "edges"), list, []))):
        place: Location = (*above, "edges", index)
        one, other = (_devices(marked, (*place, end), counts) for end in ("ep1", "ep2"))
        link = value_at(marked, (*place, "link"), str)
        is_many = value_at(marked, (*place, "many2many"), bool, False)
        is_many = is_many or value_at(marked, (*place, "scheme"), str, "") == "many2many"
        if not is_many and len(one) != len(other):
            raise marked.error(place, f"edge of {len(one)} ends to {len(other)}: give both as many, or many2many")
        for first, second in itertools.product(one, other) if is_many else zip(one, other, strict=True):
            yield place, first, second, link


def _devices(marked: MarkedData, location: Location, counts: Mapping[str, int]) -> list[str]:
    """Return the devices of one end of an edge, each as often as its slice of components says."""
    names = []
    for key in ("instance", "component"):
        text = value_at(marked, (*location, key), str)
        match = _SLICED.fullmatch(text)
        if match is None or (key == "instance" and match["name"] not in counts):
            raise marked.error((*location, key), f"{text!r} names no {key}; write such as 'host[0:2]'")
        start = int(match["start"] or 0)
        is_one = match["start"] is not None and not match["colon"] and match["start"] != ""
        last = counts.get(match["name"], 1) if key == "instance" else start + 1
        stop = start + 1 if is_one else int(match["stop"] or last)
        names.append([f"{match['name']}-{number}" for number in range(start, stop)])
    devices, components = names
    return [device for device in devices for _ in components]


def _ranks_of(marked: MarkedData, above: tuple[str, ...], lines: Mapping[str, int]) -> dict[str, int | None]:
    """Return the hosts, which are of devices that compute, with their numbers of accelerators."""
    num_ranks: dict[str, int | None] = {}
    for index in range(len(value_at(marked, (*above, "devices"), list, []))):
        place: Location = (*above, "devices", index)
        kinds: dict[str, int] = defaultdict(int)
        for number in range(len(value_at(marked, (*place, "components"), list, []))):
            component: Location = (*place, "components", number)
            kind = value_at(marked, (*component, "choice"), str, "") or value_at(marked, (*component, "type"), str, "")
            kinds[kind] += value_at(marked, (*component, "count"), int, 1)
        if set(kinds) & set(_COMPUTING):
            num_ranks[value_at(marked, (*place, "name"), str)] = sum(kinds[kind] for kind in _ACCELERATORS) or None
    instances = value_at(marked, (*above, "instances"), list)
    devices = {str(each.get("name")): str(each.get("device")) for each in instances if isinstance(each, dict)}
    kinds_of = {name: devices.get(name.rpartition("-")[0], "") for name in lines}
    return {name: num_ranks[device] for name, device in kinds_of.items() if device in num_ranks}


def _neighbours(edges: Edges) -> dict[str, frozenset[str]]:
    near: dict[str, set[str]] = defaultdict(set)
    for one, other in map(sorted, edges):
        near[one].add(other)
        near[other].add(one)
    return {name: frozenset(others) for name, others in near.items()}


def _merged(edges: Edges, hosts: set[str]) -> Edges:
    """Take switches with the same neighbours for one, until there are none."""
    while True:
        alike: dict[frozenset[str], list[str]] = defaultdict(list)
        for name, near in _neighbours(edges).items():
            if name not in hosts:
                alike[near].append(name)
        new = {name: names[0] for names in alike.values() for name in names}
        if all(name == first for name, first in new.items()):
            return edges
        merged: Edges = defaultdict(float)
        for ends, rate in edges.items():
            merged[frozenset(new.get(name, name) for name in ends)] += rate
        edges = merged


def _tree(
    marked: MarkedData, edges: Edges, hosts: set[str], ranks: Mapping[str, int | None], lines: Mapping[str, int]
) -> Switches:
    """Hang all on the switch that is farthest from the hosts."""
    near = _neighbours(edges)
    front, top = sorted(hosts & set(near)), ""
    seen = set(front)
    while front:
        top = next((name for name in front if name not in hosts), top)
        front = sorted({other for name in front for other in near[name]} - seen)
        seen |= set(front)
    if not top:
        raise marked.error((), "hosts are connected with each other alone; a topology has a switch between them")
    switches: dict[str, SwitchPlace] = {}
    above = {top: ""}
    waiting = [top]
    for name in waiting:
        below = sorted(near[name] - {above[name]}, key=lambda each: (lines[each], each))
        for child in below:
            if child in above:
                raise _not_a_tree(marked, lines, child, name, above[child] or top)
            above[child] = name
        waiting += [child for child in below if child not in hosts]
        switches[name] = SwitchPlace(
            line=lines[name],
            switches=tuple(child for child in below if child not in hosts),
            hosts=tuple(
                HostPlace(
                    name=child, line=lines[child], num_ranks=ranks.get(child), rate=edges[frozenset((child, name))]
                )
                for child in below
                if child in hosts
            ),
            rate=edges[frozenset((name, above[name]))] if above[name] else None,
        )
    return switches


def _not_a_tree(marked: MarkedData, lines: Mapping[str, int], name: str, one: str, other: str) -> TopologyError:
    return TopologyError(
        f"{marked.label} line {lines[name]}: {name!r} is connected to {one!r} and to {other!r}, which have other "
        "neighbours; a topology is a tree, so leave one of these connections out"
    )
