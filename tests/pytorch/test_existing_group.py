"""``init()`` within a process group that exists: its ranks and store are used, and what says otherwise is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_scripts import run_script
from syncline.errors import ConfigurationError
from syncline.pytorch.environment import Arguments, find_group, read_environment
from syncline.pytorch.launchers import Place

SCRIPT = Path(__file__).with_name("existing_group_process.py")
GROUP = Place(rank=1, world_size=3, source="the group", master_address="10.0.0.9")


@pytest.mark.parametrize("kind", ["file", "store"])
def test_a_fleet_in_a_group_that_met_without_variables(kind: str, tmp_path: Path) -> None:
    for status, output in run_script(SCRIPT, 2, kind, str(tmp_path)):
        assert status == 0, output
        assert output.splitlines()[-1] == "ended"


def test_without_a_group_nothing_is_found() -> None:
    assert find_group() is None


@pytest.mark.parametrize(
    "values",
    [{}, {"RANK": "1", "WORLD_SIZE": "3"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {"PET_NNODES": "4"}],
)
def test_the_groups_place_and_address_count(values: dict[str, str]) -> None:
    found = read_environment(values | {"MASTER_ADDR": "elsewhere"}, group=GROUP)
    assert (found.rank, found.world_size, found.master_address) == (1, 3, "10.0.0.9")


def test_a_group_that_met_at_a_file_leaves_the_address_to_the_variable() -> None:
    group = Place(rank=1, world_size=3, source="the group")
    assert read_environment({"MASTER_ADDR": "10.0.0.7"}, group=group).master_address == "10.0.0.7"
    assert read_environment({}, group=group).master_address is None


@pytest.mark.parametrize(
    ("values", "given", "said"),
    [
        ({"RANK": "2"}, {}, "RANK=2"),
        ({"WORLD_SIZE": "8"}, {}, "WORLD_SIZE=8"),
        ({}, Arguments(rank=0, world_size=3), r"init\(rank=0\)"),
        ({}, Arguments(rank=1, world_size=2), r"init\(world_size=2\)"),
    ],
)
def test_another_place_is_refused_with_both(values: dict[str, str], given: Arguments, said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{said}, but this process is rank 1 of 3 in the process group"):
        read_environment(values, given, group=GROUP)
