"""Which rank a process is under each launcher, and where its job meets; none that says more ends in a job of one.

The variables of each are in a file beside this one, which says where they come from.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from syncline.errors import ConfigurationError
from syncline.pytorch.environment import Arguments, read_environment
from syncline.pytorch.launchers import (
    LAUNCHERS,
    Place,
    derive_port,
    dstack,
    find_place,
    job_set,
    mpich,
    open_mpi,
    skypilot,
    srun,
    torchrun,
    train_job,
)

FOLDER = Path(__file__).parent
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
Numbers = tuple[int, int, int | None, int | None]

USED: dict[str, tuple[Numbers, str | None, tuple[str, int]]] = {
    # rank, world size, local rank, local world size; host; master
    "torchrun": ((1, 2, 1, 2), None, ("localhost", 44285)),
    "torchrun-in-srun": ((3, 4, 1, 2), None, ("node03", 44285)),
    "ray-train": ((3, 4, 1, 2), None, ("10.0.0.4", 43759)),
    "srun": ((5, 8, 1, 4), "node07", ("node03", derive_port(1720714))),
    "srun-uneven": ((6, 7, 2, 3), "node03", ("node03", derive_port(1720714, 1))),
    "srun-one-node": ((1, 2, 1, 2), "node03", ("127.0.0.1", derive_port(1720714))),
    "srun-reserved-ports": ((1, 2, 0, 1), "node07", ("node03", 12500)),
    "srun-pmi2": ((3, 4, 1, 2), "node07", ("node03", derive_port(1720714))),
    "srun-pmix": ((3, 4, 1, 2), "node07", ("node03", derive_port(1720714))),
    "open-mpi": ((2, 3, 1, 3), "a0", ("127.0.0.1", derive_port("prterun-a0-22582@1"))),
    "mpirun-in-slurm": ((2, 3, 1, 3), "a0", ("127.0.0.1", derive_port("prterun-a0-22582@1"))),
    "trainjob": ((1, 4, 0, 1), None, ("digits-node-0-0.digits", 29400)),
    "jobset": ((1, 4, None, None), None, ("digits-workers-0-0.digits", 29500)),
    "skypilot": ((1, 2, 0, 1), None, ("10.0.0.4", derive_port("sky-2026-07-06-21-18-31-563597_digits_1"))),
    "dstack": ((2, 3, 0, 1), None, ("10.128.0.47", derive_port("train-distrib"))),
}
MASTERLESS = {
    "mpich": r"PMI_SIZE is 2, but MASTER_ADDR or MASTER_PORT is not set; start with `mpirun -genv MASTER_PORT 29500 ",
    "open-mpi-two-hosts": r"OMPI_COMM_WORLD_SIZE is 6.*`mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 \.\.\.`",
    "srun-arbitrary": r"SLURM_STEP_NUM_TASKS is 2.*with an arbitrary distribution no node is known to run rank 0",
}
REFUSED = {
    "slurm-batch-script": "SLURM_NTASKS is 8, but SLURM_STEP_NUM_TASKS is not set.*start it with srun",
    "mpich-pmi-port": "PMI_ID is '1', so this may be one process of several",
    "trainjob-eight-gpus": "PET_NPROC_PER_NODE is '8'.*let each pod start `torchrun train.py`",
    "indexed-job": "JOB_COMPLETION_INDEX is '1'.*set WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the pod's template",
    "skypilot-eight-gpus": r"SKYPILOT_NUM_NODES is '2' and .*_GPUS_PER_NODE '8'.*--nnodes=\$SKYPILOT_NUM_NODES",
    "dstack-two-gpus": r"DSTACK_NODES_NUM is '2' and DSTACK_GPUS_PER_NODE '2'.*--master-addr=\$DSTACK_MASTER_NODE_IP",
}
ALONE = ("srun-one-task", "slurm-interactive-shell", "skypilot-one-node")


def captured(name: str) -> Mapping[str, str]:
    """The variables of a file, which nobody can change: a launcher's function is pure."""
    lines = [line for line in (FOLDER / f"{name}.env").read_text().splitlines() if not line.startswith("#")]
    pairs = (line.partition("=") for line in lines)
    return MappingProxyType({key: value.replace("\\n", "\n") for key, _, value in pairs})


def test_every_file_is_used() -> None:
    files = {path.stem for path in FOLDER.glob("*.env")}
    assert files == USED.keys() | MASTERLESS.keys() | REFUSED.keys() | set(ALONE)
    assert all((FOLDER / f"{name}.env").read_text().startswith("# ") for name in files)


@pytest.mark.parametrize("name", USED)
def test_a_launcher_that_says_enough_is_used(name: str) -> None:
    numbers, host, master = USED[name]
    place = find_place(captured(name))
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == numbers
    assert (place.host, (place.master_address, place.master_port)) == (host, master)
    environment = read_environment(captured(name))
    assert (environment.rank, environment.world_size) == numbers[:2]
    assert (environment.master_address, environment.master_port) == master


@pytest.mark.parametrize("name", [*USED, *MASTERLESS])
def test_the_users_master_goes_before_the_launchers(name: str) -> None:
    environment = read_environment({**captured(name), **MASTER})
    assert (environment.master_address, environment.master_port) == ("10.0.0.1", 29500)
    assert environment.world_size > 1


@pytest.mark.parametrize("name", MASTERLESS)
def test_without_a_meeting_point_it_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ConfigurationError, match=MASTERLESS[name]):
        read_environment(captured(name))


def test_a_port_alone_is_enough_where_all_ranks_share_a_host() -> None:
    environment = read_environment({**captured("mpich"), "MASTER_PORT": "4000"})
    assert (environment.master_address, environment.master_port) == ("127.0.0.1", 4000)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("srun-one-task", "torchrun"),
        ("srun-one-task", "open-mpi"),
        ("slurm-batch-script", "torchrun"),
        ("slurm-batch-script", "open-mpi"),
        ("slurm-batch-script", "skypilot"),
        ("trainjob-eight-gpus", "torchrun"),
        ("skypilot-eight-gpus", "torchrun"),
        ("dstack-two-gpus", "torchrun"),
        ("indexed-job", "torchrun"),
    ],
)
def test_of_two_launchers_the_inner_one_counts(outer: str, inner: str) -> None:
    alone = find_place(captured(inner))
    assert find_place({**captured(outer), **captured(inner)}) == alone


def test_the_host_is_called_as_the_user_says_else_the_launcher_else_the_machine() -> None:
    variables = captured("srun")
    assert read_environment(variables).host == "node07"
    assert read_environment({**variables, "SYNCLINE_HOST": "a0"}).host == "a0"
    assert read_environment({**variables, "SYNCLINE_HOST": "a0"}, Arguments(host="b0")).host == "b0"
    assert read_environment(captured("torchrun")).host == socket.gethostname()


@pytest.mark.parametrize("name", REFUSED)
def test_a_launcher_that_leaves_the_place_open_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=REFUSED[name]):
        read_environment({**captured(name), **MASTER})
    assert read_environment({**captured(name), "WORLD_SIZE": "1"}).world_size == 1


@pytest.mark.parametrize("name", ALONE)
def test_a_launcher_of_one_process_starts_a_job_of_one(name: str) -> None:
    environment = read_environment(captured(name))
    assert (environment.rank, environment.world_size) == (0, 1)


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        (torchrun, {"torchrun", "torchrun-in-srun", "ray-train", "jobset"}),
        (open_mpi, {"open-mpi", "open-mpi-two-hosts", "mpirun-in-slurm"}),
        (mpich, {"mpich", "srun-pmi2"}),
        (skypilot, {"skypilot"}),
        (dstack, {"dstack"}),
        (train_job, {"trainjob"}),
        (job_set, set()),
        (srun, {name for name in (*USED, *MASTERLESS) if "srun" in name} | {"mpirun-in-slurm"}),
    ],
)
def test_each_function_knows_its_own_variables(launcher, names: set[str]) -> None:
    assert launcher in LAUNCHERS
    found = set()
    for name in (*USED, *MASTERLESS):
        try:
            place: Place | None = launcher(captured(name))
        except ConfigurationError:
            assert launcher in {job_set, open_mpi}, name
            continue
        if place is not None and place.world_size > 1:
            found.add(name)
    assert found == names


@pytest.mark.parametrize("name", [name for name in (*USED, *MASTERLESS) if "RANK" not in captured(name)])
def test_a_size_that_a_script_exports_needs_no_rank_where_the_launcher_agrees(name: str) -> None:
    variables = captured(name)
    place = find_place(variables)
    same = find_place({**variables, "WORLD_SIZE": str(place.world_size)})
    assert (same.rank, same.world_size) == (place.rank, place.world_size)
    with pytest.raises(ConfigurationError, match="RANK is not set"):
        find_place({**variables, "WORLD_SIZE": str(place.world_size + 1)})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_NNODES": "2"}, "SLURM_NNODES is 2, but SLURM_STEP_NUM_TASKS is not set.*start it with srun"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS is '8', but SLURM_PROCID is not set"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "8"}, "SLURM_PROCID must be from 0 to SLURM_STEP_NUM_TASKS - 1"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n["}, "SLURM_STEP_NODELIST cannot"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS must be a whole number"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is '0', so this may be one process of several"),
        ({"PET_NNODES": "2"}, "PET_NNODES is '2', but PET_NODE_RANK is not set.*torchrun"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES is '1:4'"),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE is 'auto'"),
        ({"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NUM_NODES is '2', but SKYPILOT_NODE_RANK is not set"),
        ({"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "2"}, "DSTACK_NODE_RANK must be from 0 to DSTACK_NODES_NUM - 1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "1"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"WORLD_SIZE": "2", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0, but RANK is not set"),
        ({"RANK": "1"}, "RANK must be from 0 to WORLD_SIZE - 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT must be from 1"),
    ],
)
def test_what_leaves_the_place_open_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_environment(MASTER | variables)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        {"PET_NNODES": "1:1", "PET_NPROC_PER_NODE": "1", "SKYPILOT_NUM_NODES": "1", "DSTACK_NODES_NUM": "1"},
        {"WORLD_SIZE": "1", "SLURM_NTASKS": "8", "JOB_COMPLETION_INDEX": "3"},
    ],
)
def test_who_says_one_is_alone(variables: dict[str, str]) -> None:
    assert read_environment(variables).world_size == 1


def test_jobs_that_may_share_a_host_have_ports_of_their_own() -> None:
    jobs = [derive_port(job) for job in range(1_720_000, 1_720_000 + 17_393)]
    assert len(set(jobs)) == len(jobs)
    steps = [derive_port(job, step) for job in range(1_720_000, 1_720_170) for step in range(101)]
    assert len(set(steps)) == len(steps)
    assert all(12_000 <= port < 29_400 for port in (*jobs, derive_port("a job of another kind")))
