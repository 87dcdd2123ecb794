"""What each rank is told: torchrun's variables, and Syncline's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from syncline.cli.launcher.job import Job, RankProcess
from syncline.variables import REPORT

JOIN, JOIN_PORT = "SYNCLINE_JOIN", "SYNCLINE_JOIN_PORT"
PLACE = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""torchrun's name for how often this rank was started again."""


def rank_environment(
    job: Job,
    process: RankProcess,
    *,
    base: Mapping[str, str],
    num_cores: int,
    secret_file: Path | None = None,
    trace_file: Path | None = None,
    elastic: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Build the environment of ``process``: ``base``, then what the job says, which ``base`` cannot overrule.

    ``elastic``: what an elastic job's ranks are told as well, and one that joins a running job in place of its place.
    Only ``OMP_NUM_THREADS``, ``PYTHONUNBUFFERED`` and ``PYTHONFAULTHANDLER`` are defaults that ``base`` may set.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores // len(job.processes))),
        "PYTHONUNBUFFERED": "1",  # a line is seen when it is written
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves a traceback too
    }
    environment = defaults | dict(base) | _torch_variables(job, process)
    _set_syncline_variables(environment, job, process, secret_file=secret_file, trace_file=trace_file)
    environment |= elastic or {}
    return without_place(environment) if JOIN in environment else environment


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what would make a rank begin a job, for one that joins another."""
    return {name: value for name, value in environment.items() if name not in PLACE}


def _torch_variables(job: Job, process: RankProcess) -> dict[str, str]:
    num_local = len(job.processes)
    return {
        "RANK": str(process.rank),
        "LOCAL_RANK": str(process.local_rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(num_local),
        "GROUP_RANK": str(job.machine_index),
        "GROUP_WORLD_SIZE": str(job.num_machines),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(process.rank),
        "ROLE_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": job.master_address,
        "MASTER_PORT": str(job.master_port),
    }


def _set_syncline_variables(
    environment: dict[str, str], job: Job, process: RankProcess, *, secret_file: Path | None, trace_file: Path | None
) -> None:
    is_named = bool(process.host) and (job.topology or job.join) is not None
    _set_or_clear(environment, "SYNCLINE_HOST", process.host if is_named else None)
    _set_or_clear(environment, "SYNCLINE_TOPOLOGY", job.topology)
    _set_or_clear(environment, "SYNCLINE_TRACE", trace_file)
    environment.pop(REPORT, None)  # the launcher writes it
    if secret_file is not None:
        environment.pop("SYNCLINE_SECRET", None)
        environment["SYNCLINE_SECRET_FILE"] = str(secret_file)


def _set_or_clear(environment: dict[str, str], name: str, value: object | None) -> None:
    environment.pop(name, None)
    if value is not None:
        environment[name] = str(value)
