"""Spares: who they are, that both owners are sent the sum, and that links carry what they carried without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from syncline.errors import ScheduleError
from syncline.schedule import (
    Collective,
    Layout,
    ShardedStep,
    draft_with_owners,
    plan_sharded_step,
    predict_sharded_step,
    verify,
)
from syncline.schedule.spares import add_spares, choose_spares, part_of, spare_of_each, spares_of, ways_apart
from syncline.schedule.step_candidates import draft_sharded_steps
from syncline.schedule.step_flow import STEP
from syncline.schedule.traffic import shares
from syncline.topology import Topology

MIB = 1 << 20
GATEWAYS = """
switch: core
children:
  - {host: "g[0-2]", ranks: 2, gateway: one, uplink: 100 Mbit/s}
  - {host: h, ranks: 3, uplink: 200 Mbit/s}
"""
LONELY = """
switch: core
children:
  - {host: big, ranks: 7, uplink: 1 Gbit/s}
  - {host: small, uplink: 1 Gbit/s}
"""
TOPOLOGIES = {
    name: Topology.load(name)
    for name in ("two-racks-5-3", "deep-asymmetric", "three-racks-uneven-uplinks", "flat-8", "two-sites", "demo-1-3")
} | {
    "flat-2": Topology.flat(2),
    "flat-5": Topology.flat(5, rate=1e8),
    "one_host": Topology.parse("{host: a, ranks: 6}"),
    "gateways": Topology.parse(GATEWAYS),
    "lonely": Topology.parse(LONELY),
}


def num_moved(step: ShardedStep) -> float:
    """Return how many times the whole data is sent from some rank to another."""
    return sum(float(shares(half.draft).sum()) for half in (step.reduce_scatter, step.all_gather))


@pytest.mark.parametrize("num_bytes", [64 << 10, 16 * MIB])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_owners_and_spares_are_apart_and_nothing_more_moves(name: str, num_bytes: int) -> None:
    topology = TOPOLOGIES[name]
    step = plan_sharded_step(topology, num_bytes, spares=1)
    assert step.apart is not None
    assert (step.apart == "rank") == (name == "one_host")
    owners, spares = step.reduce_scatter.owners
    for owner, spare in zip(owners.tolist(), spares.tolist(), strict=True):
        assert part_of(topology, owner, step.apart) != part_of(topology, spare, step.apart)
    assert sum(step.shares) == pytest.approx(1) == sum(step.spare_shares)
    assert num_moved(step) == pytest.approx(2 * (topology.num_ranks - 1)), "each atom is sent to each rank once a half"


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name not in {"lonely", "gateways", "flat-2"}])
def test_spares_on_the_nearest_other_hosts_cost_little(name: str) -> None:
    topology = TOPOLOGIES[name]
    candidates = draft_sharded_steps(topology, 16 * MIB)
    near = "rank" if name == "one_host" else "host"
    (_, prediction), _ = choose_spares(candidates, topology, 16 * MIB, apart=near)
    assert prediction.time_s <= (1.12 if name == "deep-asymmetric" else 1.1) * candidates[0][1].time_s


def test_racks_are_taken_where_that_costs_less_than_a_tenth() -> None:
    for name, num_bytes, apart in [
        ("two-racks-5-3", 64 << 10, "rack"),
        ("two-racks-5-3", 16 * MIB, "host"),
        ("two-sites", 16 * MIB, "rack"),
        ("demo-1-3", 16 * MIB, "host"),  # one rack is one host: no other rack for whoever owns more than 2/3
    ]:
        topology = TOPOLOGIES[name]
        step = plan_sharded_step(topology, num_bytes, spares=1)
        assert step.apart in {apart, "rack"} if name == "demo-1-3" else step.apart == apart
        found, _ = choose_spares(draft_sharded_steps(topology, num_bytes), topology, num_bytes, apart="host")
        taken_s = predict_sharded_step(step, topology, num_bytes).time_s
        assert taken_s <= 1.1 * found[1].time_s


def test_a_rank_is_spare_for_as_much_as_it_owns_where_no_part_owns_half() -> None:
    for name in ("flat-8", "flat-5", "deep-asymmetric", "one_host"):
        step = plan_sharded_step(TOPOLOGIES[name], 16 * MIB, spares=1)
        assert step.spare_shares == pytest.approx(step.shares, abs=1e-3)
        assert max(map(sum, zip(step.shares, step.spare_shares, strict=True))) <= 2.5 / len(step.shares) + 1e-3


def test_pairs_are_few() -> None:
    """An owner's range has one spare where ranks own the same: every pair more is a view and messages more."""
    for topology in (TOPOLOGIES["flat-8"], TOPOLOGIES["flat-5"], TOPOLOGIES["one_host"]):
        step = plan_sharded_step(topology, 16 * MIB, spares=1)
        assert len({tuple(pair) for pair in step.reduce_scatter.owners.T.tolist()}) == topology.num_ranks


def test_the_small_host_keeps_everything_beside_a_large_one() -> None:
    topology = TOPOLOGIES["lonely"]
    step = plan_sharded_step(topology, 16 * MIB, spares=1)
    assert step.apart == "host"
    assert step.shares[7] + step.spare_shares[7] == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(ScheduleError, match=r"rank 7 would hold .* but may hold 0\.5; give its host more memory"):
        plan_sharded_step(topology, 16 * MIB, spares=1, most=[0.5] * 8)


def test_memory_holds_for_what_is_owned_and_spared_together() -> None:
    most = [0.15, 0.15, *[0.4] * 6]
    step = plan_sharded_step(TOPOLOGIES["flat-8"], 16 * MIB, spares=1, most=most)
    for own, spare, limit in zip(step.shares, step.spare_shares, most, strict=True):
        assert own + spare <= limit + 1e-3
    with pytest.raises(ScheduleError, match="own everything, but may own"):
        plan_sharded_step(TOPOLOGIES["flat-8"], 16 * MIB, spares=1, most=[0.2] * 8)


def test_one_rank_has_no_spares() -> None:
    step = plan_sharded_step(Topology.flat(1), 1000, spares=1)
    assert (step.apart, step.spare_shares) == (None, (0.0,))
    assert ways_apart(Topology.flat(4), [1.0, 0, 0, 0]) == ()
    with pytest.raises(ScheduleError, match="all owners are in 'h0'; take more hosts"):
        spares_of(Topology.flat(4), [(0, 1)], "host")
    with pytest.raises(ScheduleError, match="one spare or none, not 2"):
        plan_sharded_step(Topology.flat(4), 1000, spares=2)


@pytest.mark.parametrize("name", ["two-racks-5-3", "deep-asymmetric", "gateways"])
def test_whole_ranges_have_one_spare_each(name: str) -> None:
    topology = TOPOLOGIES[name]
    owners = [(topology.speakers[place % len(topology.speakers)], 1 + place % 7) for place in range(40)]
    equal = [float(rank in topology.speakers) / len(topology.speakers) for rank in range(topology.num_ranks)]
    apart = ways_apart(topology, equal)[0]
    spares = spare_of_each(topology, owners, equal, apart)
    runs = [(spare, size) for spare, (_, size) in zip(spares, owners, strict=True)]
    scatter, gather = add_spares(
        (draft_with_owners(topology, STEP[0], owners), draft_with_owners(topology, STEP[1], owners)), runs
    )
    total = sum(size for _, size in owners)
    layout = Layout.contiguous(verify(scatter), total, total)
    held = np.zeros((topology.num_ranks, total), dtype=int)
    for rank in range(topology.num_ranks):
        for row in (0, 1):
            for ranges in layout.owned_alike(verify(gather), rank, row=row):
                for start, stop in ranges:
                    held[rank, start:stop] += 1 + row
    start = 0
    for (owner, size), spare in zip(owners, spares, strict=True):
        expected = np.zeros(topology.num_ranks, dtype=int)
        expected[owner], expected[spare] = 1, 2
        assert (held[:, start : start + size] == expected[:, None]).all()
        assert topology.host_of(owner) is not topology.host_of(spare)
        start += size


def test_a_single_parameter_has_a_spare_too() -> None:
    assert spare_of_each(Topology.flat(3), [(0, 10)], [1 / 3] * 3, "host") in {(1,), (2,)}


def test_the_verifier_refuses_a_spare_that_is_not_sent_the_sum() -> None:
    step = plan_sharded_step(TOPOLOGIES["two-racks-5-3"], 16 * MIB, spares=1)
    draft = step.reduce_scatter.draft
    first_copy = int(np.flatnonzero(~draft.transfers.add)[0])
    kept = np.arange(len(draft.transfers)) != first_copy
    with pytest.raises(ScheduleError, match="is refused"):
        verify(replace(draft, transfers=draft.transfers.take(kept)))
    gather = step.all_gather.draft
    with pytest.raises(ScheduleError, match="is refused"):
        verify(replace(gather, transfers=gather.transfers.take(np.arange(len(gather.transfers)) > 0)))


def test_an_all_gather_that_sends_twice_is_refused() -> None:
    scatter, gather = draft_sharded_steps(Topology.flat(4), 1000)[0][0]
    twice = replace(gather, transfers=type(gather.transfers).concatenate([gather.transfers] * 2).in_order())
    with pytest.raises(ScheduleError, match="each rank is to be sent each atom once"):
        add_spares((scatter, twice), [(2, 1), (3, 1), (0, 1), (1, 1)])


def test_halves_are_those_of_a_step() -> None:
    step = plan_sharded_step(TOPOLOGIES["flat-8"], MIB, spares=1)
    assert step.reduce_scatter.collective is Collective.REDUCE_SCATTER
    assert step.reduce_scatter.owners.shape[0] == step.all_gather.owners.shape[0] == 2
