"""A thousand ranks are planned, proved and handed out in seconds of one core; eight in milliseconds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from schedule_trees import balanced_tree, star

from syncline.schedule import PLANNERS, Collective, choose, plan_sharded_step, plan_tree
from syncline.topology import Topology

plan_weighted_tree = PLANNERS["weighted_tree"].plan

Say = Callable[[str], None]
SIDES = random.Random(3)
ASYMMETRIC = [[SIDES.randint(4, 14) for _ in range(SIDES.randint(5, 15))] for _ in range(10)]
TOPOLOGIES = {
    "flat": Topology.flat(1000),
    "10x10x10": balanced_tree([[10] * 10] * 10),
    "asymmetric": balanced_tree(ASYMMETRIC),
}
BUDGET_S = 10.0


def processor_seconds(work: Callable[[], object]) -> float:
    """How long a processor is busy with ``work``."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.BROADCAST])
def test_a_thousand_ranks_plan_and_verify_in_time(name: str, collective: Collective, say: Say) -> None:
    topology = TOPOLOGIES[name]
    taken = processor_seconds(lambda: plan_tree(topology, collective).program(topology.num_ranks // 2))
    say(f"{topology.num_ranks} ranks in {taken:.2f} s (less than {BUDGET_S:g})")
    assert taken < BUDGET_S


@pytest.mark.parametrize("plan", [plan_tree, plan_weighted_tree])
def test_eight_ranks_plan_at_once(plan: Callable[..., object], say: Say) -> None:
    topology = Topology.load("two-racks-5-3")
    best = min(processor_seconds(lambda: plan(topology, Collective.ALL_REDUCE)) for _ in range(5))
    say(f"{best * 1e3:.1f} ms (less than 20)")
    assert best < 0.02


def test_eight_ranks_choose_at_once(say: Say) -> None:
    topology = Topology.load("two-racks-5-3")
    best = min(processor_seconds(lambda: choose(topology, Collective.ALL_REDUCE, 1 << 20)) for _ in range(5))
    say(f"{best * 1e3:.1f} ms (less than 50)")
    assert best < 0.05


def test_as_many_ranks_as_are_searched_for_plan_in_time(say: Say) -> None:
    topology = balanced_tree([[4, 12, 8], [6, 2], [16, 7, 9]])
    taken = processor_seconds(lambda: plan_weighted_tree(topology, Collective.ALL_GATHER, target="rank_order"))
    say(f"{topology.num_ranks} ranks in {taken:.2f} s (less than {BUDGET_S:g})")
    assert taken < BUDGET_S


@pytest.mark.parametrize(("num_ranks", "budget_s"), [(64, 1.0), (256, 5.0)])
def test_a_sharded_step_is_planned_in_time(num_ranks: int, budget_s: float, say: Say) -> None:
    rates = [12.5e6, 25e6, 50e6, 125e6]
    topology = star([(SIDES.choice(rates), SIDES.choice(rates)) for _ in range(num_ranks)])
    plan_sharded_step(Topology.flat(2, rate=1e6), 1 << 20)  # imports the solver
    taken = processor_seconds(lambda: plan_sharded_step(topology, 64 << 20))
    say(f"{num_ranks} ranks in {taken:.2f} s (less than {budget_s:g})")
    assert taken < budget_s
