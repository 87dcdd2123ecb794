"""``mpirun`` and ``mpiexec``: Open MPI, and those that speak PMI (MPICH and its kin with Hydra, Intel MPI).

None of them tells where rank 0 runs. Where all ranks are on one host that is loopback, on a port by the job's name;
otherwise the user says it, and the error shows how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from syncline.errors import ConfigurationError
from syncline.pytorch.launchers.place import (
    DEFAULT_MASTER_PORT,
    LOOPBACK,
    START_RANKS,
    Place,
    check_place,
    derive_port,
    optional_number,
    whole_number,
)

_HYDRA_PROXY = "hydra_pmi_proxy"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The variables of one kind of MPI, and how its launcher passes variables on."""

    size: str
    rank: str
    local_size: str
    local_rank: str
    host: str
    jobs: tuple[str, ...]
    """Of the job's name, the first that is set counts."""
    passing: str
    """Of a name and a value, as :meth:`str.format` fills them in."""


_OPEN_MPI = _Names(
    size="OMPI_COMM_WORLD_SIZE",
    rank="OMPI_COMM_WORLD_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    host="PMIX_HOSTNAME",
    jobs=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    passing="-x {}={}",
)
_MPICH = _Names(
    size="PMI_SIZE",
    rank="PMI_RANK",
    local_size="MPI_LOCALNRANKS",
    local_rank="MPI_LOCALRANKID",
    host="PMI_HOSTNAME",
    jobs=("PMI_JOBID",),
    passing="-genv {} {}",
)


def open_mpi(values: Mapping[str, str]) -> Place | None:
    """Read ``OMPI_COMM_WORLD_SIZE``, ``_RANK``, ``_LOCAL_RANK`` and ``_LOCAL_SIZE``.

    >>> names = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    >>> said = {f"OMPI_COMM_WORLD_{name}": text for name, text in zip(names, "4114", strict=True)}
    >>> place = open_mpi({**said, "PMIX_NAMESPACE": "prterun-a0-1234@1"})
    >>> place.rank, place.world_size, place.master_address
    (1, 4, '127.0.0.1')
    """
    place = _numbered(values, _OPEN_MPI)
    if place is None:
        _refuse_number(values, "PMIX_RANK", others=("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return place


def _hydra_proxy() -> int | None:
    """Return the process of Hydra above this one, which may have a shell between them; None if there is none."""
    try:
        return next((above.pid for above in psutil.Process().parents() if above.name() == _HYDRA_PROXY), None)
    except psutil.Error:
        return None


def mpich(values: Mapping[str, str], *, find_proxy: Callable[[], int | None] = _hydra_proxy) -> Place | None:
    """Read ``PMI_SIZE``, ``PMI_RANK``, ``MPI_LOCALRANKID`` and ``MPI_LOCALNRANKS``.

    Hydra tells no process the name of its job; but all ranks of a host are below one proxy, and on one host the number
    of that process, from ``find_proxy``, names the job as well.
    """
    place = _numbered(values, _MPICH, find_job=find_proxy)
    if place is None:
        _refuse_number(values, "PMI_ID", others=("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    return place


def _numbered(
    values: Mapping[str, str], names: _Names, *, find_job: Callable[[], int | None] = lambda: None
) -> Place | None:
    if not values.get(names.size):
        return None
    world_size = whole_number(values, names.size, 1)
    if world_size > 1 and not values.get(names.rank):
        raise ConfigurationError(
            f"{names.size} is {world_size}, but {names.rank} is not set, so MPI did not start this process as one of "
            f"them; start it with mpirun, or {START_RANKS}"
        )
    num_local = optional_number(values, names.local_size)
    is_one_host = num_local == world_size
    job = next((values[name] for name in names.jobs if values.get(name)), None) or (find_job() if is_one_host else None)
    place = Place(
        rank=whole_number(values, names.rank, 0) if world_size > 1 else 0,
        world_size=world_size,
        source=names.size,
        local_rank=optional_number(values, names.local_rank),
        local_world_size=num_local,
        host=values.get(names.host) or None,
        master_address=LOOPBACK if is_one_host else None,
        master_port=derive_port(job) if is_one_host and job else None,
        remedy=_remedy(names.passing, is_one_host=is_one_host),
    )
    return check_place(place, names.rank)


def _remedy(passing: str, *, is_one_host: bool) -> str:
    port = passing.format("MASTER_PORT", DEFAULT_MASTER_PORT)
    if is_one_host:
        return f"start with `mpirun {port} ...` and a free port, or use `syncline run`"
    host = passing.format("MASTER_ADDR", "HOST")
    return (
        f"MPI does not tell where rank 0 runs: start with `mpirun {host} {port} ...`, HOST being that of rank 0, or "
        "give init(master=), or use `syncline run`"
    )


def _refuse_number(values: Mapping[str, str], name: str, *, others: tuple[str, ...]) -> None:
    """Raise if there is a number without a size, and no other launcher has one: ``mpiexec -pmi-port`` tells no size."""
    if values.get(name) and not any(values.get(size) for size in others):
        raise ConfigurationError(
            f"{name} is {values[name]!r}, so this may be one process of several, but WORLD_SIZE is not set; "
            f"{START_RANKS}"
        )
