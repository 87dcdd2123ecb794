"""Open MPI's and MPICH's ``mpiexec`` start one job on this machine, of which nobody told the ranks anything."""

import sys

import pytest
from launched_jobs import RANK_SCRIPT, check_one_job, run_together, what_ranks_said

from rank_scripts import forked_python, reserved_port
from syncline.pytorch.launchers import mpich

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MORE_THAN_CORES = {"openmpi": ["--map-by", ":OVERSUBSCRIBE"], "mpich": []}
TELLING = {
    "openmpi": ["-x", "MASTER_ADDR=127.0.0.1", "-x", "MASTER_PORT={port}"],
    "mpich": ["-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", "{port}"],
}
BY_A_SHELL = ["sh", "-c", '"$@"; exit', "sh"]
"""As a job's own script does, which has something to do beforehand and afterwards."""
ONE_HOST = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}


@pytest.fixture
def run_ranks(mpiexec, tmp_path):
    """Return a function that runs ranks with an MPI, and returns what they said."""

    def run(name, num_ranks, extra=()):
        folder, scratch = tmp_path / "job", tmp_path / "scratch"
        folder.mkdir()
        scratch.mkdir()
        launcher = [mpiexec(name), *MORE_THAN_CORES[name], "-n", str(num_ranks), *extra]
        python = sys.executable if name == "mpich" else forked_python()  # MPICH's job is found by what is above a rank
        command = [*launcher, *BY_A_SHELL, python, str(RANK_SCRIPT), str(folder)]
        run_together([command], [{**AS_ROOT, "TMPDIR": str(scratch)}])
        return what_ranks_said(folder)

    return run


@pytest.mark.parametrize("name", sorted(MORE_THAN_CORES))
def test_ranks_of_one_machine_train_one_model(run_ranks, name):
    check_one_job(run_ranks(name, 4), 4)


@pytest.mark.parametrize("name", sorted(TELLING))
def test_ranks_meet_where_they_are_told_to(run_ranks, name):
    with reserved_port() as port:
        check_one_job(run_ranks(name, 2, [text.format(port=port) for text in TELLING[name]]), 2)


def test_hydra_names_no_job_but_started_all_ranks_of_a_host():
    ports = [mpich(ONE_HOST, find_proxy=lambda pid=pid: pid).master_port for pid in (4711, 4711, 4712)]
    assert ports[0] == ports[1] != ports[2]
    assert mpich(ONE_HOST, find_proxy=lambda: None).master_port is None
    assert mpich(ONE_HOST | {"PMI_JOBID": "a"}, find_proxy=lambda: 4711).master_port != ports[0]


def test_on_several_hosts_a_process_of_one_of_them_names_nothing():
    place = mpich(ONE_HOST | {"PMI_SIZE": "4"}, find_proxy=lambda: pytest.fail("its proxies differ"))
    assert (place.master_address, place.master_port) == (None, None)
