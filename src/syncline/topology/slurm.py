"""Slurm's ``topology.conf`` (the tree plugin) made into a topology.

The file knows switches and nodes, but no rates (``LinkSpeed`` has no unit and Slurm does not use it): they are given
beside it, one for the nodes' links and one for the links between switches.

    SwitchName=leaf1 Nodes=node[01-16]
    SwitchName=spine Switches=leaf[1-4]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from syncline.errors import TopologyError
from syncline.topology.hostlist import expand_hostlist
from syncline.topology.tree import Host, Link, Rank, Switch, TopologyParts, check_name, check_num_ranks

_KEYS = ("switchname", "nodes", "switches", "linkspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One line of the file."""

    line: int
    switches: tuple[str, ...]
    nodes: tuple[str, ...]


def parse_slurm(
    text: str,
    *,
    host_rate: float = math.inf,
    uplink_rate: float = math.inf,
    ranks_per_host: int = 1,
    source: str | None = None,
) -> TopologyParts:
    """Read the parts of a topology in a ``topology.conf``; rates in bytes per second, the same in both directions."""
    label = f"Topology {source or 'topology.conf'!r}"
    if ranks_per_host < 1:
        raise TopologyError(f"{label}: a host needs at least 1 rank, not {ranks_per_host}")
    entries = _read_entries(text, label)
    builder = _Builder(
        label=label,
        entries=entries,
        host_link=Link.symmetric(host_rate),
        uplink=Link.symmetric(uplink_rate),
        ranks_per_host=ranks_per_host,
    )
    top = _find_top(entries, label)
    root = builder.switch(top, None, ())
    unreached = [name for name in entries if name not in builder.lines]
    if unreached:
        name = unreached[0]
        raise TopologyError(f"{label} line {entries[name].line}: switch {name!r} is below itself; a topology is a tree")
    return TopologyParts(name="slurm", root=root, source=source, lines=builder.lines, priorities=None)


class _Builder:
    """Builds nodes from the top down, numbering ranks in that order."""

    def __init__(
        self, *, label: str, entries: Mapping[str, _Entry], host_link: Link, uplink: Link, ranks_per_host: int
    ) -> None:
        self.lines: dict[str, int] = {}
        self._label = label
        self._entries = entries
        self._host_link = host_link
        self._uplink = uplink
        self._ranks_per_host = ranks_per_host
        self._num_ranks = 0

    def switch(self, name: str, link: Link | None, above: tuple[str, ...]) -> Switch:
        entry = self._entries[name]
        if name in above:
            raise self._error(entry, f"switch {name!r} is below itself; a topology is a tree")
        self._claim(name, entry)
        children: list[Switch | Host] = []
        for child in entry.switches:
            if child not in self._entries:
                raise self._error(entry, f"switch {child!r} has no line of its own; add 'SwitchName={child} Nodes=...'")
            children.append(self.switch(child, self._uplink, (*above, name)))
        children += [self._host(node, entry) for node in entry.nodes]
        if not children:
            raise self._error(entry, f"switch {name!r} is empty; give it Nodes or Switches, or leave it out")
        return Switch(name=name, link=link, children=tuple(children))

    def _host(self, name: str, entry: _Entry) -> Host:
        self._claim(name, entry)
        first = self._num_ranks
        self._num_ranks += self._ranks_per_host
        return Host(
            name=name, link=self._host_link, ranks=tuple(Rank(rank=rank) for rank in range(first, self._num_ranks))
        )

    def _claim(self, name: str, entry: _Entry) -> None:
        try:
            check_name(name, "node")
            check_num_ranks(self._num_ranks + self._ranks_per_host)
        except TopologyError as error:
            raise self._error(entry, str(error)) from error
        if name in self.lines:
            raise self._error(entry, f"{name!r} has a place already, in line {self.lines[name]}; a topology is a tree")
        self.lines[name] = entry.line

    def _error(self, entry: _Entry, message: str) -> TopologyError:
        return TopologyError(f"{self._label} line {entry.line}: {message}")


def _read_entries(text: str, label: str) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            names, entry = _read_entry(content, number)
        except TopologyError as error:
            raise TopologyError(f"{label} line {number}: {error}") from error
        for name in names:
            if name in entries:
                raise TopologyError(
                    f"{label} line {number}: switch {name!r} has a line already, {entries[name].line}; give it one"
                )
            entries[name] = entry
    if not entries:
        raise TopologyError(f"{label} line 1: the file names no switch; write 'SwitchName=NAME Nodes=...'")
    return entries


def _read_entry(content: str, number: int) -> tuple[tuple[str, ...], _Entry]:
    settings: dict[str, str] = {}
    for word in content.split():
        key, _, value = word.partition("=")
        if key.lower() not in _KEYS or not value:
            raise TopologyError(f"{word!r} is not understood; write SwitchName=, Nodes=, Switches= or LinkSpeed=")
        settings[key.lower()] = value
    if "switchname" not in settings:
        raise TopologyError("the line has no SwitchName=; add it")
    lists = {key: expand_hostlist(settings[key]) for key in ("nodes", "switches") if key in settings}
    entry = _Entry(line=number, switches=lists.get("switches", ()), nodes=lists.get("nodes", ()))
    return expand_hostlist(settings["switchname"]), entry


def _find_top(entries: Mapping[str, _Entry], label: str) -> str:
    below = {child for entry in entries.values() for child in entry.switches}
    tops = [name for name in entries if name not in below]
    if len(tops) == 1:
        return tops[0]
    if not tops:
        first = next(iter(entries.values()))
        raise TopologyError(f"{label} line {first.line}: every switch is below another; a tree has one at the top")
    line = entries[tops[1]].line
    joined = ",".join(tops)
    raise TopologyError(
        f"{label} line {line}: nothing joins the switches {joined}; add a line 'SwitchName=top Switches={joined}'"
    )
