import numpy as np
import pytest

from syncline.errors import ConfigurationError
from syncline.machines.inventory import Inventory
from syncline.machines.network import NetworkMeasurement
from syncline.topology import Topology

FLAT = Topology.flat(4)
HOSTS = tuple(host.name for host in FLAT.hosts)


def network(near_s: float, far_s: float, uplinks=(1e8, 1e8, 1e8, 1e8)) -> list[NetworkMeasurement]:
    """Two pairs of hosts: 0 and 1, 2 and 3."""
    return [
        NetworkMeasurement(
            echoes_s={other: near_s if other // 2 == host // 2 else far_s for other in range(4) if other != host},
            rates={(host + 1) % 4: uplinks[host]},
        )
        for host in range(4)
    ]


def test_where_the_topology_says_nothing_clusters_follow_what_was_measured() -> None:
    _, clustering = Inventory(topology=FLAT, network=network(0.0004, 0.03)).divide()
    assert clustering.clusters == ((0, 1), (2, 3))
    _, clustering = Inventory(topology=FLAT, network=network(0.0, 0.0, (1e8, 1e7, 1e8, 1e7))).divide()
    assert clustering.clusters == ((0, 2), (1, 3))


def test_equal_machines_that_measured_differently_stay_together() -> None:
    inventory = Inventory(topology=FLAT, network=network(0.0001, 0.0004, (0.6e8, 1.2e8, 0.9e8, 0.7e8)))
    assert not inventory.table().vectors.any()
    assert inventory.divide()[1].clusters == ((0, 1, 2, 3),)


def test_what_the_topology_says_goes_before_what_was_measured() -> None:
    topology = Topology.flat(4, rate=5e7)
    (uplink,) = Inventory(topology=topology, network=network(0.0, 0.0), use=["uplink_bytes_per_s"]).table().columns
    assert uplink.values == (5e7,) * 4


def test_what_was_measured_later_goes_before_what_was_measured_first() -> None:
    inventory = Inventory(topology=FLAT, measured={HOSTS[0]: {"x": 1.0}, HOSTS[1]: {"x": 2.0}})
    (column,) = inventory.table({HOSTS[0]: {"x": 9.0}}).columns
    np.testing.assert_equal(column.values, (9.0, 2.0, np.nan, np.nan))


def test_latencies_that_say_nothing_may_be_asked_for() -> None:
    asked = Inventory(topology=FLAT, network=network(0.0, 0.0), use=["latency_s"], weights={"latency_s": 2.0})
    assert asked.table().columns == ()
    with pytest.raises(ConfigurationError, match="no host has the feature 'latency_s'"):
        Inventory(topology=FLAT, use=["latency_s"]).table()


@pytest.mark.parametrize(
    ("topology", "use", "expected"),
    [
        (Topology.flat(2), None, ("latency_s", "uplink_bytes_per_s")),
        (Topology.flat(2), ["cpu_hz"], ()),
        (Topology.flat(2), ["latency_s"], ("latency_s",)),
        (Topology.flat(2), ["uplink_bytes_per_s", "cpu_hz"], ("uplink_bytes_per_s",)),
        (Topology.flat(2, rate=1e8), None, ("latency_s",)),
        (Topology.flat(1), None, ()),
        (Topology.load("two-sites"), None, ()),
    ],
)
def test_what_the_topology_says_or_does_not_count_is_not_lacking(topology, use, expected) -> None:
    assert Inventory(topology=topology, use=use).lacks == expected


def test_what_is_known_only_once_a_training_runs_may_be_asked_for_before() -> None:
    asked = Inventory(topology=FLAT, use=["batch_s"], weights={"batch_s": 2.0})
    assert asked.table().columns == ()
    (column,) = asked.table({HOSTS[0]: {"batch_s": 0.1}}).columns
    assert (column.label, column.weight) == ("batch_s", 2.0)
