"""Layouts cover the buffer once, keep what they promise together, and every schedule is right on every one of them."""

from itertools import pairwise

import pytest
import reference
from hypothesis import given, settings as effort, strategies as st
from schedule_trees import trees

from syncline.errors import ScheduleError
from syncline.schedule import PLANNERS, Collective, Layout, plan_tree
from syncline.topology import Topology

plan_ring = PLANNERS["ring"].plan

FLAT = plan_tree(Topology.flat(4), Collective.ALL_REDUCE)


def covered(layout):
    return sorted((offsets[0], offsets[-1]) for offsets in layout.slices)


def test_slices_are_even_and_divided_like_the_whole():
    layout = Layout.build(FLAT, 20, 8)
    assert layout.slices == ((0, 1, 3, 4, 6), (6, 7, 9, 11, 13), (13, 14, 16, 18, 20))
    assert layout.num_elements == 20
    assert layout.owned_ranges(FLAT, 1) == ((1, 3), (7, 9), (14, 16))


def test_empty_buffer_has_one_empty_slice():
    for layout in (Layout.build(FLAT, 0, 8), Layout.contiguous(FLAT, 0, 8)):
        assert layout.slices == ((0, 0, 0, 0, 0),)
        assert [layout.owned_ranges(FLAT, rank) for rank in range(4)] == [()] * 4


def test_contiguous_slices_go_round_the_owners():
    layout = Layout.contiguous(FLAT, 16, 8)
    assert covered(layout) == [(start, start + 2) for start in range(0, 16, 2)]
    assert [offsets[0] for offsets in layout.slices] == [0, 4, 8, 12, 2, 6, 10, 14]
    assert layout.owned_ranges(FLAT, 2) == ((8, 12),)
    assert Layout.contiguous(FLAT, 16, 16).slices == ((0, 4, 8, 12, 16),)


def test_many_ranks_do_not_make_endless_slices():
    schedule = plan_ring(Topology.flat(100), Collective.ALL_REDUCE)
    layout = Layout.contiguous(schedule, 10**6, 20)
    assert len(layout.slices) * 101 <= 1 << 21
    assert covered(layout)[0][0] == 0


@effort(max_examples=15)
@given(trees(max_ranks=10), st.integers(0, 300), st.integers(25, 100), st.booleans())
def test_slices_cover_the_buffer_once(topology, num_elements, slice_elements, contiguous):
    schedule = plan_tree(topology, Collective.REDUCE_SCATTER)
    make = Layout.contiguous if contiguous else Layout.build
    layout = make(schedule, num_elements, slice_elements)
    bounds = covered(layout)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_elements
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    for offsets in layout.slices:
        assert len(offsets) == schedule.num_atoms + 1
        assert list(offsets) == sorted(offsets)
        assert contiguous or offsets[-1] - offsets[0] <= slice_elements
    reference.check(schedule, layout)


@effort(max_examples=20)
@given(
    trees(max_ranks=8),
    st.sampled_from([Collective.REDUCE_SCATTER, Collective.ALL_GATHER]),
    st.lists(st.sampled_from([0, 1, 2, 7, 40]), min_size=8, max_size=8),
    st.integers(10, 60),
)
def test_each_rank_owns_a_part_of_the_size_that_it_was_given(topology, collective, sizes, slice_elements):
    parts = sizes[: topology.num_ranks]
    schedule = plan_tree(topology, collective, target="rank_order")
    layout = Layout.uneven(schedule, parts, slice_elements)
    for rank, size in enumerate(parts):
        start = sum(parts[:rank])
        assert layout.owned_ranges(schedule, rank) == (((start, start + size),) if size else ())
    reference.check(schedule, layout)


def test_equal_parts_are_the_contiguous_layout():
    schedule = plan_ring(Topology.flat(4), Collective.ALL_GATHER)
    assert Layout.uneven(schedule, [5] * 4, 8) == Layout.contiguous(schedule, 20, 8)


def test_digest_tells_layouts_apart():
    digests = {Layout.build(FLAT, 20, size).digest for size in (5, 10, 20)}
    assert len(digests | {Layout.build(FLAT, 20, 5).digest}) == 3


def test_impossible_sizes_are_refused():
    with pytest.raises(ScheduleError, match="at least 0 elements and a slice at least 1, not -1 and 4"):
        Layout.build(FLAT, -1, 4)
    with pytest.raises(ScheduleError, match="not 4 and 0"):
        Layout.contiguous(FLAT, 4, 0)
    for parts in ([1, 2, 3], [1, 2, 3, -1]):
        with pytest.raises(ScheduleError, match="each of 4 ranks has a part of 0 or more elements"):
            Layout.uneven(FLAT, parts, 4)


@given(st.integers(4, 2000))
def test_windows_that_follow_each_other_are_at_places_far_apart(num_rounds):
    layout = Layout.contiguous(FLAT, 4 * num_rounds, 4)
    starts = [offsets[0] for offsets in layout.slices if offsets[0] < num_rounds]
    assert sorted(starts) == list(range(num_rounds))
    for before, after in pairwise(starts):
        distance = abs(after - before)
        assert min(distance, num_rounds - distance) >= num_rounds // 4
