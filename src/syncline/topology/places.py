"""What a file of another tool tells of a tree: its switches with what hangs on them, and how it is read there."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from types import MappingProxyType
from typing import Any, TypeVar

from syncline.topology.marked import MarkedData

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """A host as a file tells it; what it does not tell is None. ``rate`` is that of its link, bytes per second."""

    name: str
    line: int
    num_ranks: int | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPlace:
    """A switch as a file tells it, and what hangs on it; ``rate`` is that of the link above it."""

    line: int
    switches: tuple[str, ...] = ()
    hosts: tuple[HostPlace, ...] = ()
    rate: float | None = None


Switches = Mapping[str, SwitchPlace]


def switches_above(hosts: Sequence[tuple[Sequence[str], HostPlace]]) -> Switches:
    """Return the switches of hosts of which each comes with the names of those above it, the outermost first.

    What all hosts share is one switch, and so is one that has a single switch below it. Names that cannot stand in a
    topology, or are taken in another place, are changed.
    """
    taken = {host.name for _, host in hosts}
    switches: dict[str, SwitchPlace] = {}

    def build(inside: Sequence[tuple[Sequence[str], HostPlace]], above: str, told: str) -> str:
        while len(inner := {path[0] if path else None for path, _ in inside}) == 1 and None not in inner:
            told = inside[0][0][0]
            inside = [(path[1:], host) for path, host in inside]
        name = _free_name(told, above, taken)
        taken.add(name)
        switches[name] = SwitchPlace(line=inside[0][1].line)  # before those below it
        groups: dict[str, list[tuple[Sequence[str], HostPlace]]] = {}
        for path, host in inside:
            if path:
                groups.setdefault(path[0], []).append((path[1:], host))
        switches[name] = SwitchPlace(
            line=inside[0][1].line,
            switches=tuple(build(group, name, own) for own, group in groups.items()),
            hosts=tuple(host for path, host in inside if not path),
        )
        return name

    build(hosts, "", "network")
    return switches


def _free_name(told: str, above: str, taken: Collection[str]) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", told).lstrip("._-")[:63] or "switch"
    longer = f"{above}-{plain}"[:63].lstrip("-")
    numbered = (f"{plain[:55]}-{number}" for number in count(2))
    return next(name for name in chain((plain, longer), numbered) if name not in taken)


def value_at(marked: MarkedData, location: Sequence[str | int], kind: type[T], default: Any = ...) -> T:
    """Return the value at a place of a document, or ``default`` where it is not there; errors name line and key."""
    value: Any = marked.data
    for depth, step in enumerate(location):
        is_there = step in value if isinstance(value, dict) else isinstance(value, list) and step in range(len(value))
        if not is_there:
            if default is not ...:
                return default  # type: ignore[no-any-return]
            raise marked.error(location[:depth], f"key {step!r} is missing; is the file of this format?")
        value = value[step]
    if not isinstance(value, kind):
        what = repr(location[-1]) if location else "the text of the file"
        raise marked.error(location, f"{what} is not a {_NAMES.get(kind, kind.__name__)}; is it of this format?")
    return value


_NAMES: Mapping[type[Any], str] = MappingProxyType({str: "text", dict: "mapping", list: "list", int: "number"})
