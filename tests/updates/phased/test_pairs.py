"""Who is whose partner, and what a step of pairs takes: against the state machines on a clock, and formulas."""

import pytest
from pair_clock import Costs, PairClock

from syncline.errors import ConfigurationError
from syncline.schedule import CostModel
from syncline.schedule.pairs import PairMoves, StageShape, find_pair, pair_ranks, plan_pairs
from syncline.topology import DirectedLink, Topology
from syncline.updates.phased.instructions import Pass

UNEVEN = """
topology: uneven
switch: core
children:
  - switch: left
    uplink: 1 Gbit/s
    children:
      - {host: a, uplink: 1 Gbit/s, ranks: 3}
      - {host: b, uplink: 1 Gbit/s, ranks: 2}
      - {host: c, uplink: 1 Gbit/s, ranks: 2}
  - switch: right
    uplink: 1 Gbit/s
    children:
      - {host: d, uplink: 1 Gbit/s, ranks: 1}
      - {host: e, uplink: 1 Gbit/s, ranks: 2}
      - {host: f, uplink: 1 Gbit/s, ranks: 1}
      - {host: g, uplink: 1 Gbit/s, ranks: 1}
"""


def test_neighbours_on_one_switch() -> None:
    assert pair_ranks(Topology.flat(6)) == ((0, 1), (2, 3), (4, 5))


def test_partners_share_a_host_or_else_a_switch() -> None:
    pairs = pair_ranks(Topology.parse(UNEVEN))
    # a has 0 1 2, b 3 4, c 5 6; d 7, e 8 9, f 10, g 11
    assert pairs == ((0, 1), (2, 11), (3, 4), (5, 6), (7, 10), (8, 9))
    assert find_pair(pairs, 11) == (1, 1)
    assert find_pair(pairs, 8) == (5, 0)


def test_partners_follow_the_network_and_not_the_numbers() -> None:
    interleaved = Topology.load("two-racks-5-3").permuted((0, 5, 1, 6, 2, 7, 3, 4))
    crossing = [
        (first, second)
        for first, second in pair_ranks(interleaved)
        if len(interleaved.route(first, second)) > min(len(interleaved.route(0, 2)), 4)
    ]
    assert len(crossing) == 1  # five and three: one pair has to cross


def test_an_odd_number_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"even, not 3; start one more, or one less"):
        pair_ranks(Topology.flat(3))


def stages_of(num_bytes, shares, passed=0):
    total = sum(shares)
    return [
        StageShape(num_bytes=size, forward_share=share / total, passed_bytes=passed)
        for size, share in zip(num_bytes, shares, strict=True)
    ]


SHAPES = {"even": (1,) * 8, "odd": (1,) * 9, "uneven": (3, 1, 1, 2, 1), "two": (1, 2)}


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("update_s", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("passed_s", [0.0, 0.05])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step_takes_what_the_state_machines_take_on_a_clock(shape, passed_s, update_s, micro_batches):
    """Disks take no time. On the clock the updates of a side do not wait for each other, so they are not too long."""
    forward_s, num_passes = 0.5 * sum(shape), 6
    moves = PairMoves(
        stages=tuple(stages_of([1] * len(shape), shape, passed=1)),
        passed_bytes_per_s=2 / (passed_s * micro_batches) if passed_s else float("inf"),
        updates_s=0.0,
        most_owned=1.0,
        carried={},
        moved={},
    )
    costs = Costs(
        forward=lambda stage: shape[stage] / micro_batches,
        backward=lambda stage: 2 * shape[stage] / micro_batches,
        load=0.0,
        send=passed_s,
        update=update_s,
    )
    clocks = [
        PairClock(len(shape), costs, [Pass.TRAIN] * number, num_micros=micro_batches).run()
        for number in (num_passes, num_passes - 2)
    ]
    expected_s = (clocks[0].time_s - clocks[1].time_s) / 2
    found_s = moves.step_s(forward_s, update_s * len(shape) / 2, micro_batches)
    assert found_s == pytest.approx(expected_s, rel=0.02 if update_s == 0 else 0.1)


def test_both_sides_reduce_and_gather_half_of_the_model_each():
    num_bytes = 8 << 20
    moves = plan_pairs(Topology.flat(4, rate=125e6), stages_of([num_bytes // 8] * 8, (1,) * 8, passed=1000))
    passed = 2 * 7 * 1000
    for host in range(4):
        # of two ranks each sends half of its side's half, to reduce it and to gather it
        assert moves.carried[DirectedLink(f"h{host}", "up")] == pytest.approx(num_bytes / 2 + passed, rel=1e-6)
        assert moves.moved[f"h{host}"] == pytest.approx(num_bytes + 2 * passed, rel=1e-6)
    assert moves.updates_s == pytest.approx(num_bytes / 2 / (125e6 * CostModel().payload_share), rel=0.05)
    assert moves.most_owned == pytest.approx(0.5)
    assert moves.held_bytes == num_bytes // 4
    assert moves.passed_bytes_per_s == pytest.approx(125e6 * CostModel().payload_share)


def test_a_pair_alone_sends_activations_only():
    moves = plan_pairs(Topology.flat(2, rate=1e6), stages_of([100, 300, 200], (1, 1, 1), passed=50))
    assert moves.updates_s == 0
    assert moves.most_owned == 1
    assert moves.held_bytes == 300
    assert set(moves.carried.values()) == {2 * 2 * 50}
