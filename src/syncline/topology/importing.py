"""Trees that other tools have written, made into topologies.

Each format tells its switches with what hangs on them (or each host with the switches above it, from which they
follow), and one builder makes the tree. Rates are rarely in it: they are given beside it, level by level from the
hosts' links up, and the last holds for all levels above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from syncline.errors import TopologyError
from syncline.topology.cluster_formats import (
    HostPlace,
    Switches,
    read_hostfile,
    read_kubernetes_nodes,
    read_slurm,
    read_slurm_addresses,
    read_topograph,
)
from syncline.topology.infragraph import read_infragraph
from syncline.topology.marked import errors_as
from syncline.topology.tree import Host, Link, Rank, Switch, TopologyParts, check_name, check_num_ranks

Reader = Callable[[str, str], Switches]
"""Given a file's text and the label with which its errors begin."""


FORMATS: Mapping[str, Reader] = MappingProxyType(
    {
        "slurm": read_slurm,
        "slurm-env": read_slurm_addresses,
        "topograph": read_topograph,
        "k8s-nodes": read_kubernetes_nodes,
        "infragraph": read_infragraph,
        "hostfile": read_hostfile,
    }
)


def import_parts(
    text: str, origin: str, *, rates: Sequence[float], ranks_per_host: int | None, source: str | None
) -> TopologyParts:
    """Read the parts of a topology in a file of the format ``origin``; arguments as :meth:`.Topology.imported`."""
    label = f"Topology {source or origin!r}"
    if origin not in FORMATS:
        raise TopologyError(f"{label}: no format is called {origin!r}; take one of {', '.join(FORMATS)}")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise TopologyError(f"{label}: a host needs at least 1 rank, not {ranks_per_host}")
    switches = FORMATS[origin](text, label)
    builder = _Builder(label=label, switches=switches, rates=tuple(rates), ranks_per_host=ranks_per_host)
    root = builder.switch(_find_top(switches, label), (), has_link=False)
    unreached = [name for name in switches if name not in builder.lines]
    if unreached:
        name = unreached[0]
        raise TopologyError(
            f"{label} line {switches[name].line}: switch {name!r} is below itself; a topology is a tree"
        )
    num_levels = builder.heights[root.name]  # the root itself has no link above it
    if len(rates) > num_levels:
        raise TopologyError(
            f"{label}: {len(rates)} rates are given for {num_levels} levels of links; give at most {num_levels}, the "
            "hosts' links first"
        )
    return TopologyParts(name=origin, root=root, source=source, priorities=None)


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Builds nodes from the top down, numbering ranks in that order."""

    label: str
    switches: Switches
    rates: tuple[float, ...]
    ranks_per_host: int | None
    lines: dict[str, int] = field(default_factory=dict)
    num_ranks: int = 0
    heights: dict[str, int] = field(default_factory=dict)

    def switch(self, name: str, above: tuple[str, ...], *, has_link: bool = True) -> Switch:
        entry = self.switches[name]
        if name in above:
            raise self._error(entry.line, f"switch {name!r} is below itself; a topology is a tree")
        self._claim(name, entry.line)
        children: list[Switch | Host] = []
        for child in entry.switches:
            if child not in self.switches:
                raise self._error(
                    entry.line, f"switch {child!r} is told nowhere; say what hangs on it, or leave it out"
                )
            children.append(self.switch(child, (*above, name)))
        children += map(self._host, entry.hosts)
        if not children:
            raise self._error(entry.line, f"switch {name!r} is empty; give it nodes or switches, or leave it out")
        self.heights[name] = 1 + max((self.heights[child] for child in entry.switches), default=0)
        link = self._link(self.heights[name], entry.rate) if has_link else None
        return Switch(name=name, link=link, children=tuple(children))

    def _host(self, entry: HostPlace) -> Host:
        first = self.num_ranks
        self.num_ranks += self.ranks_per_host or entry.num_ranks or 1
        self._claim(entry.name, entry.line)
        ranks = tuple(Rank(rank=rank) for rank in range(first, self.num_ranks))
        return Host(name=entry.name, link=self._link(0, entry.rate), ranks=ranks)

    def _link(self, height: int, told: float | None) -> Link:
        if self.rates:
            return Link.symmetric(self.rates[min(height, len(self.rates) - 1)])
        return Link.symmetric(math.inf if told is None else told)

    def _claim(self, name: str, line: int) -> None:
        with errors_as(partial(self._error, line)):
            check_name(name, "node")
            check_num_ranks(self.num_ranks)
        if name in self.lines:
            raise self._error(line, f"{name!r} has a place already, in line {self.lines[name]}; a topology is a tree")
        self.lines[name] = line

    def _error(self, line: int, message: str) -> TopologyError:
        return TopologyError(f"{self.label} line {line}: {message}")


def _find_top(switches: Switches, label: str) -> str:
    below = {child for entry in switches.values() for child in entry.switches}
    tops = [name for name in switches if name not in below] or list(switches)[:1]
    if len(tops) == 1:
        return tops[0]
    raise TopologyError(
        f"{label} line {switches[tops[1]].line}: nothing joins the switches {','.join(tops)}; add one above them"
    )
