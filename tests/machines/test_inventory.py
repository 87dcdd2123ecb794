import numpy as np
import pytest

from syncline.errors import ConfigurationError
from syncline.machines.clustering import Inventory
from syncline.topology import Topology

FLAT = Topology.flat(4)
HOSTS = tuple(host.name for host in FLAT.hosts)


def test_what_the_topology_says_goes_before_what_was_measured() -> None:
    topology = Topology.flat(4, rate=5e7)
    measured = {host.name: {"uplink_bytes_per_s": 1e9} for host in topology.hosts}
    (uplink,) = Inventory(topology=topology, measured=measured, use=["uplink_bytes_per_s"]).table().columns
    assert uplink.values == (5e7,) * 4


def test_what_was_measured_later_goes_before_what_was_measured_first() -> None:
    inventory = Inventory(topology=FLAT, measured={HOSTS[0]: {"x": 1.0}, HOSTS[1]: {"x": 2.0}}, use=["x"])
    (column,) = inventory.table({HOSTS[0]: {"x": 9.0}}).columns
    np.testing.assert_equal(column.values, (9.0, 2.0, np.nan, np.nan))


def test_latencies_that_nobody_tells_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no host has the feature 'latency_s'"):
        Inventory(topology=FLAT, use=["latency_s"]).table()


def test_what_is_known_only_once_a_training_runs_may_be_asked_for_before() -> None:
    asked = Inventory(topology=FLAT, use=["batch_s"])
    assert asked.table().columns == ()
    (column,) = asked.table({HOSTS[0]: {"batch_s": 0.1}}).columns
    assert column.label == "batch_s"
