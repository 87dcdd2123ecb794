"""The cost model, term by term."""

import pytest
from hypothesis import given, settings as effort, strategies as st
from schedule_trees import star, trees

from syncline.errors import ScheduleError
from syncline.schedule import PLANNERS, Collective, CostModel, plan_tree, predict
from syncline.topology import DirectedLink, Topology

WIRE = CostModel.of_links_alone()


def test_one_slice_takes_the_sum_of_its_steps():
    topology = Topology.flat(4, rate=1e6)
    prediction = predict(plan_tree(topology, Collective.ALL_REDUCE), topology, 4000, 4000, cost=WIRE)
    assert prediction.num_slices == 1
    assert prediction.time_s == pytest.approx(2 * 3000 / 1e6)


def test_many_slices_follow_at_the_pace_of_the_busiest_link():
    topology = Topology.load("two-racks-5-3")
    schedule = plan_tree(topology, Collective.ALL_REDUCE)
    prediction = predict(schedule, topology, 10**7, 10**5, cost=WIRE)
    assert prediction.num_slices == 100
    assert prediction.period_s == pytest.approx(10**5 / 25e6)
    assert prediction.time_s == pytest.approx(prediction.first_slice_s + 99 * prediction.period_s)
    assert prediction.link_s[prediction.bottleneck] == pytest.approx(10**7 / 25e6)
    assert prediction.bottleneck.child.startswith("rack")


def test_headers_take_their_share_of_the_rate():
    topology = star([(1e6, 1e6)] * 2)
    schedule = plan_tree(topology, Collective.ALL_REDUCE)
    whole, part = (
        predict(schedule, topology, 10**6, cost=CostModel(message_overhead_s=0, payload_share=share))
        for share in (1.0, 0.5)
    )
    assert part.time_s == pytest.approx(2 * whole.time_s)


def test_latency_counts_along_the_longest_route_of_each_step():
    topology = Topology.flat(3, latency_s=0.01)
    assert predict(plan_tree(topology, Collective.ALL_REDUCE), topology, 30, cost=WIRE).time_s == pytest.approx(0.04)
    assert predict(
        PLANNERS["ring"].plan(topology, Collective.ALL_REDUCE), topology, 30, cost=WIRE
    ).time_s == pytest.approx(0.08)


def test_the_way_of_a_message_that_is_asked_for_counts_three_times():
    far = Topology.flat(2, latency_s=0.01)
    plan = PLANNERS["ring"].plan(far, Collective.ALL_GATHER)

    def seconds(num_bytes, **constants):
        cost = CostModel(message_overhead_s=0, rank_bytes_per_s=1e15, **constants)
        return predict(plan, far, num_bytes, 1 << 30, cost=cost).time_s

    assert seconds(2 << 14) == pytest.approx(0.02), "16 KiB go unasked"
    assert seconds(2 << 15) == pytest.approx(0.06)
    assert seconds(2 << 15, num_crossings=1) == pytest.approx(0.02)


def test_messages_cost_their_overhead():
    topology = Topology.flat(5)
    prediction = predict(
        plan_tree(topology, Collective.ALL_REDUCE), topology, 500, 100, cost=CostModel(message_overhead_s=1e-3)
    )
    assert prediction.bottleneck is None
    assert prediction.first_slice_s == pytest.approx(2 * (8 + 1) * 1e-3, rel=1e-3)
    assert prediction.period_s == pytest.approx(16e-3, rel=1e-3)  # eight sent and eight received


def test_ranks_handle_what_they_send_receive_and_add():
    topology = Topology.flat(4)
    cost = CostModel(message_overhead_s=0.0, rank_bytes_per_s=1e6)
    for collective, handled in ((Collective.REDUCE_SCATTER, 3 * 3 / 4), (Collective.ALL_GATHER, 2 * 3 / 4)):
        prediction = predict(plan_tree(topology, collective), topology, 4 * 10**6, 10**6, cost=cost)
        assert prediction.rank_s == pytest.approx(4 * handled)
        assert prediction.time_s == pytest.approx(4 * handled)


def test_nothing_to_do_takes_no_time():
    for topology in (Topology.flat(1), Topology.flat(3)):
        prediction = predict(plan_tree(topology, Collective.ALL_REDUCE), topology, 0, cost=WIRE)
        assert (prediction.time_s, prediction.num_slices) == (0.0, 1)


@effort(max_examples=15)
@given(trees(max_ranks=12), st.sampled_from(sorted(Collective)), st.integers(1, 20))
def test_link_s_are_link_bytes_over_rates(topology, collective, num_slices):
    schedule = plan_tree(topology, collective)
    size = schedule.denominator * num_slices
    prediction = predict(schedule, topology, size, schedule.denominator, cost=WIRE)
    rates = dict(topology.links())
    for link, load in schedule.link_bytes(topology, size).items():
        seconds = load / rates[link.child].bytes_per_s(link.direction)
        assert prediction.link_s[link] == pytest.approx(seconds)
    assert prediction.time_s >= max(prediction.link_s.values(), default=0.0) * (1 - 1e-9)


@effort(max_examples=15)
@given(trees(max_ranks=10), st.sampled_from(sorted(Collective)))
def test_link_bytes_are_the_sums_along_the_routes(topology, collective):
    schedule = plan_tree(topology, collective)
    size = 1000
    offsets = schedule.offsets(size)
    expected = {DirectedLink(name, way): 0 for name, _ in topology.links() for way in ("up", "down")}
    for row in schedule.transfers:
        for link in topology.route(row.src, row.dst):
            expected[link] += offsets[row.last] - offsets[row.first]
    assert schedule.link_bytes(topology, size) == expected


def test_impossible_arguments_are_refused():
    schedule = plan_tree(Topology.flat(2), Collective.ALL_REDUCE)
    with pytest.raises(ScheduleError, match="not 2 and 3 ranks"):
        predict(schedule, Topology.flat(3), 10)
    with pytest.raises(ScheduleError, match="slices of 1 or more"):
        predict(schedule, Topology.flat(2), 10, 0)
    with pytest.raises(ScheduleError, match="payload_share must be"):
        CostModel(payload_share=0)
    with pytest.raises(ScheduleError, match="num_processors must be"):
        CostModel(num_processors=0)
    with pytest.raises(ScheduleError, match="call_overhead_s must be"):
        CostModel(call_overhead_s=-1e-3)


def test_ranks_that_crowd_on_few_processors_are_slower_but_links_are_not():
    topology = Topology.flat(8, rate=125e6)
    schedule = plan_tree(topology, Collective.ALL_REDUCE)
    alone, crowded = (
        predict(schedule, topology, 16 * 10**6, cost=CostModel.of_emulated_network(processors)) for processors in (8, 2)
    )
    assert alone.processor_s == pytest.approx(alone.rank_s)
    assert crowded.processor_s == pytest.approx(4 * alone.processor_s)
    assert (crowded.link_s, crowded.rank_s) == (alone.link_s, alone.rank_s)
    assert crowded.time_s > alone.time_s


def test_what_links_and_processors_do_not_hide_of_each_other_comes_on_top():
    topology = Topology.flat(4, rate=1e6)
    schedule = plan_tree(topology, Collective.ALL_GATHER)
    hidden, unhidden = (
        predict(schedule, topology, 4 * 10**6, 10**6, cost=CostModel(num_processors=1, unhidden_share=share))
        for share in (0.0, 0.5)
    )
    assert hidden.processor_s < sum(hidden.link_s.values())
    assert unhidden.time_s - hidden.time_s == pytest.approx(0.5 * hidden.processor_s)


def test_a_smaller_first_slice_begins_sooner_and_moves_less():
    topology = Topology.load("two-racks-5-3")
    schedule = plan_tree(topology, Collective.ALL_REDUCE)
    even = predict(schedule, topology, 4 * 10**6, 10**6, cost=WIRE)
    ramped = predict(schedule, topology, 4 * 10**6, 10**6, first_slice_bytes=250_000, cost=WIRE)
    assert ramped.first_slice_s == pytest.approx(even.first_slice_s / 4), "no step takes more than half of the period"
    assert ramped.time_s == pytest.approx(ramped.first_slice_s + (4 - 0.25) * ramped.period_s)
    assert predict(schedule, topology, 100, first_slice_bytes=10**6, cost=WIRE).num_slices == 1


def flow_shop_s(slices, step_s_per_byte):
    """When the last step of the last slice ends, if each step takes one slice at a time, in order."""
    free_s = [0.0] * len(step_s_per_byte)
    for num_bytes in slices:
        ready_s = 0.0
        for step, s_per_byte in enumerate(step_s_per_byte):
            ready_s = free_s[step] = max(ready_s, free_s[step]) + num_bytes * s_per_byte
    return free_s[-1]


@pytest.mark.parametrize("down_rate", [1e6, 1.2e6, 2e6, 10e6])
def test_a_step_that_is_nearly_as_slow_as_the_slowest_waits_for_whole_slices(down_rate):
    """Rank 0 sends all it has over the slow way up; what is added elsewhere comes back over a way of its own."""
    topology = star([(1e6, down_rate), (1e9, 1e9), (1e9, 1e9)])
    schedule = plan_tree(topology, Collective.ALL_REDUCE, fractions={topology.root.name: [0, 1, 1]})
    num_bytes, slice_bytes = 10 * 10**6, 10**6
    ramp = [slice_bytes // 4, slice_bytes // 2]
    slices = [*ramp, *[(num_bytes - 2 * sum(ramp)) / 9] * 9, *reversed(ramp)]
    found = predict(schedule, topology, num_bytes, slice_bytes, first_slice_bytes=ramp[0], cost=WIRE).time_s
    assert found == pytest.approx(flow_shop_s(slices, [1 / 1e6, 1 / down_rate]), rel=0.01)
    even = predict(schedule, topology, num_bytes, slice_bytes, cost=WIRE).time_s
    assert even == pytest.approx(flow_shop_s([slice_bytes] * 10, [1 / 1e6, 1 / down_rate]), rel=0.01)


@pytest.mark.parametrize(
    ("collective", "num_processors", "begin_s"),
    [(Collective.ALL_REDUCE, 2, 4e-3), (Collective.ALL_REDUCE, 8, 1e-3), (Collective.ALL_GATHER, 2, 1e-3)],
)
def test_a_sum_begins_when_all_ranks_have_begun_and_what_is_handed_on_when_one_has(collective, num_processors, begin_s):
    topology = Topology.flat(8, rate=125e6)
    without, with_overhead = (
        predict(
            plan_tree(topology, collective),
            topology,
            10**6,
            cost=CostModel(num_processors=num_processors, call_overhead_s=seconds),
        )
        for seconds in (0.0, 1e-3)
    )
    assert with_overhead.first_slice_s - without.first_slice_s == pytest.approx(begin_s)
    besides_s = with_overhead.processor_s - without.processor_s
    assert besides_s == pytest.approx(4e-3 if collective is Collective.ALL_GATHER else 0.0), "work beside the rest"
