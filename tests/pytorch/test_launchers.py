"""Which rank a process is under each launcher; none that says more than one ends in a job of one."""

from __future__ import annotations

import pytest

from syncline.errors import ConfigurationError
from syncline.pytorch.environment import read_environment
from syncline.pytorch.launchers import find_place

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
NUMBERED = {
    "srun": {"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
    "srun of a part": {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"},
    "mpirun in an allocation": {
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_RANK": "3",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
    },
    "mpiexec": {"PMI_SIZE": "8", "PMI_RANK": "3"},
    "a script that exports the size": {"WORLD_SIZE": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "3"},
}


@pytest.mark.parametrize("variables", NUMBERED.values(), ids=NUMBERED)
def test_a_launcher_that_numbers_its_processes_is_used(variables: dict[str, str]) -> None:
    environment = read_environment(variables | MASTER)
    assert (environment.rank, environment.world_size) == (3, 8)


@pytest.mark.parametrize("variables", NUMBERED.values(), ids=NUMBERED)
def test_without_a_meeting_point_it_is_refused_by_its_variable(variables: dict[str, str]) -> None:
    source = find_place(variables).source
    with pytest.raises(ConfigurationError, match=f"{source} is 8, but MASTER_ADDR or MASTER_PORT is not set"):
        read_environment(variables)


def test_world_size_goes_before_any_launcher() -> None:
    place = find_place({"RANK": "1", "WORLD_SIZE": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "3", "PET_NNODES": "4"})
    assert (place.rank, place.world_size) == (1, 2)
    assert find_place({"WORLD_SIZE": "1", "SLURM_NTASKS": "8", "JOB_COMPLETION_INDEX": "3"}).world_size == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_NTASKS": "8"}, "SLURM_NTASKS is 8, but SLURM_PROCID is not set.*start it with srun"),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "8"}, "SLURM_PROCID must be from 0 to SLURM_NTASKS - 1"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS must be a whole number"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PET_NNODES": "2"}, "PET_NNODES is '2'.*torchrun"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES is '1:4'"),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE is 'auto'"),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}, "SKYPILOT_NUM_NODES is '2'"),
        ({"DSTACK_NODES_NUM": "2"}, "DSTACK_NODES_NUM is '2'"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is '0'.*WORLD_SIZE=1 if this process"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is '0', so this may be one process of several"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"WORLD_SIZE": "2", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, "WORLD_SIZE is 2, but RANK is not set"),
    ],
)
def test_what_leaves_the_place_open_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_environment(variables | MASTER)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "SKYPILOT_NUM_NODES": "1", "DSTACK_NODES_NUM": "1"},
    ],
)
def test_a_launcher_of_one_process_starts_a_job_of_one(variables: dict[str, str]) -> None:
    assert read_environment(variables).world_size == 1
