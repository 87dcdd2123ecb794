import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from syncline.errors import ConfigurationError
from syncline.machines.features import (
    build_table,
    normalise,
    summarise,
    topology_features,
    topology_latencies,
)
from syncline.topology import Topology

NUMBERS = st.floats(-1e12, 1e12)


@given(st.lists(NUMBERS, min_size=1, max_size=20))
def test_normal_form_is_the_formula(values: list[float]) -> None:
    low, high, mean = min(values), max(values), float(np.mean(values))
    expected = [0.0 if high == low else (value - mean) / (high - low) for value in values]
    np.testing.assert_allclose(normalise(np.array(values)), expected)


def test_equal_values_and_unknown_ones_become_zero() -> None:
    assert normalise(np.array([5.0, 5.0])).tolist() == [0, 0]
    assert normalise(np.array([1.0, math.nan, 3.0])).tolist() == [-0.5, 0, 0.5]
    assert normalise(np.array([math.nan, math.nan])).tolist() == [0, 0]


def test_noise_below_the_tolerance_says_nothing() -> None:
    assert normalise(np.array([100.0, 104.0]), tolerance=0.1).tolist() == [0, 0]
    assert normalise(np.array([100.0, 150.0]), tolerance=0.1).tolist() == [-0.5, 0.5]


DISK = ["disk_bytes_per_s"]


def test_equal_disks_that_were_measured_differently_say_nothing() -> None:
    measured = {"a": {"disk_bytes_per_s": 100e6}, "b": {"disk_bytes_per_s": 140e6}}
    assert not build_table(measured, use=DISK).vectors.any()
    measured["b"]["disk_bytes_per_s"] = 200e6
    assert build_table(measured, use=DISK).vectors.any()


def test_hosts_with_different_texts_are_one_apart() -> None:
    table = build_table({"a": {"site": "x"}, "b": {"site": "y"}, "c": {"site": "x"}})
    assert np.linalg.norm(table.vectors[0] - table.vectors[1]) == pytest.approx(1.0)
    assert np.linalg.norm(table.vectors[0] - table.vectors[2]) == 0


def test_latencies_together_weigh_as_much_as_one_feature() -> None:
    latencies = np.array([[0, 1, 9, 9], [1, 0, 9, 9], [9, 9, 0, 1], [9, 9, 1, 0]], dtype=float)
    table = build_table({name: {} for name in "abcd"}, latencies_s=latencies)
    assert np.linalg.norm(table.vectors[0] - table.vectors[2]) == pytest.approx(1.0, rel=0.1)


def test_the_network_alone_counts_unless_features_are_named() -> None:
    hosts = {"a": {"site": "x", "memory_bytes": 8e9}, "b": {"site": "x", "memory_bytes": 64e9}, "c": {"site": "y"}}
    assert build_table(hosts).features == ("site",)
    assert build_table(hosts, use=["memory_bytes"]).features == ("memory_bytes",)


def test_a_chosen_feature_alone_counts() -> None:
    table = build_table({"a": {"x": 1.0, "y": 0.0}, "b": {"x": 1.0, "y": 5.0}}, use=["x"])
    assert [column.label for column in table.columns] == ["x"]
    assert not table.vectors.any()


def test_a_wrong_choice_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no host has the feature 'z'"):
        build_table({"a": {"x": 1.0}, "b": {"x": 2.0}}, use=["z"])


def test_text_on_one_host_and_a_number_on_another_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"text on some hosts \(a: 'x'\) and a number on others \(b, c: 2\.0\)"
    ):
        build_table({"a": {"site": "x"}, "b": {"site": 2.0}, "c": {"site": 3.0}})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_are_finite(value: float) -> None:
    with pytest.raises(ConfigurationError, match="feature 'x' of host b is"):
        build_table({"a": {"x": 1.0}, "b": {"x": value}}, use=["x"])


def hosts_with(*features: str) -> Topology:
    hosts = "".join(f"  - {{host: h{k}, uplink: 1 Gbit/s, features: {{{text}}}}}\n" for k, text in enumerate(features))
    return Topology.parse(f"switch: core\nchildren:\n{hosts}")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("memory_bytes: 64 GiB", {"memory_bytes": 64 << 30}),
        ("disk_bytes_per_s: 1 GB/s", {"disk_bytes_per_s": 1e9}),
        ("batch_s: 5 ms", {"batch_s": 0.005}),
        ("cpu_hz: 3 GHz", {"cpu_hz": 3e9}),
        ("cpu_hz: 3.0e9", {"cpu_hz": 3e9}),  # text, for YAML
        ("gpu: 80 GiB, cores: 8", {"gpu": "80 GiB", "cores": 8}),
    ],
)
def test_quantities_of_the_file_may_have_units(written: str, expected: dict[str, float | str]) -> None:
    assert topology_features(hosts_with(written))["h0"] == {"uplink_bytes_per_s": 125e6} | expected


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("memory_bytes: lots", "feature 'memory_bytes' of host h1: 'lots' is not a size"),
        ("memory_bytes: -5", "feature 'memory_bytes' of host h1 is -5.0; write what is not below 0"),
        ("cpu_hz: 3 Ghz", "feature 'cpu_hz' of host h1: '3 Ghz' is not a frequency; write '3 GHz'"),
    ],
)
def test_what_is_no_quantity_is_refused(written: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        topology_features(hosts_with("memory_bytes: 1 GiB, cpu_hz: 3 GHz", written))


def test_the_topology_tells_site_and_uplink_and_its_file_goes_first() -> None:
    topology = Topology.parse(
        """
switch: core
children:
  - {host: lone, uplink: 1 Gbit/s}
  - switch: row
    uplink: 100 Mbit/s
    children:
      - switch: rack
        uplink: 1 Gbit/s
        children:
          - {host: h0, uplink: 2 Gbit/s, features: {site: moon, cpu_hz: 3.0e+9}}
          - {host: h1, uplink: 2 Gbit/s}
"""
    )
    features = topology_features(topology)
    assert features["lone"] == {"site": "core", "uplink_bytes_per_s": 125e6}
    assert features["h0"] == {"site": "moon", "uplink_bytes_per_s": 250e6, "cpu_hz": 3e9}
    assert features["h1"]["site"] == "row"


def test_a_flat_network_has_no_sites_and_no_latencies() -> None:
    topology = Topology.flat(3, rate=1e6)
    assert all("site" not in features for features in topology_features(topology).values())
    assert topology_latencies(topology) is None


def test_latencies_are_those_of_the_route() -> None:
    latencies = topology_latencies(Topology.load("two-sites"))
    assert latencies is not None
    assert latencies[0, 4] == pytest.approx(0.02)
    assert latencies[0, 1] == 0


def test_a_summary_is_the_mean_of_each_number_and_the_newest_text() -> None:
    periods = [{"disk": rate, "site": f"s{rate:.0f}"} for rate in (2.0, 4.0)]
    assert summarise([*periods, {"site": "s5"}]) == {"disk": 3.0, "site": "s5"}
