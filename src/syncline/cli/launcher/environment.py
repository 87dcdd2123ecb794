"""What each rank is told: torchrun's variables, and Syncline's own.

Ranks of an elastic job are told on which port each lets newcomers in, and newcomers whom they join.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from syncline.cli.launcher.job import Job, RankProcess
from syncline.cli.launcher.supervisor import Limits, RestartLimits
from syncline.endpoints import only_port, parse_ports
from syncline.variables import REPORT, TRACE, process_variables

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
    _set_or_clear(environment, TRACE, trace_file)
    environment.pop(REPORT, None)  # the launcher writes it
    if secret_file is not None:
        environment.pop("SYNCLINE_SECRET", None)
        environment["SYNCLINE_SECRET_FILE"] = str(secret_file)


def _set_or_clear(environment: dict[str, str], name: str, value: object | None) -> None:
    environment.pop(name, None)
    if value is not None:
        environment[name] = str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """What the user said of an elastic job."""

    min_ranks: int | None = None
    """With how many ranks the job goes on, at least; with any number if nobody says."""
    join: str | None = None
    """Where a member of a running job listens, for ranks that join it."""
    join_port: int | None = None
    """Where the first rank of each machine lets newcomers in, the second on the next port, and so on."""


def elastic_environment(elastic: Elasticity | None, job: Job, process: RankProcess) -> dict[str, str]:
    """Return what a rank of an elastic job is told beside its place; nothing if the job is none."""
    if elastic is None:
        return {}
    shared = only_port(parse_ports(process_variables().get("SYNCLINE_PORTS", "")))
    port = elastic.join_port or shared or 0
    told = {
        "SYNCLINE_ELASTIC": "on",
        "SYNCLINE_MIN_RANKS": str(elastic.min_ranks or 1),
        JOIN_PORT: str(port + process.local_rank if port and port != shared else port),
    }
    return told if job.join is None else told | {JOIN: job.join}


def elastic_limits(elastic: Elasticity | None, job: Job, limits: Limits, restarts: RestartLimits) -> Limits:
    """Let survivors of an elastic job go on, and those that fail join them again."""
    if elastic is None:
        return limits
    # of a job that has ranks elsewhere too, nobody here knows how many are left
    min_ranks = (elastic.min_ranks or 1) if job.is_whole else 1
    return replace(limits, grace_s=math.inf, rejoins=restarts, min_ranks=min_ranks, is_whole=job.is_whole)
