"""Where nothing is known of the network, a wrong guess costs no more than the ring of other libraries does."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.schedule import PLANNERS, Collective, choose, plan_sharded_step, predict
from syncline.schedule.cost import most_across, predict_pair
from syncline.schedule.planners import HOST_RING
from syncline.schedule.verifier import split_at_owners
from syncline.topology import Topology

NUM_BYTES = 16_800_000
SHIPPED = ("two-racks-5-3", "three-racks-uneven-uplinks", "flat-8", "deep-asymmetric", "two-sites", "demo-1-3")


@pytest.mark.parametrize("name", SHIPPED)
def test_no_guess_is_slower_than_a_ring_of_all_ranks(name: str) -> None:
    true = Topology.load(name)
    unknown = Topology.flat_on([true.host_of(rank).name for rank in range(true.num_ranks)])
    ring = PLANNERS["ring"].draft(unknown, Collective.ALL_REDUCE)
    for num_bytes in (4 << 20, NUM_BYTES):
        chosen = choose(unknown, Collective.ALL_REDUCE, num_bytes)
        assert predict(chosen, true, num_bytes).time_s <= 1.001 * predict(ring, true, num_bytes).time_s
    step = plan_sharded_step(unknown, NUM_BYTES)
    halves = (step.reduce_scatter.draft, step.all_gather.draft)
    rings = split_at_owners(ring)
    assert rings is not None
    times = [predict_pair(pair, true, NUM_BYTES, 1 << 19, None).time_s for pair in (halves, rings)]
    assert times[0] <= 1.001 * times[1]


def test_hosts_exchange_in_a_ring_and_their_ranks_directly() -> None:
    """Four hosts of two: a link of a host carries as much as with direct exchange, one between neighbours a quarter."""
    unknown = Topology.flat_on([f"n{rank // 2}" for rank in range(8)])
    ring, direct = (each.draft(unknown, Collective.ALL_REDUCE) for each in (HOST_RING, PLANNERS["tree"]))
    assert ring.num_steps == 2 * (1 + 3)
    assert np.allclose([most_across(ring, unknown), most_across(direct, unknown)], [2 * 3 / 4, 2 * 2 * 2 / 4])
    assert choose(unknown, Collective.ALL_REDUCE, NUM_BYTES).planner == "host_ring"


def test_of_two_hosts_or_few_bytes_the_fastest_is_taken() -> None:
    pair = Topology.flat_on(["a", "a", "a", "b", "b", "b"])
    assert choose(pair, Collective.ALL_REDUCE, NUM_BYTES).num_steps == 4
    many = Topology.flat_on([f"n{rank}" for rank in range(16)])
    assert choose(many, Collective.ALL_REDUCE, 1 << 12).planner != "host_ring"


def test_what_is_known_is_planned_as_it_is() -> None:
    for known in (Topology.flat(8), Topology.load("flat-8"), Topology.flat_on(["a"] * 4)):
        assert not known.is_unknown
        assert choose(known, Collective.ALL_REDUCE, NUM_BYTES).planner != "host_ring"
