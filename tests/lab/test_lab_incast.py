"""Two senders with bulk to a third rank, and an urgent message: what orders them, and what it costs without order.

Ratios of medians within one run. Why these sizes: `docs/decisions/0009-what-orders-an-urgent-message.md`.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "incast.py"
MIB = 1 << 20
ROUNDS = 5


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Run all variants once: for each, its ratio, and class 0's share of the bytes while the message was under way."""
    results = tmp_path_factory.mktemp("incast") / "results.json"
    command = [
        sys.executable,
        str(BENCHMARK),
        "--sizes",
        "1 MiB",
        "4 MiB",
        "--rounds",
        str(ROUNDS),
        "--json",
        str(results),
    ]
    command += ["--variants", "both", "grants", "urgency-none", "none"]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return json.loads(results.read_text())


def ratio(found, num_bytes):
    (row,) = (row for row in found["rows"] if row["num_bytes"] == num_bytes)
    return statistics.median(row["loaded_s"]) / statistics.median(row["idle_s"])


@pytest.mark.parametrize(("variant", "num_bytes"), [("both", MIB), ("both", 4 * MIB), ("grants", 4 * MIB)])
def test_an_urgent_message_takes_hardly_longer_than_on_an_idle_link(measured, variant, num_bytes):
    assert ratio(measured[variant], num_bytes) <= 1.15, measured[variant]["rows"]


@pytest.mark.parametrize("variant", ["urgency-none", "none"])
def test_with_neither_it_takes_several_times_as_long(measured, variant):
    assert ratio(measured[variant], MIB) > 1.8, measured[variant]["rows"]


@pytest.mark.parametrize(("variant", "least"), [("both", 0.85), ("grants", 0.75)])
def test_the_receiver_sees_that_class_0_overtook(measured, variant, least):
    assert measured[variant]["shares"]["received by the fabric"] > least
    assert measured["none"]["shares"]["received by the fabric"] < measured[variant]["shares"]["received by the fabric"]


def test_the_switch_sent_class_0_first(measured):
    assert measured["both"]["shares"]["sent by the switch"] > 0.8
