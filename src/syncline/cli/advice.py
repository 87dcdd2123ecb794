"""How long a step of one model takes under each rule by prediction, and what would help more.

A step computes for ``compute_s``, one part forward and two backward. What a rule reduces follows the backward pass,
bucket after bucket, at the rate at which all buckets together are predicted to be reduced. What it gathers comes after
that, or with ``overlap_forward=True`` under the next forward pass, which waits for it as in
:mod:`syncline.priorities.forward_timing`, with one class; of several it is said what they gain at most, as in the lab
they gained nothing. Gathers begin in ``step()``, but gradients go before all of them, so until the last is reduced they
get what those leave of the links, and for what of the rear ones is begun then the front one waits. The *exposed* time
is what a step takes beyond computing. Times on links are those of ``syncline plan``, and with codes those by which
``compress="auto"`` decides. Each change is predicted as the job itself is: all rules, the fastest of them.

Where the model's stages are known, ``phase()`` trains it on pairs (:mod:`syncline.schedule.pairs`).

Cores are shared by what ranks compute, move, code and step (:mod:`syncline.cli.processors`).

Left out: latency that the topology does not give, data, and what that module leaves out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from syncline.cli.plan import compare_planners
from syncline.cli.processors import Processors
from syncline.cli.step_plan import plan_replicas
from syncline.priorities.forward_timing import (
    BACKWARD_PER_FORWARD,
    ForwardProfile,
    assumed_issue_s,
    predict_forward,
    search_classes,
)
from syncline.runtime.plans import Plans
from syncline.schedule import PLANNERS, Collective, CostModel, Prediction, lower_bound, predict, with_gateways_chosen
from syncline.schedule.cost import StepPrediction, predicted_slice_bytes
from syncline.schedule.pairs import PairMoves, StageShape, plan_pairs
from syncline.schedule.period import LESS, USUAL, shortest_period
from syncline.schedule.replicas import Replicas, find_parties
from syncline.schedule.step_candidates import compare_caps, draft_sharded_steps
from syncline.topology import DirectedLink, Host, Topology
from syncline.topology.tree import WAYS, relinked
from syncline.units import format_duration, format_rate, format_size

ADAM_COPIES = 2
"""Numbers of optimizer state for each parameter."""
RING, WHOLE = "DDP's ring", "AllReduce()"
MICRO_BATCHES = 4
PAIRS = f"phase(micro_batches={MICRO_BATCHES})"
"""Fewer let ranks of a pair wait for each other, more gain little."""
STAGE_TRIPS = 3
"""Of a stage in a step: read for each pass, and written."""
MOST_CLASSES = 4
MATTERS = 0.05
"""Of a step: a smaller exposed part leaves nothing to gain on the network; codes, and pairs, must save more."""
LEAST_GAIN = 0.03
MOST_SENTENCES, MOST_HOSTS = 3, 16
_CAPS: Mapping[float | None, str] = {1.25: "1.25", 2.0: "2", None: '"fastest"'}
_STEP_PER_FORWARD = 1 + BACKWARD_PER_FORWARD
_SHORTEST_S = 1e-9
_LEAST_LEFT = 1e-6
"""Of links, for gathers beside gradients: next to nothing, so that they keep the order in which they begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What one rule moves in a step: ``reduce_s`` may run under the backward pass, ``gather_s`` only after it."""

    name: str
    reduce_s: float
    gather_s: float = 0.0
    both_s: float = 0.0
    """What the two take at once, as links that carry both allow."""
    shares: tuple[float, ...] | None = None
    """What part each rank owns; None where each has all."""
    link: DirectedLink | None
    """The busiest, None where none limits."""
    link_bytes: int
    carried: tuple[Mapping[DirectedLink, float], ...]
    """Bytes on each link: to reduce, and what is gathered by itself."""
    coding_s: float = 0.0
    """How long codes take beside what links take, for ranks that have a core each."""
    coded_share: float = 0.0
    """The part of the data that each rank codes."""
    is_awaited: bool = True
    """Whether ``step()`` waits for what is gathered; else the next forward pass does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleStep:
    """One rule's step."""

    name: str
    step_s: float
    exposed_s: float
    memory_bytes: int
    """Of parameters, gradients, and an optimizer that keeps two numbers for each parameter, where it is most."""
    link: DirectedLink | None
    link_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassGain:
    """Which connection class is best for each bucket, in forward order, and the part of a step that this saves."""

    classes: tuple[int, ...]
    gain: float

    def __str__(self) -> str:
        num_classes = max(self.classes) + 1
        if self.gain < LEAST_GAIN:
            return f"Several connection classes would gain less than {LEAST_GAIN:.0%} of a step."
        ahead = self.classes.count(0)
        return (
            f"By their model {num_classes} connection classes, the first {ahead} of {len(self.classes)} buckets in one "
            f"of their own, gain at most {self.gain:.0%} of a step; the job finds out by itself."
        )


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The rules for one model on one network. Sequences go by bucket, in forward order.

    ``coding_s_per_byte``: what coding costs with so many bits, for each that is to be tried.
    """

    topology: Topology
    num_bytes: tuple[int, ...]
    forward_s: tuple[float, ...]
    coding_s_per_byte: Mapping[int, float]
    processors: Processors = field(default_factory=Processors)
    stages: tuple[StageShape, ...] = ()
    """Of ``phase()``, if they are known."""

    @property
    def compute_s(self) -> float:
        """What a rank computes in a step."""
        return _STEP_PER_FORWARD * math.fsum(self.forward_s)

    @property
    def num_trained(self) -> int:
        """The ranks that have data."""
        return self.topology.num_ranks - len(self.topology.helpers)

    @cached_property
    def rows(self) -> tuple[RuleStep, ...]:
        """All rules, the fastest first, and DDP's ring at the end where every rank may speak to others."""
        return self._rows(self.forward_s)

    def _rows(self, forward_s: tuple[float, ...]) -> tuple[RuleStep, ...]:
        rows = [self._row(each, forward_s) for each in self._moves]
        rows += [] if self._pairs is None else [self._pair_row(self._pairs, math.fsum(forward_s))]
        return tuple(sorted(rows, key=lambda row: (row.name == RING, row.step_s)))

    @property
    def best(self) -> RuleStep:
        """The fastest; one that sends codes, or trains on pairs, only if nothing else takes about as long."""
        return _best(self.rows)

    def sentences(self) -> list[str]:
        """Return what would help more, what helps most first, each by a prediction."""
        best = self.best
        if best.exposed_s < MATTERS * best.step_s:
            return [
                f"The network does not matter here: {1 - best.exposed_s / best.step_s:.1%} of a step is computing, so "
                "that only faster machines would help."
            ]
        told = [sentence for gain, sentence in sorted(self._changes(), reverse=True) if gain >= LEAST_GAIN]
        return told[:MOST_SENTENCES] or [f"No change that is predicted gives {LEAST_GAIN:.0%} more samples per second."]

    def to_json(self, batch: int | None = None) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "topology": self.topology.name,
            "num_ranks": self.topology.num_ranks,
            "num_bytes": sum(self.num_bytes),
            "compute_s": self.compute_s,
            "processors": asdict(self.processors),
            "rules": [
                asdict(row)
                | {"link": str(row.link) if row.link else None, "samples_per_s": self.samples_per_s(row, batch)}
                for row in self.rows
            ],
            "changes": self.sentences(),
            "classes": asdict(self.classes) if self.classes else None,
            "disk_bytes_per_s": self.disk_bytes_per_s,
        }

    def notes(self) -> list[str]:
        """Return what else there is to know of the rules."""
        told = [] if self.classes is None else [f"{self.best.name}: {self.classes}"]
        if self.disk_bytes_per_s is not None:
            told.append(
                f"{PAIRS} has two of {len(self.stages)} stages in memory, and each rank's disk reads and writes "
                f"{format_size(self.disk_bytes_per_s)} a second for that."
            )
        return told

    @property
    def disk_bytes_per_s(self) -> float | None:
        """What the disk of each rank reads and writes if it trains on pairs: stages go both ways, state once each."""
        if self._pairs is None:
            return None
        step_s = next(row.step_s for row in self.rows if row.name == PAIRS)
        half, own = sum(self.num_bytes) / 2, ADAM_COPIES * self._pairs.most_owned
        return half * (STAGE_TRIPS + 2 * own) / step_s

    def samples_per_s(self, row: RuleStep, batch: int | None) -> float | None:
        """Return what all ranks train on, where each has ``batch`` samples in a step."""
        return None if batch is None else batch * self.num_trained / row.step_s

    @cached_property
    def _moves(self) -> list[Moves]:
        """What each rule moves."""
        topology, total = with_gateways_chosen(self.topology, sum(self.num_bytes)), sum(self.num_bytes)
        if topology.num_ranks == 1:
            return [Moves(name=WHOLE, reduce_s=0.0, link=None, link_bytes=0, carried=({},))]
        comparison = compare_planners(topology, Collective.ALL_REDUCE, total)
        divided = [*_sharded(topology, total), *_replicated(topology, total)]
        divided += self._coded(topology, "Sharded", divided[0].shares)
        overlapped = [
            replace(each, name=f"{each.name[:-1]}, overlap_forward=True)".replace("(, ", "("), is_awaited=False)
            for each in divided
        ]
        rings = [_ring(topology, total) for result in comparison.results if result.planner == "ring"]
        whole = _moved(WHOLE, topology, comparison.winner.prediction)
        return [whole, *self._coded(topology, "AllReduce", None), *divided, *overlapped, *rings]

    @cached_property
    def _backlog_bytes(self) -> int:
        return Plans(self.topology, slice_bytes=None).inflight_bytes

    def _coded(self, topology: Topology, rule: str, shares: tuple[float, ...] | None) -> Iterator[Moves]:
        from syncline.updates.compression import choose_sites, crossing_bytes, time_with_codes_s

        total = sum(self.num_bytes)
        for bits, coding_s in () if topology.gateways else self.coding_s_per_byte.items():
            sites, coded_s = choose_sites(topology, total, bits, shares)
            wire_s = coded_s / CostModel().payload_share
            seconds = time_with_codes_s(wire_s, total, 0.0, len(self.num_bytes))
            crossing = crossing_bytes(topology, sites, total, bits, shares)
            link = max(crossing, key=lambda each: crossing[each] / topology.bytes_per_s(each))
            gather_s = seconds / 2 if rule == "Sharded" else 0.0
            num_halves = 2 if gather_s else 1
            carried = Counter(crossing) + Counter(_inside_sites(topology, sites, total))
            yield Moves(
                name=f'{rule}(compress="int{bits}")',
                reduce_s=seconds - gather_s,
                gather_s=gather_s,
                both_s=seconds,
                shares=shares,
                link=link,
                link_bytes=round(crossing[link]),
                carried=({each: size / num_halves for each, size in carried.items()},) * num_halves,
                coding_s=coding_s * total,
                coded_share=len(sites) / topology.num_ranks,
            )

    def _row(self, moves: Moves, forward_s: tuple[float, ...]) -> RuleStep:
        processors, total = self.processors, sum(self.num_bytes)
        hosts = [[rank.rank for rank in host.ranks] for host in self.topology.hosts]
        shares = moves.shares or (1.0,) * self.topology.num_ranks
        stepping_s = [processors.stepped_s_per_byte * total * sum(shares[rank] for rank in ranks) for ranks in hosts]
        coding_s = self._coding_s(moves)
        moving_s = [self._moving_s(moves, half) for half in range(len(moves.carried))]
        alone_s, num_ranks = _STEP_PER_FORWARD * math.fsum(forward_s), [len(ranks) for ranks in hosts]
        paced, stretch = self._paced(moves), processors.stretch(num_ranks)
        step_s = stretch * alone_s + self._exposed_s(paced, tuple(stretch * each for each in forward_s))
        step_s += max(processors.busiest_s(stepping_s), processors.stepped_s_per_byte * total * max(shares))
        computing_s = [processors.computing * alone_s * count for count in num_ranks]
        work_s = [sum(work) for work in zip(computing_s, stepping_s, coding_s, *moving_s, strict=True)]
        step_s = max(step_s, processors.busiest_s(work_s))
        return RuleStep(
            name=moves.name,
            step_s=step_s,
            exposed_s=step_s - alone_s,
            memory_bytes=round((2 + ADAM_COPIES * max(shares)) * total),
            link=moves.link,
            link_bytes=moves.link_bytes,
        )

    def _paced(self, moves: Moves) -> Moves:
        """Return ``moves`` with what they take of cores added to what they take on links."""
        moving_s = [self._moving_s(moves, half) for half in range(len(moves.carried))]
        coded_s = max(moves.coding_s, self.processors.busiest_s(self._coding_s(moves))) / len(moving_s)
        halves_s = [self.processors.busiest_s(each) + coded_s for each in moving_s]
        return replace(
            moves,
            reduce_s=moves.reduce_s + halves_s[0],
            gather_s=moves.gather_s + sum(halves_s[1:]),
            both_s=moves.both_s + sum(halves_s),
        )

    def _coding_s(self, moves: Moves) -> list[float]:
        """Return the core-seconds in which each host codes."""
        return [moves.coding_s * moves.coded_share * len(host.ranks) for host in self.topology.hosts]

    @cached_property
    def _pairs(self) -> PairMoves | None:
        """What pairs move; None where nobody knows the model's stages, or ``phase()`` refuses the network."""
        topology = self.topology
        if not self.stages or topology.num_ranks % 2 or topology.gateways:
            return None
        return plan_pairs(topology, self.stages)

    def _pair_row(self, pairs: PairMoves, forward_s: float) -> RuleStep:
        processors, hosts = self.processors, self.topology.hosts
        num_ranks = [len(host.ranks) for host in hosts]
        owned_bytes = pairs.most_owned * sum(self.num_bytes) / 2
        stepping_s = [processors.stepped_s_per_byte * owned_bytes * count for count in num_ranks]
        moving_s = [processors.moved_s_per_byte * pairs.moved[host.name] for host in hosts]
        computing_s = [processors.computing * (1 + _STEP_PER_FORWARD) * forward_s * count for count in num_ranks]
        updates_s = pairs.updates_s + processors.busiest_s(moving_s) + processors.busiest_s(stepping_s)
        work_s = [sum(work) for work in zip(computing_s, stepping_s, moving_s, strict=True)]
        busy_s = {link: size / self.topology.bytes_per_s(link) for link, size in pairs.carried.items()}
        link = max(busy_s, key=busy_s.__getitem__)
        step_s = max(
            pairs.step_s(processors.stretch(num_ranks) * forward_s, updates_s, MICRO_BATCHES),
            processors.busiest_s(work_s),
            busy_s[link] / CostModel().payload_share,
        )
        return RuleStep(
            name=PAIRS,
            step_s=step_s,
            exposed_s=step_s - _STEP_PER_FORWARD * forward_s,
            memory_bytes=round((2 + ADAM_COPIES * pairs.most_owned) * pairs.held_bytes),
            link=link if busy_s[link] else None,
            link_bytes=round(pairs.carried[link]),
        )

    def _moving_s(self, moves: Moves, half: int) -> list[float]:
        """Return the core-seconds in which each host moves what is reduced, or gathered."""
        carried, inside_bytes = moves.carried[half], 4 * sum(self.num_bytes) / len(moves.carried)
        return [
            self.processors.moved_s_per_byte
            * (
                sum(carried.get(DirectedLink(host.name, way), 0.0) for way in WAYS)
                + (len(host.ranks) - 1) * inside_bytes
            )
            for host in self.topology.hosts
        ]

    def _exposed_s(self, moves: Moves, forward_s: tuple[float, ...]) -> float:
        if moves.is_awaited:
            return self._reduced_s(moves, forward_s)[0] + moves.gather_s
        profile = self._forward_profile(moves, forward_s)
        return predict_forward(profile, (0,) * profile.num_layers).time_s - math.fsum(forward_s)

    def _reduced_s(self, moves: Moves, forward_s: tuple[float, ...]) -> tuple[float, ...]:
        """Return when each bucket is reduced, counted from the end of the backward pass; the first is the last."""
        total, reduce_s = sum(self.num_bytes), max(moves.reduce_s, _SHORTEST_S)
        return assumed_issue_s(self.num_bytes, forward_s, total / reduce_s)

    def _forward_profile(self, moves: Moves, forward_s: tuple[float, ...]) -> ForwardProfile:
        begun_s = self._reduced_s(moves, forward_s)
        left = max(_LEAST_LEFT, 1 - (moves.both_s - moves.gather_s) / max(moves.reduce_s, _SHORTEST_S))
        return ForwardProfile(
            num_bytes=self.num_bytes,
            forward_s=forward_s,
            issued_s=tuple(begun_s[0] - left * (begun_s[0] - each_s) for each_s in begun_s),
            bytes_per_s=sum(self.num_bytes) / max(moves.gather_s, _SHORTEST_S),
            backlog_bytes=self._backlog_bytes,
        )

    @cached_property
    def classes(self) -> ClassGain | None:
        """What connection classes gain at most; None where the best rule's next forward pass waits for nothing."""
        moves = next((each for each in self._moves if each.name == self.best.name and not each.is_awaited), None)
        if moves is None:
            return None
        stretch = self.processors.stretch([len(host.ranks) for host in self.topology.hosts])
        profile = self._forward_profile(self._paced(moves), tuple(stretch * each for each in self.forward_s))
        one_s = predict_forward(profile, (0,) * profile.num_layers).time_s
        found = search_classes(profile, MOST_CLASSES)
        return ClassGain(classes=found.classes, gain=(one_s - found.time_s) / self.best.step_s)

    def _changes(self) -> Iterator[tuple[float, str]]:
        """Yield what each change gains in samples per second, and a sentence on it."""
        best, now = self.best, f"in place of {format_duration(self.best.step_s)}"
        if best.link is not None:
            node, rate = self.topology.node(best.link.child), 2 * self.topology.bytes_per_s(best.link)
            assert node.link is not None, "it is the busiest"
            link = replace(
                node.link, up_bytes_per_s=2 * node.link.up_bytes_per_s, down_bytes_per_s=2 * node.link.down_bytes_per_s
            )
            alike = [each for each in self.topology.walk() if each.link == node.link and type(each) is type(node)]
            others = len(alike) - 1
            root = relinked(self.topology.root, {each.name: link for each in alike})
            faster = replace(self, topology=replace(self.topology, root=root)).best
            yield (
                best.step_s / faster.step_s - 1,
                f"With the link above {node.name}{f' and {others} like it' if others else ''} twice as fast "
                f"({format_rate(rate)} {best.link.direction}) a step takes {format_duration(faster.step_s)} {now} "
                f"({faster.name}).",
            )
        larger = _best(self._rows(tuple(2 * seconds for seconds in self.forward_s)))
        gain = 2 * best.step_s / larger.step_s - 1
        yield (
            gain,
            f"With a batch twice as large, so that a step computes for {format_duration(2 * self.compute_s)}, it takes "
            f"{format_duration(larger.step_s)}: {_more(gain)} per second ({larger.name}).",
        )
        yield from self._with_more_cores(now)
        yield from self._with_one_less(now)
        if not self.topology.helpers:
            whole = next(each for each in self._moves if each.name == WHOLE)
            period = min(USUAL, shortest_period(whole.reduce_s, self.within_parties_s))
            step_s = max(self.within_parties_s, whole.reduce_s / period)
            yield (
                best.step_s / step_s - 1 if step_s <= LESS * best.step_s else 0.0,
                f"LocalSteps(period={period}) moves everything between sites once in {period} steps while it computes "
                f"on, so that one takes {format_duration(step_s)} {now}; it is another algorithm, whose loss is to be "
                "watched.",
            )

    def _with_more_cores(self, now: str) -> Iterator[tuple[float, str]]:
        num_cores = 2 * self.processors.num_cores
        more = replace(self, processors=replace(self.processors, num_cores=num_cores)).best
        where = "on the machine" if self.processors.is_one_machine else "on each host"
        yield (
            self.best.step_s / more.step_s - 1,
            f"With {num_cores:g} cores {where} a step takes {format_duration(more.step_s)} {now} ({more.name}).",
        )

    @property
    def within_parties_s(self) -> float:
        """What a step of ``LocalSteps()`` takes whose rounds take nothing: each party averages its own gradients."""
        return max(map(self._party_s, find_parties(self.topology, "auto")))

    def _party_s(self, ranks: Sequence[int]) -> float:
        processors, party = self.processors, self.topology.restricted(ranks)
        if processors.is_one_machine:
            cores = processors.num_cores * len(ranks) / self.topology.num_ranks  # the other parties have the rest
            processors = replace(processors, num_cores=cores)
        return next(
            row for row in replace(self, topology=party, processors=processors).rows if row.name == WHOLE
        ).step_s

    def _with_one_less(self, now: str) -> Iterator[tuple[float, str]]:
        """Predict the job without the host whose loss leaves most, by the bound: of hosts that are alike the first."""
        parent_of = self.topology.parent_of
        alike = {
            (getattr(parent_of(host.name), "name", ""), repr(host.link), len(host.ranks)): host
            for host in reversed(self.topology.hosts)
        }
        by_rate = sorted(alike.values(), key=self._narrowest)[:MOST_HOSTS]
        left = [(host, self._without(host)) for host in by_rate if len(self.topology.hosts) > 1]
        for host, less in sorted(left, key=lambda one: one[1].most_samples_per_s, reverse=True)[:1]:
            gain = (less.num_trained / less.best.step_s) / (self.num_trained / self.best.step_s) - 1
            yield (
                gain,
                f"Without {host.name} a step takes {format_duration(less.best.step_s)} {now}: {_more(gain)} per "
                f"second, with {less.topology.num_ranks} ranks in place of {self.topology.num_ranks}.",
            )

    @property
    def most_samples_per_s(self) -> float:
        """What no all-reduce of everything can exceed, for a batch of one: cheap to know."""
        bound_s = lower_bound(self.topology, Collective.ALL_REDUCE, sum(self.num_bytes))
        return self.num_trained / max(self.compute_s, bound_s)

    def _without(self, host: Host) -> Advice:
        own = {rank.rank for rank in host.ranks}
        others = [rank for rank in range(self.topology.num_ranks) if rank not in own]
        return replace(self, topology=self.topology.restricted(others))

    def _narrowest(self, host: Host) -> float:
        links = [node.link for node in self.topology.path(host.ranks[0].rank) if node.link]
        return min(min(link.up_bytes_per_s, link.down_bytes_per_s) for link in links)


@cache
def measure_coding() -> Mapping[int, float]:
    """Return what codes of each number of bits cost on this machine, in seconds for a byte."""
    from syncline.tensors.codec import Codec

    return {bits: Codec(bits).measure_s_per_byte() for bits in (8, 4)}


def _best(rows: tuple[RuleStep, ...]) -> RuleStep:
    plain = next(row for row in rows if "compress=" not in row.name and row.name != PAIRS)
    return plain if plain.step_s <= (1 + MATTERS) * rows[0].step_s else rows[0]


def _more(gain: float) -> str:
    return f"{gain:.0%} more samples" if gain < 1 else f"{1 + gain:.1f} times the samples"


def _sharded(topology: Topology, total: int) -> Iterator[Moves]:
    """Yield a plain step for each choice of portions that changes it."""
    slice_bytes, told = predicted_slice_bytes(topology), set()
    balanced = draft_sharded_steps(topology, total, slice_bytes=slice_bytes)[0]
    caps = compare_caps(topology, total, list(_CAPS), slice_bytes)
    named = [("Sharded()", balanced), *((f"Sharded(portions={_CAPS[cap]})", found) for cap, found in caps)]
    for name, ((scatter, _), prediction) in named:
        halves, shares = (prediction.reduce_scatter, prediction.all_gather), scatter.shares
        figures = (halves[0].time_s, halves[1].time_s, max(shares))
        if figures not in told:
            told.add(figures)
            yield _moved(name, topology, *halves, shares=shares)


def _replicated(topology: Topology, total: int) -> Iterator[Moves]:
    for level, step in plan_replicas(topology, total, "auto").results.items():
        if len(step.replicas) > 1:
            name = f"Sharded(replicate={level.removeprefix('level ')})"
            yield _moved(name, topology, step.within, step.after, shares=step.shares)


def _ring(topology: Topology, num_bytes: int) -> Moves:
    """Return what DDP moves over gloo, whose messages are not asked for."""
    ring, cost = PLANNERS["ring"].plan(topology, Collective.ALL_REDUCE), CostModel(num_crossings=1)
    return _moved(RING, topology, predict(ring, topology, num_bytes, predicted_slice_bytes(topology), cost=cost))


def _moved(
    name: str,
    topology: Topology,
    first: Prediction,
    second: Prediction | None = None,
    *,
    shares: tuple[float, ...] | None = None,
) -> Moves:
    """Return what is predicted of a rule, with the link that is busy longest in both parts together."""
    parts = [first] if second is None else [first, second]
    busy_s = {link: sum(part.link_s[link] for part in parts) for link in first.link_s}
    link = max(busy_s, key=busy_s.__getitem__)
    carried = [
        {
            each: topology.bytes_per_s(each) * CostModel().payload_share * part.link_s[each]
            for each in busy_s
            if busy_s[each]
        }
        for part in parts
    ]
    return Moves(
        name=name,
        reduce_s=first.time_s,
        gather_s=0.0 if second is None else second.time_s,
        both_s=0.0 if second is None else StepPrediction(reduce_scatter=first, all_gather=second).overlapped_s,
        shares=shares,
        link=link if busy_s[link] else None,
        link_bytes=round(sum(each.get(link, 0.0) for each in carried)),
        carried=tuple(carried),
    )


def _inside_sites(topology: Topology, sites: Replicas, total: int) -> dict[DirectedLink, float]:
    """Return the bytes on the links of hosts that are summed and gathered in full precision inside of sites."""
    inside = {}
    for site in sites:
        hosts = {topology.host_of(rank).name for rank in site}
        for host in hosts:
            for way in WAYS:
                inside[DirectedLink(host, way)] = 2 * total * (len(hosts) - 1) / len(hosts)
    return inside
