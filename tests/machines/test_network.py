import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.machines.network import (
    LATENCY_RESOLUTION_S,
    RATE_RESOLUTION_BYTES_PER_S,
    NetworkMeasurement,
    latencies_of,
    levelled,
    rate_of,
    rotation,
    uplinks_of,
)


@given(st.integers(0, 40))
def test_in_each_try_all_send_to_another_one_and_receive_from_another_one(num_hosts: int) -> None:
    steps = rotation(num_hosts)
    assert len(steps) == len(set(steps)) == min(4, max(0, num_hosts - 1))
    assert all(0 < step < num_hosts for step in steps)


def test_neighbours_on_both_sides_come_first() -> None:
    assert rotation(8) == (1, 7, 2, 6)
    assert rotation(2) == (1,)


def test_a_rate_leaves_out_what_every_message_takes() -> None:
    def taken_s(num_bytes: int) -> float:
        return 0.05 + num_bytes / 10e6

    timed = [(size, taken_s(size)) for size in (1 << 16, 1 << 18, 1 << 21)]
    assert rate_of(timed, echo_s=0.04) == pytest.approx(10e6)
    assert rate_of([(1000, 0.05)], echo_s=0.04) == pytest.approx(1000 / 0.0125)  # never more than four times as fast
    assert rate_of([(1000, 0.05)], echo_s=0.0) == pytest.approx(20_000)


def measurements_of(one_way_s: np.ndarray) -> list[NetworkMeasurement]:
    size = len(one_way_s)
    return [
        NetworkMeasurement(echoes_s={k: float(2 * one_way_s[host, k]) for k in range(size) if k != host})
        for host in range(size)
    ]


def test_a_latency_is_half_of_the_pairs_fastest_echo() -> None:
    slower = np.array([[0, 0.004, 0.02], [0.003, 0, 0.2], [0.025, 0.3, 0]])
    expected = [[0, 0.003, 0.02], [0.003, 0, 0.2], [0.02, 0.2, 0]]
    np.testing.assert_allclose(latencies_of(measurements_of(slower)), expected)


def test_a_pair_that_did_not_answer_is_not_known() -> None:
    measurements = measurements_of(np.array([[0, 0.002, 0.02], [0.002, 0, 0.02], [0.02, 0.02, 0]]))
    silent = [NetworkMeasurement(echoes_s={1: measurements[0].echoes_s[1]}), measurements[1], NetworkMeasurement()]
    found = latencies_of(silent)
    assert found is not None
    assert np.isnan(found[0, 2])
    assert np.isnan(found[2, 0])
    assert found[1, 2] == 0.02


@given(st.lists(st.floats(1e-6, 2 * LATENCY_RESOLUTION_S), min_size=12, max_size=12))
def test_what_a_busy_machine_adds_says_nothing(noise: list[float]) -> None:
    one_way_s = np.zeros((4, 4))
    one_way_s[~np.eye(4, dtype=bool)] = noise
    assert latencies_of(measurements_of(one_way_s)) is None
    assert latencies_of([NetworkMeasurement()] * 4) is None


def test_values_without_a_clear_gap_between_them_are_one_level() -> None:
    values = np.array([200.0, 1.0, np.nan, 95.0, 2.0, 590.0])
    expected = [(200 * 95 * 590) ** (1 / 3)] * 6
    found = levelled(values)
    np.testing.assert_allclose(found[[0, 3, 5]], expected[:3])
    np.testing.assert_allclose(found[[1, 4]], 2**0.5)
    assert np.isnan(found[2])
    assert levelled(np.array([])).size == 0


def test_uplinks_that_are_alike_are_equal() -> None:
    measurements = [NetworkMeasurement(rates={9: rate}) for rate in (95e6, 200e6, 10e6)]
    first, second, third, unknown = uplinks_of([*measurements, NetworkMeasurement()])
    assert first == second == pytest.approx((95e6 * 200e6) ** 0.5)
    assert third == pytest.approx(10e6)
    assert unknown is None


def test_an_uplink_is_the_best_that_was_seen_and_no_more_than_a_process_can_tell() -> None:
    assert NetworkMeasurement().uplink_bytes_per_s is None
    assert NetworkMeasurement(rates={1: 1e6, 2: 9e6}).uplink_bytes_per_s == 9e6
    assert NetworkMeasurement(rates={1: 5e10}).uplink_bytes_per_s == RATE_RESOLUTION_BYTES_PER_S


@given(st.dictionaries(st.integers(0, 9), st.floats(0, 1)), st.dictionaries(st.integers(0, 9), st.floats(0, 1e9)))
def test_readings_go_through_json(echoes_s: dict[int, float], rates: dict[int, float]) -> None:
    measurement = NetworkMeasurement(echoes_s=echoes_s, rates=rates)
    assert NetworkMeasurement.of_pairs(json.loads(json.dumps(measurement.as_pairs()))) == measurement
