"""The programs that these tests start.

`make test` installs MPI. Slurm comes with the system, and Ray is large: where one is missing, its tests are skipped and
say what they need; with SYNCLINE_ALL_TESTS, which CI sets, they fail instead.
"""

import os
import sys
import sysconfig
from pathlib import Path

import pytest
from slurm_cluster import PACKAGES, missing_programs

LAUNCHERS = Path(sys.prefix) / "launchers"


@pytest.fixture
def mpiexec():
    """Return a function from an MPI's name to its ``mpiexec``, which `make test` puts into the virtual environment."""

    def find(name):
        path = LAUNCHERS / name / "bin" / "mpiexec"
        if not path.exists():
            pytest.fail(f"{path} is missing; `make test` installs it")
        return str(path)

    return find


def _lack(what):
    if os.environ.get("SYNCLINE_ALL_TESTS"):
        pytest.fail(f"this test needs {what}")
    pytest.skip(f"needs {what}")


@pytest.fixture(scope="session")
def slurm_is_here():
    """Fail or skip where there is no Slurm to start."""
    missing = missing_programs()
    if missing:
        _lack(f"{', '.join(missing)} (Debian: apt-get install {PACKAGES})")
    if os.geteuid() != 0:
        _lack("root, as which Slurm's daemons run")


@pytest.fixture(scope="session")
def ray_path():
    """Return the PYTHONPATH with which Ray is found; fail or skip where there is none."""
    path = Path(sysconfig.get_path("purelib", vars={"base": str(LAUNCHERS / "ray")}))
    if not (path / "ray").is_dir():
        _lack("Ray Train, which `make ray` installs")
    return os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
