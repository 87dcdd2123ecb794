"""Two senders with bulk to a third rank, and an urgent message: what orders them, and what it costs without order.

Ratios of medians within one run. Why these sizes: `docs/decisions/0009-what-orders-an-urgent-message.md`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[1] / "incast.py"
MIB = 1 << 20
ROUNDS = 5


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all variants once: for each, its ratio, and class 0's share of the bytes while the message was under way."""
    if os.geteuid() != 0:
        pytest.fail("the lab makes network namespaces and needs root; run `make bench-check` with sudo")
    results = tmp_path_factory.mktemp("incast") / "results.json"
    command = [sys.executable, str(BENCHMARK), "--sizes", "1 MiB", "4 MiB", "--rounds", str(ROUNDS)]
    command += ["--json", str(results), "--variants", "both", "grants", "urgency-none", "none"]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def ratio(found: dict[str, Any], num_bytes: int) -> float:
    """How many times as long as on the idle link a message of this size took."""
    (row,) = (row for row in found["rows"] if row["num_bytes"] == num_bytes)
    return float(statistics.median(row["loaded_s"]) / statistics.median(row["idle_s"]))


@pytest.mark.parametrize(("variant", "num_bytes"), [("both", MIB), ("both", 4 * MIB), ("grants", 4 * MIB)])
def test_an_urgent_message_takes_hardly_longer_than_on_an_idle_link(
    measured: dict[str, Any], variant: str, num_bytes: int, say: Callable[[str], None]
) -> None:
    times = ratio(measured[variant], num_bytes)
    say(f"{times:.2f} times as long as on the idle link (at most 1.15)")
    assert times <= 1.15, measured[variant]["rows"]


@pytest.mark.parametrize("variant", ["urgency-none", "none"])
def test_with_neither_it_takes_several_times_as_long(
    measured: dict[str, Any], variant: str, say: Callable[[str], None]
) -> None:
    times = ratio(measured[variant], MIB)
    say(f"{times:.2f} times as long as on the idle link (more than 1.8)")
    assert times > 1.8, measured[variant]["rows"]


@pytest.mark.parametrize(("variant", "least"), [("both", 0.85), ("grants", 0.75)])
def test_the_receiver_sees_that_class_0_overtook(
    measured: dict[str, Any], variant: str, least: float, say: Callable[[str], None]
) -> None:
    share, without = (measured[name]["shares"]["received by the fabric"] for name in (variant, "none"))
    say(f"class 0 had {share:.2f} of the bytes meanwhile (more than {least}); with neither {without:.2f}")
    assert share > least
    assert without < share


def test_the_switch_sent_class_0_first(measured: dict[str, Any], say: Callable[[str], None]) -> None:
    share = measured["both"]["shares"]["sent by the switch"]
    say(f"class 0 had {share:.2f} of the bytes meanwhile (more than 0.8)")
    assert share > 0.8
