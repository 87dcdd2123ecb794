"""The network between hosts as they measured it themselves: who tries whom, and what follows from all measurements.

For where the topology does not say: a flat one, or none. Echoes give the latency of each pair of hosts; a short bulk
transfer to a few others, in a rotation, gives each host's uplink: the best of them, since another one may have been
held up by a slow link farther on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_TRIES = 4
LATENCY_RESOLUTION_S = 2e-3
"""A busy process answers later than its network by up to so much; latencies below it are taken to be equal."""
RATE_RESOLUTION_BYTES_PER_S = 0.5e9
"""One process on a busy machine sends hardly faster than 4 Gbit/s; links above it are taken to be equal."""
CLEAR_FACTOR = 3.0
"""Rates, or latencies, of which each is less than so many times the next are those of one kind of link, measured on
busy machines: equal ones were seen to differ by a factor of 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkMeasurement:
    """What one host measured: seconds of an echo and bytes per second, by the number of the other host."""

    echoes_s: Mapping[int, float] = field(default_factory=dict)
    rates: Mapping[int, float] = field(default_factory=dict)

    @property
    def uplink_bytes_per_s(self) -> float | None:
        """The rate of this host's own link, as far as one process can tell; None if nothing was sent."""
        return min(max(self.rates.values()), RATE_RESOLUTION_BYTES_PER_S) if self.rates else None

    def as_pairs(self) -> list[list[tuple[int, float]]]:
        """Return it as JSON can say it."""
        return [sorted(self.echoes_s.items()), sorted(self.rates.items())]

    @classmethod
    def of_pairs(cls, pairs: Sequence[Sequence[Sequence[float]]]) -> NetworkMeasurement:
        """Return what :meth:`as_pairs` was made of."""
        echoes_s, rates = ({int(host): value for host, value in part} for part in pairs)
        return cls(echoes_s=echoes_s, rates=rates)


def among(measurements: Sequence[NetworkMeasurement], places: Sequence[int]) -> list[NetworkMeasurement]:
    """Return what the hosts at these places measured: echoes of one another, numbered anew in that order, and rates.

    A rate tells of a host's own link, whoever was at the other end.
    """
    number_of = {place: number for number, place in enumerate(places)}
    return [
        NetworkMeasurement(
            echoes_s={number_of[other]: echo_s for other, echo_s in measurement.echoes_s.items() if other in number_of},
            rates=measurement.rates,
        )
        for measurement in (measurements[place] for place in places)
    ]


def rotation(num_hosts: int, *, max_tries: int = MAX_TRIES) -> tuple[int, ...]:
    """Return by how many places each host looks on, one try after the other: in each, all send and all receive.

    Hosts beside one another in the topology are tried first, on both sides: one of the two is most likely near.
    """
    steps = [step for distance in range(1, num_hosts // 2 + 1) for step in (distance, num_hosts - distance)]
    return tuple(dict.fromkeys(steps))[:max_tries]


def rate_of(timed: Sequence[tuple[int, float]], *, echo_s: float) -> float:
    """Return bytes per second from messages of growing size: (bytes, seconds until their receipt was back) of each.

    From the first and the last, so that what every message takes falls out; from the last alone, without an echo, where
    it took at most twice as long as the first.
    """
    (first_bytes, first_s), (last_bytes, last_s) = timed[0], timed[-1]
    if last_s > 2 * first_s:
        return (last_bytes - first_bytes) / (last_s - first_s)
    return last_bytes / max(last_s - echo_s, last_s / 4, 1e-9)


def latencies_of(measurements: Sequence[NetworkMeasurement]) -> Floats | None:
    """Return the latency in seconds from each host to each other, one way: half of the pair's fastest echo, levelled.

    None where all pairs are alike as far as can be told, or nothing was measured. A pair without an echo has NaN.
    """
    size = len(measurements)
    echoes_s = np.full((size, size), np.inf)
    for host, measurement in enumerate(measurements):
        for other, echo_s in measurement.echoes_s.items():
            echoes_s[host, other] = echo_s
    fastest_s = np.minimum(echoes_s, echoes_s.T) / 2
    latencies_s = np.where(np.isfinite(fastest_s), np.maximum(fastest_s, LATENCY_RESOLUTION_S), np.nan)
    between = latencies_s[~np.eye(size, dtype=bool)]
    levels_s = levelled(between)
    if len(np.unique(levels_s[np.isfinite(levels_s)])) < 2:
        return None
    latencies_s[~np.eye(size, dtype=bool)] = levels_s
    np.fill_diagonal(latencies_s, 0.0)
    return latencies_s


def uplinks_of(measurements: Sequence[NetworkMeasurement]) -> list[float | None]:
    """Return each host's uplink in bytes per second; those that are alike as far as can be told are equal."""
    uplinks = [measurement.uplink_bytes_per_s for measurement in measurements]
    levels = levelled(np.array([np.nan if rate is None else rate for rate in uplinks], dtype=np.float64))
    return [None if rate is None else float(level) for rate, level in zip(uplinks, levels, strict=True)]


def levelled(values: Floats) -> Floats:
    """Return each value's level: the geometric mean of those that no clear gap parts from it; NaN stays."""
    result = values.copy()
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known])]
    gaps = np.flatnonzero(values[order[1:]] >= CLEAR_FACTOR * values[order[:-1]]) + 1
    for group in np.split(order, gaps):
        if group.size:
            result[group] = np.exp(np.log(np.maximum(values[group], np.finfo(np.float64).tiny)).mean())
    return result
