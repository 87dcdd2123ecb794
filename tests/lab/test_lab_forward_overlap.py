"""All-gathers under the next forward pass, in the lab: what of the transfer is hidden, and that the order matters.

Ratios of medians within one run; `benchmarks/records` has the figures of a longer one. Computing and transfer take as
long as each other, so a step would take twice that if nothing were hidden.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "forward_overlap.py"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Train the benchmark's model in all its cases; rank 0's figures."""
    results = tmp_path_factory.mktemp("forward_overlap") / "results.json"
    syncline = [sys.executable, "-m", "syncline.cli.main"]
    lab = [*syncline, "lab", "run", "--priorities", "two-racks-5-3", "--"]
    sizes = ["--layers", "12", "--layer-kib", "512", "--steps", "4", "--blocks", "2"]
    subprocess.run(
        [*lab, *syncline, "run", str(BENCHMARK), *sizes, "--out", str(results)],
        check=True,
        timeout=300,
        stdout=subprocess.DEVNULL,
    )
    return json.loads(results.read_text())


def times_the_longer(found, case):
    return statistics.median(found["cases"][case]["step_s"]) / max(found["transfer_s"], found["compute_s"])


@pytest.mark.parametrize("case", ["one class", "priorities"])
def test_most_of_the_transfer_is_hidden(measured, case):
    assert times_the_longer(measured, case) < 1.6, measured["cases"]


def test_an_order_that_the_forward_pass_does_not_have_costs_time(measured):
    best = min(times_the_longer(measured, case) for case in ("one class", "priorities"))
    assert times_the_longer(measured, "order reversed") > 1.05 * best, measured["cases"]


def test_fixed_proportions_use_all_classes_and_a_search_never_takes_a_front_bucket_from_class_0(measured):
    classes = {case: found["classes"] for case, found in measured["cases"].items()}
    assert set(classes["one class"]) == {0}
    assert set(classes["order reversed"]) == {0, 1, 2, 3}
    assert classes["priorities"] == sorted(classes["priorities"])
    assert classes["priorities"][0] == 0
