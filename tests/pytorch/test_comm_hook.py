"""The communication hook of DistributedDataParallel: gradients by a fleet, and its errors as themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("comm_hook_process.py")


@pytest.mark.parametrize("what", ["trains", "fails"])
def test_hooked_training(what: str) -> None:
    for status, output in run_script(SCRIPT, 2, what, finalizes=True):
        assert status == 0, output
        assert output.splitlines()[-1] == "ended"


def test_a_death_in_a_group_has_all_of_its_words_without_the_hook_and_its_type_with_it() -> None:
    (status, output), (victims_status, _) = run_script(SCRIPT, 2, "dies_in_its_group")
    assert (status, victims_status) == (0, 7), output
    assert output.splitlines()[-1] == "ended"


def test_a_death_comes_out_of_backward() -> None:
    (status, output), (victims_status, _) = run_script(SCRIPT, 2, "dies")
    assert (status, victims_status) == (0, 7), output
    assert "told of rank 1" in output
