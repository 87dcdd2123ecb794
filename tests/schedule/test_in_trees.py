"""In-trees for given owners: proved on random trees, exact at the weights, the same in every process."""

import numpy as np
import pytest
from hypothesis import given, settings as effort, strategies as st
from schedule_trees import trees

from syncline.errors import ScheduleError
from syncline.schedule import Collective, CostModel, draft_with_owners, predict, verify
from syncline.schedule.step_flow import STEP, solve_step_flow
from syncline.schedule.traffic import shares
from syncline.topology import Topology

WIRE = CostModel.of_links_alone()


@st.composite
def trees_with_owners(draw):
    topology = draw(trees(max_ranks=16))
    ranks = st.integers(0, topology.num_ranks - 1)
    runs = draw(st.lists(st.tuples(ranks, st.integers(0, 1000)), min_size=1, max_size=12))
    return topology, [*runs, (draw(ranks), 1)]


@effort(max_examples=30)
@given(trees_with_owners(), st.sampled_from(STEP), st.integers(1, 100))
def test_owners_in_any_order_are_met_exactly_and_nothing_is_sent_twice(case, collective, num_atoms):
    topology, owners = case
    schedule = verify(draft_with_owners(topology, collective, owners, num_atoms=num_atoms))
    total = sum(weight for _, weight in owners)
    offsets = schedule.offsets(total)
    found = np.concatenate([np.full(offsets[i + 1] - offsets[i], owner) for i, owner in enumerate(schedule.owners[0])])
    assert found.tolist() == [rank for rank, weight in owners for _ in range(weight)]
    sender = schedule.transfers.src if collective is Collective.REDUCE_SCATTER else schedule.transfers.dst
    sent = np.bincount(sender, shares(schedule.draft), topology.num_ranks)
    owned = np.bincount(found, minlength=topology.num_ranks) / total
    assert sent == pytest.approx(1 - owned if topology.num_ranks > 1 else 0 * owned)


@pytest.mark.parametrize("name", ["two-racks-5-3", "three-racks-uneven-uplinks", "deep-asymmetric", "two-sites"])
@pytest.mark.parametrize("collective", STEP)
def test_links_carry_what_the_flow_says(name, collective):
    topology = Topology.load(name)
    owners = [(rank, 1) for rank in range(topology.num_ranks)]
    equal = [(1 / len(owners),) * 2] * len(owners)
    (flow,) = solve_step_flow(topology, equal, halves=[collective]).halves
    schedule = verify(draft_with_owners(topology, collective, owners, num_atoms=32 * len(owners)))
    busiest = max(predict(schedule, topology, 1 << 20, cost=WIRE).link_s.values()) / (1 << 20)
    assert flow.seconds * (1 - 1e-6) <= busiest <= flow.seconds * 1.03


def test_a_shorter_schedule_needs_fewer_atoms():
    topology = Topology.load("deep-asymmetric")
    owners = [(rank, 1) for rank in range(topology.num_ranks)]
    few, many = (
        verify(draft_with_owners(topology, Collective.REDUCE_SCATTER, owners, num_atoms=count)) for count in (10, 80)
    )
    assert (few.num_atoms, many.num_atoms) == (10, 80)
    assert len(few.transfers) < len(many.transfers)


def test_owners_that_cannot_be_are_refused():
    topology = Topology.flat(3)
    with pytest.raises(ScheduleError, match="take plan_tree"):
        draft_with_owners(topology, Collective.ALL_REDUCE, [(0, 1)])
    for owners in ([(3, 1)], [(0, -1), (1, 2)], [(0, 0)], []):
        with pytest.raises(ScheduleError, match="a rank from 0 to 2 and a weight"):
            draft_with_owners(topology, Collective.REDUCE_SCATTER, owners)


HOSTS = (
    "{switch: s, children: [{host: 'a[0-1]', uplink: 1 Gbit/s, ranks: 3, gateway: one}, {host: b, uplink: 1 Gbit/s}]}"
)


@pytest.mark.parametrize("collective", STEP)
def test_ranks_behind_a_gateway_speak_to_it_alone(collective):
    topology = Topology.parse(HOSTS)
    assert dict(topology.gateways) == {1: 0, 2: 0, 4: 3, 5: 3}
    schedule = verify(draft_with_owners(topology, collective, [(0, 1), (6, 3), (3, 2)]))
    peers = {rank: set() for rank in range(7)}
    for row in schedule.transfers:
        peers[row.src].add(row.dst)
        peers[row.dst].add(row.src)
    assert {rank: peers[rank] for rank in topology.gateways} == {1: {0}, 2: {0}, 4: {3}, 5: {3}}
    assert predict(schedule, topology, 6, cost=WIRE).time_s > 0
    with pytest.raises(ScheduleError, match="rank 4 speaks to its gateway, rank 3, alone and owns nothing"):
        draft_with_owners(topology, collective, [(4, 1)])
