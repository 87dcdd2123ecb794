"""Ray Train starts two workers on this machine, which train through ``syncline.ray.TopologyConfig``."""

import re
import sys
import tempfile
from pathlib import Path

import pytest
from launched_jobs import run_together

EXAMPLE = Path(__file__).parents[2] / "examples" / "frameworks" / "ray_train.py"
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


@pytest.fixture
def ray_place():
    """A folder for what Ray writes; its sockets need a short name."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield Path(folder)


def test_the_example_trains_in_two_workers(ray_path, ray_place):
    topology = ray_place / "pair.yaml"
    topology.write_text(PAIR)
    options = ["--workers", "2", "--topology", str(topology), "--storage", str(ray_place / "results")]
    variables = {"RAY_TMPDIR": str(ray_place), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ray_path}
    variables["HOME"] = str(ray_place)  # it writes a token there
    (shown,) = run_together([[sys.executable, str(EXAMPLE), *options]], [variables], timeout_s=START_S)
    shares = re.findall(r"rank (\d) of 2 on here: ([\d.]+)% of the test images read", shown)
    assert {rank for rank, _ in shares} == {"0", "1"}, shown
    assert len({share for _, share in shares}) == 1
    assert float(shares[0][1]) > 85


def test_settings_are_checked_where_the_trainer_is_made(ray_path):
    run_together([[sys.executable, "-c", SETTINGS]], [{"PYTHONPATH": ray_path}])
