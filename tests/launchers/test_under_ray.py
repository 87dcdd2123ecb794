"""Ray Train starts two workers on this machine, which train through ``syncline.ray.TopologyConfig``."""

import re
import sys
import tempfile
from pathlib import Path

import pytest
from launched_jobs import run_together

EXAMPLE = Path(__file__).parents[2] / "examples" / "frameworks" / "ray_train.py"
PAIR = "{topology: pair, switch: s, children: [{host: here, uplink: 1 Gbit/s, ranks: 2}]}\n"


@pytest.fixture
def ray_place(ray_is_here):
    """A folder for what Ray writes; its sockets need a short name."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        yield Path(folder)


def test_the_example_trains_in_two_workers(ray_place):
    topology = ray_place / "pair.yaml"
    topology.write_text(PAIR)
    options = ["--workers", "2", "--topology", str(topology), "--storage", str(ray_place / "results")]
    variables = {"RAY_TMPDIR": str(ray_place), "RAY_USAGE_STATS_ENABLED": "0"}
    (shown,) = run_together([[sys.executable, str(EXAMPLE), *options]], [variables])
    shares = re.findall(r"rank (\d) of 2 on here: ([\d.]+)% of the test images read", shown)
    assert {rank for rank, _ in shares} == {"0", "1"}, shown
    assert len({share for _, share in shares}) == 1
    assert float(shares[0][1]) > 85
