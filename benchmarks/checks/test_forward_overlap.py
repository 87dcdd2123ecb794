"""All-gathers under the next forward pass, in the lab: what of the transfer is hidden, and that the order matters.

Ratios of medians within one run; `benchmarks/records` has the figures of a longer one. Computing and transfer take as
long as each other, so a step would take twice that if nothing were hidden.
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

BENCHMARK = Path(__file__).parents[1] / "forward_overlap.py"
BEST_CASES = ("one class", "priorities")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train the benchmark's model in all its cases; rank 0's figures."""
    if os.geteuid() != 0:
        pytest.fail("the lab makes network namespaces and needs root; run `make bench-check` with sudo")
    results = tmp_path_factory.mktemp("forward_overlap") / "results.json"
    syncline = [sys.executable, "-m", "syncline"]
    lab = [*syncline, "lab", "run", "--priorities", "two-racks-5-3", "--"]
    sizes = ["--layers", "12", "--layer-kib", "512", "--steps", "4", "--blocks", "2"]
    subprocess.run(
        [*lab, *syncline, "run", str(BENCHMARK), *sizes, "--out", str(results)],
        check=True,
        timeout=600,
        stdout=subprocess.DEVNULL,
    )
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def times_the_longer(found: dict[str, Any], case: str) -> float:
    """Return a step's time, as a multiple of the longer of computing and transfer."""
    return float(statistics.median(found["cases"][case]["step_s"]) / max(found["transfer_s"], found["compute_s"]))


@pytest.mark.parametrize("case", BEST_CASES)
def test_most_of_the_transfer_is_hidden(measured: dict[str, Any], case: str, say: Callable[[str], None]) -> None:
    ratio = times_the_longer(measured, case)
    say(f"a step takes {ratio:.2f} times the longer of computing and transfer (at most 1.6)")
    assert ratio < 1.6, measured["cases"]


def test_an_order_that_the_forward_pass_does_not_have_costs_time(
    measured: dict[str, Any], say: Callable[[str], None]
) -> None:
    best = min(times_the_longer(measured, case) for case in BEST_CASES)
    ratio = times_the_longer(measured, "order reversed") / best
    say(f"a step in reversed order takes {ratio:.2f} times as long (more than 1.05)")
    assert ratio > 1.05, measured["cases"]


def test_fixed_proportions_use_all_classes_and_a_search_never_takes_a_front_bucket_from_class_0(
    measured: dict[str, Any], say: Callable[[str], None]
) -> None:
    classes = {case: found["classes"] for case, found in measured["cases"].items()}
    say(f"classes of the buckets {classes}")
    assert set(classes["one class"]) == {0}
    assert set(classes["order reversed"]) == {0, 1, 2, 3}
    assert classes["priorities"] == sorted(classes["priorities"])
    assert classes["priorities"][0] == 0
