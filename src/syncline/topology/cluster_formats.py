"""What cluster managers know of a network: Slurm, topograph's instances and models, Kubernetes' nodes, hostfiles.

Slurm's is ``topology.conf``, ``topology.yaml``, and the address that each task gets:

    SwitchName=leaf1 Nodes=node[01-16]          BlockName=b1 Nodes=node[01-16]
    SwitchName=spine Switches=leaf[1-4]

None knows rates (Slurm's ``LinkSpeed`` has no unit, and Slurm does not use it).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count

from syncline.errors import TopologyError
from syncline.topology.host_matching import expand_hostlist
from syncline.topology.marked import MarkedData, read_marked, value_at

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
_SLOTS = re.compile(r"\sslots=(\S+)", re.ASCII)
_TOP = "network"
_KEYS = ("switchname", "nodes", "switches", "linkspeed", "blockname", "blocksizes")
_IS_CONF = re.compile(r"^\s*(switch|block)(name|sizes)\s*=", re.IGNORECASE | re.MULTILINE)
_VARIABLE = re.compile(r"(?:\d+: *)?(?:(?P<name>\w+)=)?(?P<value>.*)", re.ASCII)
_PATTERN = re.compile(r"(\w+\.)*node", re.ASCII)


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
        with marked.errors_at(place):
            entries += _hosts(str(names), marked.line_of(place))
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
        told = slots[1] if slots else match["count"] or "1"
        if not (told.isascii() and told.isdecimal() and int(told)):
            raise TopologyError(f"{label} line {number}: {told!r} is not a number of ranks; write 'node1 slots=4'")
        name = match["name"]
        num_ranks[name] = num_ranks.get(name, 0) + int(told)
        lines.setdefault(name, number)
    if not num_ranks:
        raise TopologyError(f"{label} line 1: the file names no host; write 'node1 slots=4'")
    hosts = (HostPlace(name=name, line=lines[name], num_ranks=ranks) for name, ranks in num_ranks.items())
    return switches_above([((), host) for host in hosts])


def read_slurm(text: str, label: str) -> Switches:
    """Read a ``topology.conf`` (tree or block), or a ``topology.yaml``: its default topology, else its first."""
    if _IS_CONF.search(text):
        return _read_conf(text, label)
    if not text.strip():
        raise TopologyError(f"{label} line 1: the file names no switch; write 'SwitchName=NAME Nodes=...'")
    return _read_yaml(read_marked(text, label=label))


def _hosts(names: str, line: int) -> tuple[HostPlace, ...]:
    return tuple(HostPlace(name=name, line=line) for name in expand_hostlist(names))


def _read_conf(text: str, label: str) -> Switches:
    switches: dict[str, SwitchPlace] = {}
    blocks: list[str] = []
    for number, content in _joined_lines(text):
        try:
            settings = _read_settings(content)
            is_block = "blockname" in settings
            named = settings.get("switchname") or settings.get("blockname")  # BlockSizes= stands alone and names none
            names = expand_hostlist(named) if named else ()
            below = expand_hostlist(settings["switches"]) if "switches" in settings else ()
            hosts = _hosts(settings["nodes"], number) if "nodes" in settings else ()
        except TopologyError as error:
            raise TopologyError(f"{label} line {number}: {error}") from error
        for name in names:
            if name in switches:
                raise TopologyError(
                    f"{label} line {number}: switch {name!r} has a line already, {switches[name].line}; give it one"
                )
            switches[name] = SwitchPlace(line=number, switches=below, hosts=hosts)
            blocks += [name] * is_block
    return switches | ({_TOP: SwitchPlace(line=1, switches=tuple(blocks))} if len(blocks) > 1 else {})


def _joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield what stands on each line, and its number; a line that ends in a backslash goes on in the next."""
    first, joined = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].rstrip()
        first = first if joined else number
        joined += content.removesuffix("\\")
        if not content.endswith("\\"):
            if joined.strip():
                yield first, joined
            joined = ""
    if joined.strip():
        yield first, joined


def _read_settings(content: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for word in content.split():
        key, _, value = word.partition("=")
        if key.lower() not in _KEYS or not value:
            raise TopologyError(f"{word!r} is not understood; write SwitchName=, Nodes=, Switches= or LinkSpeed=")
        settings[key.lower()] = value
    if not {"switchname", "blockname", "blocksizes"} & set(settings):
        raise TopologyError("the line has no SwitchName=; add it")
    return settings


def _read_yaml(marked: MarkedData) -> Switches:
    count = len(value_at(marked, (), list))
    is_default = [value_at(marked, (k, "cluster_default"), bool, False) for k in range(count)]
    chosen = is_default.index(True) if True in is_default else 0
    for kind, names, below in (("tree", "switches", "switch"), ("block", "blocks", "block")):
        if value_at(marked, (chosen, kind), dict, None) is not None:
            return _read_yaml_switches(marked, (chosen, kind, names), below)
    raise marked.error((chosen,), "this topology is neither a tree nor blocks, so it tells nothing of the network")


def _read_yaml_switches(marked: MarkedData, location: tuple[str | int, ...], key: str) -> Switches:
    switches: dict[str, SwitchPlace] = {}
    for index in range(len(value_at(marked, location, list))):
        place = (*location, index)
        line = marked.line_of(place)
        nodes, below = (str(value_at(marked, (*place, each), object, "")) for each in ("nodes", "children"))
        with marked.errors_at(place):
            entry = SwitchPlace(
                line=line,
                switches=expand_hostlist(below) if below else (),
                hosts=_hosts(nodes, line) if nodes else (),
            )
        name = str(value_at(marked, (*place, key), object))
        if name in switches:
            raise marked.error(place, f"{key} {name!r} is told already, in line {switches[name].line}; give it one")
        switches[name] = entry
    if key == "block" and len(switches) > 1:
        return switches | {_TOP: SwitchPlace(line=marked.line_of(location), switches=tuple(switches))}
    return switches


def read_slurm_addresses(text: str, label: str) -> Switches:
    """Read what ``srun printenv SLURM_TOPOLOGY_ADDR`` prints, a line for each task: ``root.leaf2.node7``.

    A host has as many ranks as it has lines. ``SLURM_TOPOLOGY_ADDR_PATTERN`` beside it is used where names have dots.
    """
    addresses: Counter[str] = Counter()
    lines: dict[str, int] = {}
    patterns = set()
    for number, line in enumerate(text.splitlines(), start=1):
        match = _VARIABLE.fullmatch(line.strip())
        assert match is not None, "all of it may be missing"
        name, value = match["name"] or "SLURM_TOPOLOGY_ADDR", match["value"].strip()
        if _PATTERN.fullmatch(value):
            patterns.add(value)
        elif name == "SLURM_TOPOLOGY_ADDR" and value:
            addresses[value] += 1
            lines.setdefault(value, number)
    if not addresses:
        raise TopologyError(
            f"{label} line 1: no line has an address such as root.leaf2.node7; write the file by "
            "`srun printenv SLURM_TOPOLOGY_ADDR`"
        )
    num_dots = patterns.pop().count(".") if len(patterns) == 1 else -1
    hosts = []
    for address, num_ranks in addresses.items():
        *above, name = address.split(".", num_dots)
        hosts.append((above, HostPlace(name=name, line=lines[address], num_ranks=num_ranks)))
    return switches_above(hosts)
