"""Whether links are still as fast as the plan takes them for: suspected from traffic, and then proved by measuring.

Links carry a job's own bytes, and the kernel tells for how long a connection had some to send. So a rank that comes
late costs no rate: its connections are idle meanwhile. What a connection moves in the seconds in which it was busy
depends on all that it shares links with, so these rates are compared with earlier ones of the same plan alone. Where
one is a third off for half a minute, the ranks measure a few rounds of flows, at the end of a step, when the network is
theirs; and the links are found whose other rates explain what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from syncline.discovery.tree_search import Flow, Round, fair_shares, huber_losses, noise_of
from syncline.topology import DirectedLink, Link, Switch, Topology
from syncline.topology.tree import WAYS, relinked

WINDOW_S = 10.0
NUM_WINDOWS = 3
"""A rate that is off in so many windows, one after another, is suspicious."""
OFF = math.log(4 / 3)
"""Rates differ by a third, as a logarithm."""
LEAST_BYTES, LEAST_BUSY_S = 1 << 20, 0.2
"""What is moved in less tells no rate."""
_FACTORS = np.exp(np.linspace(-math.log(8), math.log(8), 9))
_FINER = np.exp(np.linspace(-math.log(1.68), math.log(1.68), 21))
_PARTS = np.linspace(0.8, 1.0, 41)
_NEAR = 0.08
_USUAL_PART = 0.93
_MOST_CHANGES = 8
_GAIN = 8.0
"""Another rate must explain so much more, in squared errors over squared noise."""
_MOST_NOISE = 0.2
"""Busy processors disturb some flows by more; a third is to be seen still."""
_LEAST_PAIRS = 2
"""So many pairs of hosts, or more, must get another rate by it: one flow in many is timed wrongly."""


@dataclass(slots=True)
class TrafficWatch:
    """One rank's rates by peer, window after window; ``begin`` is called whenever the plan has changed."""

    _began_s: float = math.inf
    _before: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    _usual: dict[int, float] = field(default_factory=dict)
    _num_off: dict[int, int] = field(default_factory=dict)
    """In how many windows a peer's rate was off, up to now; negative where it was slower."""

    def begin(self, now_s: float, moved: Mapping[int, tuple[int, float]]) -> None:
        """Learn anew what is usual; ``moved`` is by peer what was sent, and for how many seconds that was busy."""
        self._began_s, self._before, self._usual, self._num_off = now_s, moved, {}, {}

    def skip(self, now_s: float, moved: Mapping[int, tuple[int, float]]) -> None:
        """Leave out what was moved since the last window."""
        self._began_s, self._before = now_s, moved

    def see(self, now_s: float, moved: Mapping[int, tuple[int, float]]) -> None:
        """Take note of what was moved up to now."""
        if now_s - self._began_s < WINDOW_S:
            return
        for peer, (num_bytes, busy_s) in moved.items():
            bytes_before, busy_before_s = self._before.get(peer, (0, 0.0))
            if num_bytes - bytes_before >= LEAST_BYTES and busy_s - busy_before_s >= LEAST_BUSY_S:
                self._judge(peer, (num_bytes - bytes_before) / (busy_s - busy_before_s))
        self._began_s, self._before = now_s, moved

    @property
    def is_suspicious(self) -> bool:
        """Whether some peer's rate has been off for NUM_WINDOWS."""
        return any(abs(number) >= NUM_WINDOWS for number in self._num_off.values())

    def _judge(self, peer: int, rate: float) -> None:
        off = math.log(rate / self._usual.setdefault(peer, rate))
        way, number = (off > 0) - (off < 0), self._num_off.get(peer, 0)
        self._num_off[peer] = 0 if abs(off) < OFF else way + (number if number * way > 0 else 0)


def changed_rates(known: Topology, ranks: Sequence[int], rounds: Sequence[Round]) -> Topology:
    """Return ``known`` with other rates of those links that explain ``rounds`` so; itself where none do by a third.

    ``ranks[k]`` is a rank of host k. One change after another is made, each time that which explains the most.
    """
    model = _Model(known, ranks, rounds)
    rates = model.rates.copy()
    loss = model.loss(rates)
    for _ in range(_MOST_CHANGES):
        scored = [
            (model.loss(each), place, factor)
            for place, factor, each in model.changes(rates)
            if model.num_pairs_of(rates, each) >= _LEAST_PAIRS
        ]
        least, place, factor = min(scored, default=(loss, 0, 1.0))
        if least > loss - _GAIN:
            break
        finer = [_changed(rates, place, factor * finer) for finer in _FINER]
        rates = min(finer, key=model.loss)
        loss = model.loss(rates)
    factors = np.divide(rates, model.rates, out=np.ones_like(rates), where=np.isfinite(rates))
    of_links = zip(model.links, factors.tolist(), strict=True)
    off = {link: factor for link, factor in of_links if abs(math.log(factor)) >= OFF}
    return replace(known, root=relinked(known.root, _scaled(known, off))) if off else known


def crossed_links(
    topology: Topology, ranks: Sequence[int], rounds: Sequence[Sequence[Flow]]
) -> tuple[list[DirectedLink], np.ndarray]:
    """Return all links, and which of them (last axis) each flow (second axis) of each round (first axis) crosses.

    ``ranks[k]`` is a rank of host k.
    """
    links = [DirectedLink(name, way) for name, _ in topology.links() for way in WAYS]
    numbers = {link: number for number, link in enumerate(links)}
    crosses = np.zeros((len(rounds), max(map(len, rounds)), len(links)), bool)
    for row, flows in enumerate(rounds):
        for column, (source, target) in enumerate(flows):
            crossed = [numbers[link] for link in topology.route(ranks[source], ranks[target])]
            crosses[row, column, crossed] = True
    return links, crosses


class _Model:
    """The rounds as arrays: which links each flow crosses, and what it was measured to get."""

    def __init__(self, known: Topology, ranks: Sequence[int], rounds: Sequence[Round]) -> None:
        self.links, self._crosses = crossed_links(known, ranks, [each.flows for each in rounds])
        self.rates = np.array([known.bytes_per_s(link) for link in self.links])
        self._pairs = np.full(self._crosses.shape[:2], -1)
        self._measured = np.full(self._crosses.shape[:2], np.nan)
        self._noise, self._part = min(noise_of(rounds), _MOST_NOISE), 1.0
        for row, each in enumerate(rounds):
            for column, (source, target) in enumerate(each.flows):
                self._measured[row, column] = max(each.rates[column], 1.0)
                self._pairs[row, column] = source * len(ranks) + target
        is_of_switch = [isinstance(known.node(link.child), Switch) for link in self.links]
        self._part = self._part_that_arrives(np.asarray(self._crosses[:, :, is_of_switch].any(axis=2)))

    def _part_that_arrives(self, is_between: np.ndarray) -> float:
        """Return what most flows get of what links would give them: headers and the beginning of a flow take the rest.

        Of flows between switches, if there are: processors may hold back what stays below one.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            part = self._measured / fair_shares(self._crosses, self.rates)
        part = part[(is_between | ~is_between.any()) & np.isfinite(part)]
        part = np.append(part, _USUAL_PART)  # where all of these flows cross what has changed
        near = np.exp(-((np.log(part[:, None] / _PARTS) / _NEAR) ** 2)).sum(axis=0)
        return float(_PARTS[near.argmax()])

    def changes(self, rates: np.ndarray) -> list[tuple[int, float, np.ndarray]]:
        """Return each link that flows which are off cross, with each other rate: number, factor, rates of all."""
        off = self._off(rates)[:, :, None] * self._crosses
        mean = off.sum(axis=(0, 1)) / np.maximum(self._crosses.sum(axis=(0, 1)), 1)
        places = np.flatnonzero((mean >= OFF / 3) & np.isfinite(rates)).tolist()
        return [(place, factor, _changed(rates, place, factor)) for place in places for factor in _FACTORS.tolist()]

    def num_pairs_of(self, rates: np.ndarray, others: np.ndarray) -> int:
        """Return how many pairs of hosts get a rate by the ones that is a tenth off that by the others."""
        one, other = (fair_shares(self._crosses, each) for each in (rates, others))
        with np.errstate(divide="ignore", invalid="ignore"):
            is_other = np.abs(np.log(one / other)) > 0.1
        return len(set(self._pairs[is_other & (self._pairs >= 0)].tolist()))

    def loss(self, rates: np.ndarray) -> float:
        """Return how badly these rates explain what was measured (Huber's loss)."""
        return float(huber_losses(self._off(rates) / self._noise).sum())

    def _off(self, rates: np.ndarray) -> np.ndarray:
        """Return by how much each flow is off, as a logarithm; 0 where there is none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.abs(np.log(self._part * fair_shares(self._crosses, rates) / self._measured))
        return np.where(np.isfinite(off), off, 0.0)


def _changed(rates: np.ndarray, place: int, factor: float) -> np.ndarray:
    other = rates.copy()
    other[place] *= factor
    return other


def _scaled(known: Topology, factors: Mapping[DirectedLink, float]) -> dict[str, Link]:
    scaled = {}
    for name, link in known.links():
        up, down = (factors.get(DirectedLink(name, way), 1.0) for way in WAYS)
        up_bytes_per_s, down_bytes_per_s = link.up_bytes_per_s * up, link.down_bytes_per_s * down
        scaled[name] = replace(link, up_bytes_per_s=up_bytes_per_s, down_bytes_per_s=down_bytes_per_s)
    return scaled
