"""What PyTorch's own tests do on process groups, beside gloo's results: on two ranks, and on meshes of four."""

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
    "changing_data_parallel",
    "hooks",
    "reducers",
    "redistributions",
    "sharded_operations",
    "checkpoints",
)
MESH_CHECKS = (
    "redistributions_of_meshes",
    "kinds_of_redistributions",
    "made_from_whole",
    "parallel_styles",
    "losses_and_local_functions",
    "convolutions",
    "graded_operations",
    "states",
    "failing_checkpoints",
    "sharded_tensors",
    "meshes_of_checkpoints",
)


def test_what_torchs_own_tests_do_has_gloos_results() -> None:
    for status, text in run_script(SCRIPT, 2):
        assert status == 0, text
        assert [line for line in text.splitlines() if line in CHECKS] == list(CHECKS), text


def test_what_torchs_own_tests_of_meshes_do_has_gloos_results() -> None:
    for status, text in run_script(SCRIPT.with_name("mesh_counterparts.py"), 4, finalizes=True):
        assert status == 0, text
        assert [line for line in text.splitlines() if line in MESH_CHECKS] == list(MESH_CHECKS), text
