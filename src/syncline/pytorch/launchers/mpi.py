"""``mpirun`` and ``mpiexec``: Open MPI, and those that speak PMI (MPICH and its kin with Hydra, Intel MPI).

None of them tells where rank 0 runs. Where all ranks are on one host that is loopback, on a port by the job's name;
otherwise the user says it, and the error shows how.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncline.errors import ConfigurationError
from syncline.pytorch.launchers.place import (
    LOOPBACK,
    START_RANKS,
    Place,
    check_place,
    derive_port,
    optional_number,
    whole_number,
)

_TELL = (
    "MPI does not tell where rank 0 runs: `{command}`, HOST being that of rank 0, or give init(master=), or use "
    "`syncline run`"
)
_TELL_OPEN_MPI = _TELL.format(command="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...")
_TELL_MPICH = _TELL.format(command="mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ...")


def open_mpi(values: Mapping[str, str]) -> Place | None:
    """Read ``OMPI_COMM_WORLD_SIZE``, ``_RANK``, ``_LOCAL_RANK`` and ``_LOCAL_SIZE``.

    >>> names = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    >>> said = {f"OMPI_COMM_WORLD_{name}": text for name, text in zip(names, "4114", strict=True)}
    >>> place = open_mpi({**said, "PMIX_NAMESPACE": "prterun-a0-1234@1"})
    >>> place.rank, place.world_size, place.master_address
    (1, 4, '127.0.0.1')
    """
    place = _numbered(
        values,
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        jobs=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
        remedy=_TELL_OPEN_MPI,
    )
    if place is None and values.get("PMIX_RANK") and not _is_counted(values):
        raise ConfigurationError(
            f"PMIX_RANK is {values['PMIX_RANK']!r}, so this may be one process of several, but WORLD_SIZE is not set; "
            f"{START_RANKS}"
        )
    return place


def mpich(values: Mapping[str, str]) -> Place | None:
    """Read ``PMI_SIZE``, ``PMI_RANK``, ``MPI_LOCALRANKID`` and ``MPI_LOCALNRANKS``."""
    return _numbered(
        values,
        size="PMI_SIZE",
        rank="PMI_RANK",
        local_size="MPI_LOCALNRANKS",
        local_rank="MPI_LOCALRANKID",
        jobs=("PMI_JOBID",),
        remedy=_TELL_MPICH,
    )


def _numbered(
    values: Mapping[str, str],
    *,
    size: str,
    rank: str,
    local_size: str,
    local_rank: str,
    jobs: tuple[str, ...],
    remedy: str,
) -> Place | None:
    if not values.get(size):
        return None
    world_size = whole_number(values, size, 1)
    if world_size > 1 and not values.get(rank):
        raise ConfigurationError(
            f"{size} is {world_size}, but {rank} is not set, so MPI did not start this process as one of them; "
            f"start it with mpirun, or {START_RANKS}"
        )
    num_local = optional_number(values, local_size)
    job = next((values[name] for name in jobs if values.get(name)), None)
    is_one_host = num_local == world_size
    place = Place(
        rank=whole_number(values, rank, 0) if world_size > 1 else 0,
        world_size=world_size,
        source=size,
        local_rank=optional_number(values, local_rank),
        local_world_size=num_local,
        host=values.get("PMIX_HOSTNAME") or None,
        master_address=LOOPBACK if is_one_host else None,
        master_port=derive_port(job) if is_one_host and job else None,
        remedy=remedy.replace("HOST", LOOPBACK, 1).replace(", HOST being that of rank 0", "")
        if is_one_host
        else remedy,
    )
    return check_place(place, rank)


def _is_counted(values: Mapping[str, str]) -> bool:
    return any(values.get(name) for name in ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
