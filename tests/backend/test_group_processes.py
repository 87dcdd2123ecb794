"""Groups of real processes over loopback: what trains on them, and what they say when a rank dies."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("group_process.py")


def test_everything_that_uses_groups_computes_what_one_process_does() -> None:
    for status, text in run_script(SCRIPT, 2, "consumers", finalizes=True):
        assert status == 0, text
        assert text.split() == [
            "distributed_data_parallel",
            "uneven_data",
            "compressed",
            "zero_redundancy",
            "fully_sharded",
            "tensors_of_a_mesh",
            "objects",
        ]


def test_fsdp1_trains_in_every_way_as_on_gloo() -> None:
    for status, text in run_script(SCRIPT.with_name("fsdp_process.py"), 4, finalizes=True):
        assert status == 0, text
        assert text.split() == ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"], text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_on_all_others_which_go_on_without_it(victim: int, tmp_path: Path) -> None:
    ends = run_script(SCRIPT, 3, "killed", str(victim), str(tmp_path))
    assert ends[victim][0] == -signal.SIGKILL
    for rank, (status, text) in enumerate(ends):
        if rank != victim:
            assert status == 0, text
            assert text.split()[-2:] == ["told", "again"], text


def test_a_fleet_and_groups_live_side_by_side(tmp_path: Path) -> None:
    for status, text in run_script(SCRIPT, 2, "beside_a_fleet", str(tmp_path)):
        assert (status, text.split()[-1:]) == (0, ["both"]), text


def test_a_program_may_end_without_destroying_its_groups() -> None:
    for status, text in run_script(SCRIPT, 2, "leave", finalizes=True):
        assert (status, text) == (0, "over\n")


def test_the_others_are_told_with_what_error_a_rank_ended() -> None:
    (status, text), (other, _) = run_script(SCRIPT, 2, "raises", finalizes=True)
    assert (status, text.splitlines()[-1:], other) == (0, ["told"], 1), text


def test_groups_of_a_world_use_its_connections_alone_or_at_once_and_fail_alone() -> None:
    for status, text in run_script(SCRIPT, 3, "groups"):
        assert (status, text) == (0, "over\n")


def test_groups_of_a_world_that_is_gloos_connect_by_themselves() -> None:
    for status, text in run_script(SCRIPT, 3, "beside_gloo", finalizes=True):
        assert (status, text) == (0, "gloo syncline\n")


def test_a_backend_among_others_serves_its_device() -> None:
    for status, text in run_script(SCRIPT, 2, "among_others"):
        assert (status, text) == (0, "over\n")
