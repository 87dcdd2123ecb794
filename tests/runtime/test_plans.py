"""Which schedule a collective gets by default, and that plans are shared."""

import pytest

from syncline.runtime.plans import Plans
from syncline.schedule import UNOWNED, Collective, choose, lower_bound, predict
from syncline.schedule.cost import predicted_slice_bytes
from syncline.schedule.planners import draft_all
from syncline.topology import Topology


def best(topology, collective, num_bytes):
    return choose(topology, collective, num_bytes, slice_bytes=predicted_slice_bytes(topology))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_long_sums_on_links_that_do_not_limit_move_no_more_than_they_must(num_ranks):
    topology = Topology.flat(num_ranks)
    schedule = best(topology, Collective.ALL_REDUCE, 16 << 20)
    assert not (schedule.owners == UNOWNED).any()
    num_bytes = num_ranks * 1000
    sent = max(schedule.link_bytes(topology, num_bytes).values())
    assert sent == 2 * (num_ranks - 1) * num_bytes // num_ranks


def test_many_ranks_are_compared_by_the_slices_that_they_have():
    """In slices for a few ranks a message of each with each costs more than the bytes, and doubling was taken."""
    topology = Topology.flat(420, rate=125e6)
    schedule = best(topology, Collective.ALL_REDUCE, 64 << 20)
    time_s = predict(schedule, topology, 64 << 20, predicted_slice_bytes(topology)).time_s
    assert time_s < 1.2 * lower_bound(topology, Collective.ALL_REDUCE, 64 << 20)


def test_short_sums_take_few_messages():
    assert best(Topology.flat(4), Collective.ALL_REDUCE, 8).num_steps == 2


def test_layouts_and_schedules_are_made_once():
    made = []

    def planner(topology, collective, num_bytes, *_):
        made.append(num_bytes)
        return choose(topology, collective, num_bytes)

    plans = Plans(Topology.flat(2, rate=1e9), planner, slice_bytes=100, max_layouts=2)
    schedule = plans.schedule(Collective.ALL_REDUCE, 1000)
    assert plans.schedule(Collective.ALL_REDUCE, 600) is schedule
    assert made == [1024]
    first = plans.layout(schedule, 10, 4)
    assert plans.layout(schedule, 10, 4) is first
    assert len(plans.layout(schedule, 50, 4).slices) == 2
    plans.layout(schedule, 11, 4)
    assert plans.layout(schedule, 10, 4) is not first


def test_other_sizes_are_chosen_among_the_same_drafts(monkeypatch):
    drafted = []

    def draft(*arguments, **settings):
        drafted.append(settings["root"])
        return draft_all(*arguments, **settings)

    monkeypatch.setattr("syncline.runtime.plans._draft_all", draft)
    topology = Topology.load("three-racks-uneven-uplinks")
    plans = Plans(topology, slice_bytes=None)
    sizes = (8, 1 << 12, 1 << 22, 1 << 26)
    for collective in (Collective.ALL_REDUCE, Collective.BROADCAST):
        for num_bytes in sizes:
            found, alone = plans.schedule(collective, num_bytes), best(topology, collective, num_bytes)
            assert (found.digest, found.planner) == (alone.digest, alone.planner)
    assert len(drafted) == 2
    assert plans.schedule(Collective.ALL_REDUCE, 1 << 27) is plans.schedule(Collective.ALL_REDUCE, 1 << 26)
    assert len(drafted) == 2, "and proved once"
    for root in (1, 2, 0):
        plans.schedule(Collective.BROADCAST, 1 << 16, root=root)
    assert drafted[2:] == [1, 2, 0], "two are kept"


def test_slices_are_large_where_no_link_has_a_rate():
    topologies = Topology.flat(4), Topology.flat(4, rate=1e9)
    within_machine, between = (Plans(topology, slice_bytes=1 << 20) for topology in topologies)
    for num_bytes, num_slices in ((1 << 20, 1), (4 << 20, 4), (16 << 20, 4), (64 << 20, 16)):
        schedule = within_machine.schedule(Collective.ALL_REDUCE, num_bytes)
        assert len(within_machine.layout(schedule, num_bytes // 4, 4).slices) == num_slices
        schedule = between.schedule(Collective.ALL_REDUCE, num_bytes)
        sizes = [offsets[-1] - offsets[0] for offsets in between.layout(schedule, num_bytes // 4, 4).slices]
        assert max(sizes) <= 1 << 18
        assert len(sizes) == (num_bytes >> 20 if num_bytes < 4 << 20 else 4 + -(-(2 * num_bytes - (3 << 20)) >> 21))


def test_buckets_are_cut_in_two_where_no_link_has_a_rate_and_no_message_is_longer_than_a_copy_wants():
    topologies = Topology.flat(2), Topology.flat(4), Topology.flat(4, rate=1e9)
    two, four, between = (Plans(topology, slice_bytes=None) for topology in topologies)
    sizes = (256 << 10, 1 << 20, 4 << 20, 64 << 20)
    assert [two.bucket_slice_bytes(size) for size in sizes] == [512 << 10, 512 << 10, 2 << 20, 2 << 20]
    assert [four.bucket_slice_bytes(size) for size in sizes] == [512 << 10, 512 << 10, 2 << 20, 4 << 20]
    assert {between.bucket_slice_bytes(size) for size in sizes} == {between.slice_bytes}


def test_slices_follow_what_the_links_reduce_and_the_number_of_ranks():
    def sizes(topology):
        plans = Plans(topology, slice_bytes=None)
        return plans.slice_bytes, plans.inflight_bytes

    assert sizes(Topology.load("two-racks-5-3")) == (500_000, 2_000_000), "25 MB/s for 20 ms"
    three_racks = 9 * (32 << 10)
    assert sizes(Topology.load("three-racks-uneven-uplinks")) == (three_racks, 4 * three_racks), "no less for a rank"
    slow = Topology.parse(Topology.load("two-sites").to_yaml().replace(", latency: 10 ms", ""))
    assert sizes(slow) == (256 << 10, 1 << 20), "no smaller, however slow the link is"
    far = Topology.load("two-sites")
    assert sizes(far) == (256 << 10, (1 << 20) + 300_000), "and what 2.5 MB/s carry in six times 20 ms"
    assert sizes(Topology.load("flat-8")) == (1_428_571, 4 * 1_428_571), "125 MB/s for 7/4 of the data"
    assert sizes(Topology.flat(4, rate=12.5e9)) == (2 << 20, 8 << 20)
    assert sizes(Topology.flat(100, rate=125e6)) == (100 << 15, 4 * 100 << 15)
    assert sizes(Topology.flat(4)) == (512 << 10, 8 << 20)


def test_the_first_and_the_last_slices_are_small():
    plans = Plans(Topology.flat(4, rate=1e9), slice_bytes=1 << 20)
    schedule = plans.schedule(Collective.ALL_REDUCE, 16 << 20)
    layout = plans.layout(schedule, 4 << 20, 4)
    sizes = [4 * (offsets[-1] - offsets[0]) for offsets in layout.slices]
    assert sizes[:2] == sizes[:-3:-1] == [256 << 10, 512 << 10]
    assert sum(sizes) == 16 << 20
    assert [offsets[0] for offsets in layout.slices[1:]] == [offsets[-1] for offsets in layout.slices[:-1]]
