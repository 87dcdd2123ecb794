"""What cluster managers know of a network: topograph's instances and models, Kubernetes' nodes, hostfiles."""

from __future__ import annotations

import re
from collections.abc import Sequence

from syncline.errors import TopologyError
from syncline.topology.hostlist import expand_hostlist
from syncline.topology.marked import MarkedData, read_marked
from syncline.topology.places import HostPlace, Switches, SwitchPlace, switches_above, value_at

_NVIDIA = "network.topology.nvidia.com"
_LEVELS = (
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    *(f"{_NVIDIA}/{level}" for level in ("datacenter", "spine", "leaf", "block", "accelerator")),
    *(f"topology.k8s.aws/network-node-layer-{layer}" for layer in range(1, 10)),
    *(f"cloud.google.com/gce-topology-{level}" for level in ("block", "subblock", "host")),
    "kubernetes.azure.com/ppg",
    *(f"fabric.topograph.run/tier-{tier}" for tier in reversed(range(10))),
    "accelerator.topograph.run/domain",
    "accelerator.topograph.run/sub-domain",
)
"""Labels of nodes, from the outermost level to the innermost."""
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_HOST = re.compile(r"(?P<name>[^\s:]+)(?::(?P<count>\d+))?(?P<rest>(?:\s+\w+=\S+)*)", re.ASCII)
_SLOTS = re.compile(r"\sslots=(\d+)", re.ASCII)
_TOP = "network"


def read_kubernetes_nodes(text: str, label: str) -> Switches:
    """Read ``kubectl get nodes -o json`` (or yaml): levels by well-known labels, ranks by the GPUs of a node."""
    marked = read_marked(text, label=label)
    hosts = []
    for index in range(len(value_at(marked, ("items",), list))):
        place = ("items", index)
        labels = value_at(marked, (*place, "metadata", "labels"), dict, {})
        name = labels.get("kubernetes.io/hostname") or value_at(marked, (*place, "metadata", "name"), str)
        room = value_at(marked, (*place, "status", "allocatable"), dict, {})
        num_gpus = sum(int(room[key]) for key in _GPUS if str(room.get(key, "")).isdecimal())
        line = marked.line_of((*place, "metadata"))
        entry = HostPlace(name=str(name), line=line, num_ranks=num_gpus or None)
        hosts.append(([str(labels[level]) for level in _LEVELS if labels.get(level)], entry))
    if not hosts:
        raise marked.error(("items",), "there is no node; select those of the job (kubectl get nodes -l ...)")
    return switches_above(hosts)


def read_topograph(text: str, label: str) -> Switches:
    """Read topograph's ``{"instances": [...]}``, or a model of its (``switches:``, with ``nodes:`` or ``blocks:``)."""
    marked = read_marked(text, label=label)
    if value_at(marked, ("instances",), list, None) is None:
        return _read_model(marked)
    hosts = []
    for index in range(len(value_at(marked, ("instances",), list))):
        place = ("instances", index)
        layers = value_at(marked, (*place, "network_layers"), list, [])
        name = value_at(marked, (*place, "id"), str)
        hosts.append(([str(each) for each in reversed(layers)], HostPlace(name=name, line=marked.line_of(place))))
    if not hosts:
        raise marked.error(("instances",), "there is no instance; ask topograph for the nodes of the job")
    return switches_above(hosts)


def _read_model(marked: MarkedData) -> Switches:
    told = value_at(marked, ("switches",), dict)
    hosts = {name: _listed(marked, ("switches", name, "nodes")) for name in told}
    beside: tuple[HostPlace, ...] = ()
    for index in range(len(value_at(marked, ("blocks",), list, []))):
        place = ("blocks", index)
        switch = value_at(marked, (*place, "switch"), str, "")
        if switch and switch not in hosts:
            raise marked.error(place, f"switch {switch!r} is not among 'switches'; add it")
        listed = _listed(marked, (*place, "nodes"))
        if switch:
            hosts[switch] += listed
        else:
            beside += listed
    switches = {}
    for name in told:
        below = value_at(marked, ("switches", name, "switches"), list, [])
        line = marked.line_of(("switches", name))
        switches[name] = SwitchPlace(line=line, switches=tuple(map(str, below)), hosts=hosts[name])
    below_any = {child for entry in switches.values() for child in entry.switches}
    tops = tuple(name for name in switches if name not in below_any)
    if len(tops) > 1 or beside:
        switches[_TOP] = SwitchPlace(line=marked.line_of(("switches",)), switches=tops, hosts=beside)
    return switches


def _listed(marked: MarkedData, location: Sequence[str | int]) -> tuple[HostPlace, ...]:
    entries: list[HostPlace] = []
    for index, names in enumerate(value_at(marked, location, list, [])):
        place = (*location, index)
        try:
            entries += (HostPlace(name=name, line=marked.line_of(place)) for name in expand_hostlist(str(names)))
        except TopologyError as error:
            raise marked.error(place, str(error)) from error
    return tuple(entries)


def read_hostfile(text: str, label: str) -> Switches:
    """Read a hostfile of MPI or DeepSpeed (``node1 slots=4``, ``node1:4``, or a line for each rank): one switch."""
    num_ranks: dict[str, int] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _HOST.fullmatch(content)
        if match is None:
            raise TopologyError(f"{label} line {number}: {content!r} is not understood; write 'node1 slots=4'")
        slots = _SLOTS.search(match["rest"])
        name = match["name"]
        num_ranks[name] = num_ranks.get(name, 0) + int(slots[1] if slots else match["count"] or 1)
        lines.setdefault(name, number)
    if not num_ranks:
        raise TopologyError(f"{label} line 1: the file names no host; write 'node1 slots=4'")
    hosts = (HostPlace(name=name, line=lines[name], num_ranks=ranks) for name, ranks in num_ranks.items())
    return switches_above([((), host) for host in hosts])
