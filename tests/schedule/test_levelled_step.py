"""Steps drawn level by level: right on any tree, within their limits, and as good as links allow for many ranks."""

import random

import pytest
import reference
from hypothesis import given, settings as effort, strategies as st
from schedule_trees import balanced_tree, trees

from syncline.schedule import (
    CostModel,
    Layout,
    levelled_step,
    plan_sharded_step,
    predict_sharded_step,
    sharded_step_bound,
    verify,
)
from syncline.schedule.levelled_step import LevelledStep
from syncline.topology import Link, Topology
from syncline.topology.tree import relinked

SIZE = 64 << 20
SIDES = random.Random(7)
UNEVEN = balanced_tree([[1] * SIDES.randint(3, 12) for _ in range(16)])


@effort(max_examples=20)
@given(trees(max_ranks=16), st.sampled_from([1.0, 1.25, 3.0]), st.sampled_from([1, 4]))
def test_steps_of_random_trees_keep_their_promises_and_limits(topology, cap, atoms_per_child):
    most = [min(1.0, cap / topology.num_ranks)] * topology.num_ranks
    halves = LevelledStep(topology, most, atoms_per_child=atoms_per_child).outlines() if topology.num_ranks > 1 else ()
    for half in (verify(outline.drawn()) for outline in halves):
        reference.check(half, Layout.build(half, 331, 200))
        assert all(share <= part * 1.001 + 1 / 16384 for share, part in zip(half.draft.shares, most, strict=True))


def busiest_s(step, topology):
    prediction = predict_sharded_step(step, topology, SIZE, cost=CostModel.of_links_alone())
    return sum(max(half.link_s.values()) for half in (prediction.reduce_scatter, prediction.all_gather))


@pytest.mark.parametrize("topology", [UNEVEN, Topology.flat(300, rate=125e6)], ids=["racks", "switch"])
def test_links_carry_no_more_than_they_must(topology):
    most = [1.25 / topology.num_ranks] * topology.num_ranks
    step = plan_sharded_step(topology, SIZE, portions=1.25, slice_bytes=4 << 20)
    assert max(step.shares) <= most[0] * 1.01
    assert busiest_s(step, topology) <= 1.05 * sharded_step_bound(topology, SIZE, most=most)


def test_children_of_a_wide_parent_exchange_in_groups():
    step = plan_sharded_step(Topology.flat(300, rate=125e6), SIZE, portions=1, slice_bytes=16 << 20)
    assert len(step.reduce_scatter.transfers) < 300 * 40, "18 groups of 17, not each with each"


def test_portions_of_many_ranks_are_met():
    topology = Topology.flat(150, rate=125e6)
    portions = [2 / 225] * 75 + [1 / 225] * 75
    step = plan_sharded_step(topology, SIZE, portions=portions)
    assert step.shares == pytest.approx(portions, abs=1e-4)
    assert step.reduce_scatter.planner == "levels"


def test_levels_that_are_alike_are_solved_once(monkeypatch):
    solved = []
    solve = levelled_step.solve_step_flow
    monkeypatch.setattr(
        levelled_step, "solve_step_flow", lambda *given, **more: solved.append(1) or solve(*given, **more)
    )
    LevelledStep(balanced_tree([[1] * 8] * 16), [1 / 128] * 128)
    assert len(solved) == 4, "racks and the switch above them, twice each"


def test_a_slow_host_among_many_makes_the_others_add_up_for_it():
    """A host at a tenth of the rate sends its part, and is sent one message of what it owns, not one of each host."""
    root = Topology.flat(100, rate=125e6).root
    topology = Topology(name="slow", root=relinked(root, {root.children[0].name: Link.symmetric(12.5e6)}))
    step = plan_sharded_step(topology, SIZE, portions=1.25, slice_bytes=4 << 20)
    bound = sharded_step_bound(topology, SIZE, most=[1.25 / 100] * 100)
    assert busiest_s(step, topology) <= 1.05 * bound
