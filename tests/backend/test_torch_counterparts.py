"""What PyTorch's own tests of process groups do, beside gloo's results, on two ranks."""

from __future__ import annotations

from pathlib import Path

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("torch_counterparts.py")
CHECKS = (
    "refusals",
    "many_at_once",
    "kinds_of_tensors",
    "numbered",
    "native",
    "data_parallel",
    "hooks",
    "reducers",
    "redistributions",
    "sharded_operations",
    "checkpoints",
)


def test_what_torchs_own_tests_do_has_gloos_results() -> None:
    for status, text in run_script(SCRIPT, 2):
        assert status == 0, text
        assert [line for line in text.splitlines() if line in CHECKS] == list(CHECKS), text
