"""What kind of machine each host is: features, their normal form, and the vectors that clusters are made from.

    x' = (x - mean) / (max - min), and 0 where max = min

The mean, the highest and the lowest value are those of all hosts (docs/mechanisms.md, Clusters).
A feature that is text (`site`, `gpu`)
becomes a column for each of its values, 0 or 1, each scaled by sqrt(1/2): two hosts with different texts are then
exactly 1 apart. Latencies between hosts become a column for each host, scaled by sqrt(1/hosts), so that they
weigh as much as one feature whose values lie at both ends. What is not known of a host counts as the mean.

The normal form blows the smallest difference up to 1. Measured values of equal machines differ a little, and this noise
would count as much as a real difference: so where max - min is at most a tenth of the mean (half, of what differs
more), x' is 0 too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from syncline.errors import ConfigurationError, UnitError
from syncline.topology import Host, Switch, Topology
from syncline.units import parse_duration, parse_frequency, parse_rate, parse_size

Feature = float | str
Features = Mapping[str, Feature]
Floats = NDArray[np.float64]

LATENCY = "latency_s"
SITE = "site"
UPLINK = "uplink_bytes_per_s"
NETWORK = (SITE, UPLINK, LATENCY)
"""What a network says of its hosts: where links are slow, whatever the machines at their ends are."""
TOLERANCE = 0.1
BATCH = "batch_s"
AVAILABLE_MEMORY = "available_memory_bytes"
AVAILABLE_GPU_MEMORY = "available_gpu_memory_bytes"
LATER = (BATCH, AVAILABLE_MEMORY, AVAILABLE_GPU_MEMORY)
"""Features that are known only once a training runs: its own seconds for a batch, and the memory that is left."""
NOISY = dict.fromkeys(("disk_bytes_per_s", *LATER), 0.5)
"""Features whose values differ more than others where machines are equal."""

_QUANTITIES: Mapping[str, Callable[[str], float]] = {
    "_hz": parse_frequency,
    "_bytes_per_s": parse_rate,
    "_bytes": parse_size,
    "_s": parse_duration,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One coordinate of the vectors: a feature's number, or whether its text is ``text``."""

    feature: str
    label: str
    values: tuple[float, ...]
    """One for each host; NaN where it is not known."""
    weight: float = 1.0
    """What scales it, so that features of several columns count as one of a single column."""
    tolerance: float = 0.0
    text: str | None = None

    @property
    def normalised(self) -> Floats:
        """The values in normal form, without the weight."""
        return normalise(np.array(self.values), tolerance=self.tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureTable:
    """The features of all hosts as columns."""

    hosts: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def features(self) -> tuple[str, ...]:
        """The features that there are columns of, in order."""
        return tuple(dict.fromkeys(column.feature for column in self.columns))

    @property
    def vectors(self) -> Floats:
        """One row for each host: its normalised, weighted features."""
        if not self.columns:
            return np.zeros((len(self.hosts), 1))
        return np.stack([column.normalised * column.weight for column in self.columns], axis=1)


def normalise(values: Floats, *, tolerance: float = 0.0) -> Floats:
    """Return (x - mean) / (max - min) of the known values; 0 for unknown ones.

    0 everywhere if max = min, or if they differ by no more than ``tolerance`` of the mean.
    """
    known = np.isfinite(values)
    if not known.any():
        return np.zeros_like(values)
    low, high, mean = values[known].min(), values[known].max(), values[known].mean()
    if high - low <= tolerance * abs(mean):
        return np.zeros_like(values)
    return np.where(known, (values - mean) / (high - low), 0.0)


def build_table(
    features: Mapping[str, Features],
    *,
    latencies_s: Floats | None = None,
    use: Sequence[str] = (),
) -> FeatureTable:
    """Build the table of ``features`` (by host, in order), with the hosts' latencies to one another if given.

    ``use`` names the features that count (default: those of the network, as far as they are known).
    """
    hosts = tuple(features)
    names = list(dict.fromkeys(name for of_host in features.values() for name in of_host))
    if latencies_s is not None and LATENCY not in names:
        names.append(LATENCY)
    _check_names(names, use)
    columns: list[Column] = []
    for name in use or [name for name in names if name in NETWORK]:
        given = [of_host.get(name) for of_host in features.values()]
        if name == LATENCY and latencies_s is not None and all(value is None for value in given):
            columns += _latency_columns(hosts, latencies_s)
        else:
            _check_kind(name, dict(zip(hosts, given, strict=True)))
            columns += _columns(name, given, NOISY.get(name, TOLERANCE))
    return FeatureTable(hosts=hosts, columns=tuple(columns))


def _columns(name: str, given: Sequence[Feature | None], tolerance: float) -> list[Column]:
    texts = sorted({value for value in given if isinstance(value, str)})
    if not texts:
        values = tuple(math.nan if value is None else float(value) for value in given)
        return [Column(feature=name, label=name, values=values, tolerance=tolerance)]
    return [
        Column(
            feature=name,
            label=f"{name} {text}",
            values=tuple(math.nan if value is None else float(value == text) for value in given),
            weight=math.sqrt(0.5),
            text=text,
        )
        for text in texts
    ]


def _check_kind(name: str, given: Mapping[str, Feature | None]) -> None:
    texts = [host for host, value in given.items() if isinstance(value, str)]
    numbers = [host for host, value in given.items() if isinstance(value, int | float)]
    if texts and numbers:
        raise ConfigurationError(
            f"feature {name!r} is text on some hosts ({', '.join(texts)}: {given[texts[0]]!r}) and a number on others "
            f"({', '.join(numbers)}: {given[numbers[0]]!r}); write it one way"
        )
    for host in numbers:
        if not math.isfinite(float(given[host] or 0)):
            raise ConfigurationError(f"feature {name!r} of host {host} is {given[host]}; write a finite number")


def _latency_columns(hosts: Sequence[str], latencies_s: Floats) -> list[Column]:
    return [
        Column(
            feature=LATENCY,
            label=f"latency to {host}",
            values=tuple(float(value) for value in latencies_s[:, index]),
            weight=1 / math.sqrt(len(hosts)),
        )
        for index, host in enumerate(hosts)
    ]


def _check_names(known: Sequence[str], wanted: Iterable[str]) -> None:
    for name in wanted:
        if name not in known:
            raise ConfigurationError(f"features: no host has the feature {name!r}; known are {', '.join(known)}")


def topology_features(topology: Topology) -> dict[str, dict[str, Feature]]:
    """Return what the topology says of each host: site, uplink, and the `features:` of the file, which go first.

    A feature whose name ends as a frequency, a size, a rate or a duration does may be written as one: `cpu_hz: 3 GHz`.
    """
    return {
        host.name: _derived(topology, host) | {name: _written(host, name) for name in host.features}
        for host in topology.hosts
    }


def _written(host: Host, name: str) -> Feature:
    value = host.features[name]
    parse = next((parse for ending, parse in _QUANTITIES.items() if name.endswith(ending)), None)
    if parse is None:
        return value
    try:
        number = _number(value, parse)
    except UnitError as error:
        raise ConfigurationError(f"feature {name!r} of host {host.name}: {error}") from None
    if number < 0:
        raise ConfigurationError(f"feature {name!r} of host {host.name} is {value}; write what is not below 0")
    return number


def _number(value: Feature, parse: Callable[[str], float]) -> float:
    """Return the number that is written with a unit, or without one; YAML takes `3.0e9` for text."""
    try:
        return float(value)
    except ValueError:
        return parse(str(value))


def _derived(topology: Topology, host: Host) -> dict[str, Feature]:
    """Site is the topmost switch above the host, the root apart; uplink is the rate of the host's own link."""
    above = topology.path(host.ranks[0].rank)[1:]
    derived: dict[str, Feature] = {}
    sites = [node.name for node in above if isinstance(node, Switch)]
    if any(isinstance(child, Switch) for child in topology.root.children):
        derived[SITE] = sites[-1] if sites else topology.root.name
    rates = [node.link.up_bytes_per_s for node in above if node.link is not None]
    finite = [rate for rate in rates[:1] if math.isfinite(rate)]
    if finite:
        derived[UPLINK] = finite[0]
    return derived


def topology_latencies(topology: Topology) -> Floats | None:
    """Return the latency in seconds from each host to each other, one way; None where the topology gives none."""
    of_link = {name: link.latency_s for name, link in topology.links()}
    if not any(of_link.values()):
        return None
    firsts = [host.ranks[0].rank for host in topology.hosts]
    routes = [[topology.route(source, destination) for destination in firsts] for source in firsts]
    return np.array([[sum(of_link[link.child] for link in route) for route in row] for row in routes])


NUM_PERIODS = 16
"""Of what a host measures in each so many count, the newest."""


def summarise(periods: Iterable[Features]) -> dict[str, Feature]:
    """Return the mean of each number that was measured in some of the periods, and the newest of each text."""
    told: dict[str, list[Feature]] = defaultdict(list)
    for period in periods:
        for name, value in period.items():
            told[name].append(value)
    return {name: _summarise(values) for name, values in told.items()}


def _summarise(values: Sequence[Feature]) -> Feature:
    numbers = [value for value in values if not isinstance(value, str)]
    newest = values[-1]
    return newest if isinstance(newest, str) else math.fsum(numbers) / len(numbers)
