"""Plans in outline: they say what the drawn ones say, and the pieces by which they are proved stand for all data."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings as effort, strategies as st
from schedule_trees import balanced_tree, trees

from syncline.errors import ScheduleError
from syncline.schedule import Collective, lower_bound, predict, sharded_step_bound, verify
from syncline.schedule.bound import bound_of, branch_of
from syncline.schedule.levelled_step import LevelledStep
from syncline.schedule.outline import GATHER, SCATTER, DirectExchange, DrawnExchange
from syncline.schedule.tree import draft_tree, outline_tree
from syncline.schedule.verifier import verify_outline
from syncline.schedule.weighted_tree import draft_portions, outline_weighted_tree
from syncline.topology import Link, Topology
from syncline.topology.tree import relinked

SUMS = [Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_REDUCE]
SIDES = random.Random(7)
UNEVEN = balanced_tree([[1] * SIDES.randint(3, 12) for _ in range(16)])
PARTLY = balanced_tree([[[2] * 3] * 3, [[2] * 3, [2] * 5, [2] * 5], [[2] * 3] * 3])


def with_links(topology, link_of):
    """The same tree, with the link that ``link_of`` makes of the number of each switch or host."""
    nodes = [node for node in topology.walk() if node.link is not None and not node.name.startswith("rank ")]
    links = {node.name: link_of(number) for number, node in enumerate(nodes)}
    return Topology(name="links", root=relinked(topology.root, links))


def with_latencies(topology, seed):
    draw = random.Random(seed)
    rates = [draw.choice([25e6, 50e6, 125e6]) for _ in topology.walk()]
    return with_links(topology, lambda number: Link.symmetric(rates[number], latency_s=draw.choice([0.0, 1e-3, 5e-3])))


def check_equal(outline, draft, topology):
    assert outline.num_messages == len(draft.transfers)
    assert outline.num_steps == draft.num_steps
    assert outline.shares == pytest.approx(draft.shares)
    assert outline.link_bytes(topology, 10**9) == pytest.approx(
        verify(draft).link_bytes(topology, 10**9), abs=2 * len(draft.transfers)
    )
    for in_windows in (False, True):
        for size in (1 << 16, 64 << 20):
            found, drawn = (predict(plan, topology, size, 4 << 20, in_windows=in_windows) for plan in (outline, draft))
            assert found.time_s == pytest.approx(drawn.time_s, rel=1e-9)
            assert found.rank_s == pytest.approx(drawn.rank_s, rel=1e-9)
            assert found.link_s == pytest.approx(drawn.link_s, rel=1e-9, abs=1e-9 * drawn.time_s)


def check_pieces(outline, draft):
    """The pieces are on the ways of the atoms that they are in."""
    places, _ = outline.standing
    pieces = verify(outline.pieces(places))
    cuts = np.array([cut / draft.denominator for cut in draft.cuts])
    atoms = np.searchsorted(cuts, places, "right") - 1
    assert pieces.owners.tolist() == draft.owners[:, atoms].tolist()
    for number, atom in enumerate(atoms.tolist()):
        rows, of_piece = draft.transfers, pieces.transfers
        rows, of_piece = (
            each.take((each.first <= at) & (each.last > at)) for each, at in ((rows, atom), (of_piece, number))
        )
        ways = [sorted(zip(each.step, each.src, each.dst, each.add, strict=True)) for each in (rows, of_piece)]
        assert ways[0] == ways[1]


@effort(max_examples=15)
@given(trees(max_ranks=16), st.sampled_from([1.0, 1.25, 3.0, 16.0]), st.sampled_from([1, 4]), st.integers(0, 99))
def test_steps_of_random_trees_are_in_outline_what_they_are_drawn(topology, cap, atoms_per_child, seed):
    topology = with_latencies(topology, seed)
    if topology.num_ranks > 1:
        most = [min(1.0, cap / topology.num_ranks)] * topology.num_ranks
        step = LevelledStep(topology, most, atoms_per_child=atoms_per_child)
        for outline in step.outlines():
            draft = outline.drawn()
            check_equal(outline, draft, topology)
            check_pieces(outline, draft)


@effort(max_examples=15)
@given(trees(max_ranks=16), st.sampled_from(SUMS), st.integers(0, 99))
def test_trees_are_in_outline_what_they_are_drawn(topology, collective, seed):
    topology, draw = with_latencies(topology, seed), random.Random(seed)
    uneven = {node.name: [draw.choice([0, 1, 1, 3]) for _ in node.children] for node in topology.walk()}
    for fractions in ({}, {name: weights for name, weights in uneven.items() if sum(weights)}):
        if topology.num_ranks > 1:
            outline, draft = (plan(topology, collective, fractions=fractions) for plan in (outline_tree, draft_tree))
            check_equal(outline, draft, topology)
            check_pieces(outline, draft)


@pytest.mark.parametrize("topology", [UNEVEN, PARTLY, with_latencies(PARTLY, 5)], ids=["uneven", "partly", "links"])
def test_larger_trees_are_in_outline_what_they_are_drawn(topology):
    step = LevelledStep(topology, [1.25 / topology.num_ranks] * topology.num_ranks)
    for outline in step.outlines():
        check_equal(outline, outline.drawn(), topology)
    for collective in SUMS:
        outline, draft = (plan(topology, collective) for plan in (outline_weighted_tree, draft_portions))
        check_equal(outline, draft, topology)


def test_gateways_are_kept_to_in_outline():
    hosts = "[{host: 'h[0-2]', uplink: 1 Gbit/s, ranks: 3, gateway: one}, {host: g, uplink: 2 Gbit/s, ranks: 2}]"
    topology = Topology.parse(f"{{switch: s, children: {hosts}}}")
    outline, draft = (plan(topology, Collective.ALL_REDUCE) for plan in (outline_tree, draft_tree))
    check_equal(outline, draft, topology)
    assert not any(outline.shares[rank] for rank in topology.gateways)


def test_pieces_stand_for_all_data_so_no_row_can_be_missed():
    """Whatever row of whatever exchange is left out, the pieces show it."""
    topology = with_latencies(balanced_tree([[2, 2], [2, 2], [1, 1, 3]]), 3)
    step = LevelledStep(topology, [1.0] * topology.num_ranks, atoms_per_child=4)
    outlines = step.outlines()
    assert "by symmetry" in verify_outline(outlines[SCATTER])
    num_left_out = 0
    for part in outlines[SCATTER].parts:
        whole = part.exchange
        assert isinstance(whole, DrawnExchange)
        for half in (SCATTER, GATHER):
            for row in range(len(whole.halves[half])):
                halves = list(whole.halves)
                halves[half] = halves[half].take(np.arange(len(halves[half])) != row)
                part.exchange = DrawnExchange(whole.num_children, whole.sizes, whole.owners.tolist(), tuple(halves))
                with pytest.raises(ScheduleError, match=r"is counted 0 times|never written|was not"):
                    verify_outline(replace(outlines[half]))  # which has chosen no pieces yet
                num_left_out += 1
        part.exchange = whole
    assert num_left_out > 40
    verify_outline(outlines[GATHER])


def test_an_exchange_that_leaves_a_child_out_is_refused(monkeypatch):
    outline = outline_tree(PARTLY, Collective.ALL_REDUCE)
    way = DirectExchange.way
    monkeypatch.setattr(DirectExchange, "way", lambda *given: tuple(each[1:] for each in way(*given)))
    with pytest.raises(ScheduleError, match="is counted 0 times instead of 1"):
        verify_outline(outline)


def test_twenty_thousand_ranks_that_are_alike_are_a_dozen_parts():
    topology = balanced_tree([[[8] * 50] * 10] * 5)
    assert topology.num_ranks == 20_000
    step = LevelledStep(topology, [1.25 / 20_000] * 20_000)
    scatter, gather = step.outlines()
    assert len(scatter.parts) <= 12
    for outline in (scatter, gather, outline_tree(topology, Collective.ALL_REDUCE)):
        assert verify_outline(outline).startswith("by symmetry: ")
    busiest_s = sum(max(predict(half, topology, 64 << 20).link_s.values()) for half in (scatter, gather))
    assert sharded_step_bound(topology, 64 << 20) <= busiest_s <= 1.1 * sharded_step_bound(topology, 64 << 20)


def test_a_tree_without_symmetry_is_proved_on_a_sample_and_says_so():
    rates = random.Random(1)
    topology = with_links(balanced_tree([[1] * 20] * 10), lambda _: Link.symmetric(rates.uniform(1e7, 2e7)))
    outline = outline_tree(topology, Collective.ALL_REDUCE)
    assert verify_outline(outline).startswith("on a sample, drawn from what ")
    assert "by symmetry: " in verify_outline(outline_tree(balanced_tree([[1] * 20] * 10), Collective.ALL_REDUCE))


@pytest.mark.parametrize("topology", [UNEVEN, PARTLY], ids=["uneven", "partly"])
def test_bounds_of_siblings_that_are_alike_are_those_of_the_whole_tree(topology):
    rates = random.Random(2)
    nearly = with_links(topology, lambda _: Link.symmetric(125e6 * rates.uniform(1, 1 + 1e-7)))
    for collective in SUMS:
        whole = bound_of(branch_of(topology, swapped=collective is Collective.ALL_GATHER), collective)
        assert lower_bound(topology, collective, 1 << 30) == pytest.approx(whole * (1 << 30), rel=1e-9)
    most = [1.1 / topology.num_ranks] * topology.num_ranks
    whole_s = sharded_step_bound(nearly, 1 << 30, most=most)
    assert sharded_step_bound(topology, 1 << 30, most=most) == pytest.approx(whole_s, rel=1e-5)
