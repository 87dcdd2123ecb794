"""Ray Train starts two workers on this machine, which train through ``syncline.ray.TopologyConfig``."""

import re
import sys
import tempfile
from pathlib import Path

import pytest
from launched_jobs import run_together

EXAMPLE = Path(__file__).parents[2] / "examples" / "frameworks" / "ray_train.py"
TRAININGS = Path(__file__).with_name("ray_trainings.py")
START_S = 300.0
"""Ray starts a dozen processes before the workers, each of which loads much."""
SETTINGS = """
import pytest
from syncline.errors import ConfigurationError, TopologyError
from syncline.ray import TopologyConfig, name_hosts

assert name_hosts(["10.0.0.2", "10.0.0.1"], {"10.0.0.1": "a", "10.0.0.2": "b"}) == ["b", "a"]
assert name_hosts(["10.0.0.2"], None) == [None]
with pytest.raises(ConfigurationError, match=r"rank 1 is at '10.0.0.9', and it names 10.0.0.1"):
    name_hosts(["10.0.0.1", "10.0.0.9"], {"10.0.0.1": "a"})
with pytest.raises(TopologyError, match="missing"):
    TopologyConfig(topology="missing.yaml")
shown = TopologyConfig(topology="two-racks-5-3", secret="s" * 32, backend="gloo").to_dict()
assert (shown["topology"], shown["backend"]) == ("two-racks-5-3", "gloo")
assert "s" * 32 not in repr(shown)
"""
PAIR = "{topology: pair, switch: s, children: [{host: here, uplink: 1 Gbit/s, ranks: 2}]}\n"


@pytest.fixture(scope="module")
def shown(ray_path):
    """What two trainings print, on a Ray that writes into a folder of its own; its sockets need a short name."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        topology = Path(folder) / "pair.yaml"
        topology.write_text(PAIR)
        command = [sys.executable, str(TRAININGS), str(EXAMPLE), str(topology), f"{folder}/results"]
        variables = {"RAY_TMPDIR": folder, "HOME": folder, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ray_path}
        (text,) = run_together([command], [variables], timeout_s=START_S)
    return text


def test_the_example_trains_in_two_workers(shown):
    shares = dict(re.findall(r"rank (\d) of 2 on here: ([\d.]+)% of the test images read", shown))
    assert shares.keys() == {"0", "1"}, shown
    assert shares["0"] == shares["1"]
    assert float(shares["0"]) > 85


def test_ray_makes_groups_of_the_backend(shown):
    weights = dict(re.findall(r"DDP over syncline, rank (\d): (\[.*\])", shown))
    assert weights.keys() == {"0", "1"}, shown
    assert weights["0"] == weights["1"]


def test_settings_are_checked_where_the_trainer_is_made(ray_path):
    run_together([[sys.executable, "-c", SETTINGS]], [{"PYTHONPATH": ray_path}])
