"""A thousand ranks are planned, proved and handed out, in as many transfers as are needed.

How long that takes is measured by `make bench-check`.
"""

import random

import pytest
from schedule_trees import balanced_tree

from syncline.schedule import Collective, plan_tree
from syncline.schedule.tree import draft_tree
from syncline.topology import Topology

SIDES = random.Random(3)
ASYMMETRIC = [[SIDES.randint(4, 14) for _ in range(SIDES.randint(5, 15))] for _ in range(10)]
TOPOLOGIES = {
    "flat": Topology.flat(1000),
    "10x10x10": balanced_tree([[10] * 10] * 10),
    "asymmetric": balanced_tree(ASYMMETRIC),
}


NUM_MESSAGES = {"flat": 4 * 999, "10x10x10": 4 * 27, "asymmetric": 1132}
"""Of the rank in the middle, in an all-reduce: all that it sends and receives, twice."""


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_thousand_ranks_are_planned_and_proved(name):
    topology = TOPOLOGIES[name]
    assert topology.num_ranks >= 900
    middle = topology.num_ranks // 2
    all_reduce, broadcast = (
        sum(len(phase.sends + phase.receives) for phase in plan_tree(topology, collective).program(middle))
        for collective in (Collective.ALL_REDUCE, Collective.BROADCAST)
    )
    assert all_reduce == NUM_MESSAGES[name]
    assert 0 < broadcast <= NUM_MESSAGES[name] / 2


def test_drafts_of_a_thousand_ranks_have_the_expected_size():
    assert len(draft_tree(TOPOLOGIES["flat"], Collective.REDUCE_SCATTER).transfers) == 1000 * 999
    assert len(draft_tree(TOPOLOGIES["10x10x10"], Collective.REDUCE_SCATTER).transfers) == 1000 * 27
