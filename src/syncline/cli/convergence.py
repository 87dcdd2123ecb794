"""``syncline bench convergence``: which update rule comes to a loss first on slow networks.

Steps are predicted for an idle network, of models that compute ``--compute`` in a step: those of synchronous rules as
``syncline advise`` does. Rounds of local steps are all-reduces by the planner's prediction, one in a period: after
computing where they are waited for, else under it. ``Overlapped`` sends what was counted, under computing as long as
gradients are no staler than it allows, so that its time to a loss is a lower bound where links are slower than
computing: here they were fresh. ``Clustered`` sends what was counted too, one phase after the other. With servers that
nobody waits for a worker waits for what it asks its site's server, as if it was alone in asking: a lower bound too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from syncline.bench.convergence import (
    REFERENCE,
    ConvergenceRow,
    Learning,
    Method,
    Network,
    Training,
    add_training,
    load_trainings,
    sites_of,
)
from syncline.cli.advice import Advice, RuleStep, measure_coding
from syncline.cli.plan import PlannerResult, compare_planners
from syncline.priorities.forward_timing import BACKWARD_PER_FORWARD
from syncline.schedule import Collective, CostModel
from syncline.schedule.period import shortest_period
from syncline.topology import DirectedLink, Topology

MORE_STEPS = 2.5
"""So many times synchronous training's steps others may make, to its loss."""
MOST_STALE = 8
"""Iterations for which ``Overlapped()`` does not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained, how long, and where it is written down."""

    tasks: tuple[str, ...]
    methods: tuple[Method, ...]
    networks: tuple[Network, ...]
    num_seeds: int
    num_steps: int
    compute_s: float
    path: Path

    @property
    def every(self) -> int:
        """After how many steps a loss is judged; a site at half speed makes whole steps until then."""
        return 2 * max(1, self.num_steps // 32)


@dataclass(slots=True)
class Trainings:
    """The trainings of a plan, those of its file among them; each new one is written as it ends."""

    plan: Plan
    done: dict[tuple[object, ...], Training] = field(init=False)
    _predictors: dict[tuple[str, int, float], StepPredictor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.done = {training.key: training for training in load_trainings(self.plan.path)}

    def run(self) -> None:
        """Make those that are missing, all methods of a seed and task one after the other."""
        plan, alike = self.plan, dict[str, list[Network]]()
        for network in plan.networks:
            alike.setdefault(network.sites, []).append(network)
        for seed, task, networks in product(range(plan.num_seeds), plan.tasks, alike.values()):
            for method in plan.methods:
                settled = [self._settled(task, network, method) for network in networks]
                self._run_methods(task, networks[0], seed, {each.name: each for each in settled}.values())

    def _settled(self, task: str, network: Network, method: Method) -> Method:
        """Return a method with the period, the sites' speeds and their distances that it has on a network."""
        if method.has_own_pace:
            method = method.with_speeds(network.speeds)
        reference = self.find(task, network, self._reference, 0)
        if reference is None:
            return method
        predictor = self._predictor(network, reference.num_bytes, paced="pace" in method.arguments)
        if method.timing == "apart":
            return method.with_distances(predictor.distances)
        return method.with_period(predictor.period) if method.is_automatic else method

    def _run_methods(self, task: str, network: Network, seed: int, methods: Iterable[Method]) -> None:
        for method in methods:
            if method.steps_of or (wanted := self._wanted(task, network, method, seed)).key in self.done:
                continue
            from syncline.bench.ranks.learning import learn

            target = None if method.name == REFERENCE else self.target(task, network, seed)
            learning = learn(
                task,
                method,
                network.topology,
                seed,
                num_steps=wanted.num_steps,
                every=wanted.every,
                target=target,
            )
            training = replace(wanted, learning=learning)
            self.done[training.key] = training
            add_training(self.plan.path, training)
            step, loss = learning.curve[-1]
            said = f"{task}, {network.topology.num_ranks} ranks, seed {seed}, {method.name}: {loss:.3f} after {step}"
            print(f"bench: {said}", file=sys.stderr, flush=True)

    def _wanted(self, task: str, network: Network, method: Method, seed: int) -> Training:
        plan, name = self.plan, method.steps_of or method.name
        return Training(
            task=task,
            sites=network.sites,
            method=name,
            seed=seed,
            num_steps=plan.num_steps if name == REFERENCE else round(MORE_STEPS * plan.num_steps),
            every=plan.every,
            learning=Learning(num_bytes=0, curve=()),
        )

    def find(self, task: str, network: Network, method: Method, seed: int) -> Learning | None:
        """Return what a training told; None if it was not made."""
        found = self.done.get(self._wanted(task, network, method, seed).key)
        return None if found is None else found.learning

    @property
    def _reference(self) -> Method:
        return next(method for method in self.plan.methods if method.name == REFERENCE)

    def target(self, task: str, network: Network, seed: int) -> float:
        """Return the loss at the end of synchronous training with a seed."""
        learning = self.find(task, network, self._reference, seed)
        assert learning is not None, "it is made first"
        return learning.curve[-1][1]

    def rows(self) -> Iterator[ConvergenceRow]:
        """Yield a row for each task, network and method of which all that was made is there."""
        for task, network, method in product(self.plan.tasks, self.plan.networks, self.plan.methods):
            if row := self._row(task, network, method):
                yield row

    def _row(self, task: str, network: Network, method: Method) -> ConvergenceRow | None:
        method = self._settled(task, network, method)
        told = [self.find(task, network, method, seed) for seed in range(self.plan.num_seeds)]
        found = {seed: learning for seed, learning in enumerate(told) if learning is not None}
        if not found:
            return None
        first = next(iter(found.values()))
        predictor = self._predictor(network, first.num_bytes, paced="pace" in method.arguments)
        step_s, link, link_bytes = predictor.predict(method, first)
        return ConvergenceRow(
            task=task,
            network=network.name,
            method=method.name,
            group=method.group or method.name,
            step_s=step_s,
            link=str(link),
            link_bytes=round(link_bytes),
            steps=tuple(each.steps_to(self.target(task, network, seed)) for seed, each in found.items()),
            most_steps=first.curve[-1][0],
            is_stale=method.timing == "stale" and predictor.link_s(first, str(link)) > step_s,
        )

    def _predictor(self, network: Network, num_bytes: int, *, paced: bool = False) -> StepPredictor:
        """Return what predicts steps of the slowest site, or those of the fastest, beside which others make fewer."""
        compute_s = self.plan.compute_s * (1.0 if paced else network.slowdown)
        made = StepPredictor(topology=network.topology, num_bytes=num_bytes, compute_s=compute_s)
        return self._predictors.setdefault((network.name, num_bytes, compute_s), made)


@dataclass(frozen=True, kw_only=True)
class StepPredictor:
    """How long steps take on one network, for a model of so many bytes, and what they put on the busiest link."""

    topology: Topology
    num_bytes: int
    compute_s: float

    def predict(self, method: Method, learning: Learning) -> tuple[float, DirectedLink | str, float]:
        """Return the seconds of a step, the busiest link, and its bytes."""
        if method.timing == "advice":
            row = self._advised[method.advised]
            return row.step_s, row.link or "-", row.link_bytes
        if method.timing in ("stale", "servers", "apart"):
            return self._of_counted(method, learning)
        period = self.period if method.is_automatic else method.period
        round_s = self._rounds.prediction.time_s / period
        busy = self._rounds.link_bytes
        link = max(busy, key=lambda each: busy[each] / self.topology.bytes_per_s(each))
        inside_s = self._advice.within_parties_s if method.timing == "sites" else self.compute_s
        step_s = inside_s + round_s if method.timing == "in turn" else max(inside_s, round_s)
        return step_s, link, busy[link] / period

    @property
    def period(self) -> int:
        """What ``LocalSteps(period="auto")`` settles on."""
        return shortest_period(self._rounds.prediction.time_s, self._advice.within_parties_s)

    @property
    def distances(self) -> dict[str, float]:
        """How many steps the parameters take from each site to the first one, and back as many."""
        homes = {site: ranks[0] for site, ranks in sites_of(self.topology).items()}
        first = next(iter(homes.values()))
        return {site: self._there_and_back_s(first, home) / 2 / self.compute_s for site, home in homes.items()}

    def _there_and_back_s(self, rank: int, other: int) -> float:
        """Return how long the parameters take from one rank to another, and back."""
        links = *self.topology.route(rank, other), *self.topology.route(other, rank)
        least = min((self.topology.bytes_per_s(link) for link in links), default=math.inf)
        return 2 * self.num_bytes / (least * CostModel().payload_share)

    def _of_counted(self, method: Method, learning: Learning) -> tuple[float, str, float]:
        link_s = {name: self.link_s(learning, name) for name in learning.link_bytes}
        name = max(link_s, key=link_s.__getitem__)
        if method.timing == "stale":
            step_s = max(self.compute_s, link_s[name] / MOST_STALE)
        elif method.timing == "apart":
            asked = [(ranks[0], rank) for ranks in sites_of(self.topology).values() for rank in ranks]
            asked_s = max(self._there_and_back_s(*pair) for pair in asked)
            step_s = self.compute_s + asked_s / int(method.arguments["local_steps"])
        else:
            step_s = self.compute_s + sum(self._phases(link_s).values())
        return step_s, name, learning.link_bytes[name]

    def link_s(self, learning: Learning, name: str) -> float:
        """Return how long a link needs for what a step put on it."""
        rate = self.topology.bytes_per_s(self._links[name]) * CostModel().payload_share
        return learning.link_bytes[name] / rate

    def _phases(self, link_s: dict[str, float]) -> dict[tuple[int, str], float]:
        """Return the longest time of a link of each level and direction: what waits for each other."""
        paths = map(self.topology.path, range(self.topology.num_ranks))
        depth = {node.name: level for path in paths for level, node in enumerate(reversed(path))}
        phases: dict[tuple[int, str], float] = {}
        for name, seconds in link_s.items():
            phase = depth[self._links[name].child], self._links[name].direction
            phases[phase] = max(phases.get(phase, 0.0), seconds)
        return phases

    @cached_property
    def _advised(self) -> dict[str, RuleStep]:
        return {row.name: row for row in self._advice.rows}

    @cached_property
    def _links(self) -> dict[str, DirectedLink]:
        return {str(link): link for link in self._rounds.link_bytes}

    @cached_property
    def _rounds(self) -> PlannerResult:
        return compare_planners(self.topology, Collective.ALL_REDUCE, self.num_bytes).winner

    @cached_property
    def _advice(self) -> Advice:
        return Advice(
            topology=self.topology,
            num_bytes=(self.num_bytes,),
            forward_s=(self.compute_s / (1 + BACKWARD_PER_FORWARD),),
            coding_s_per_byte=measure_coding(),
        )
