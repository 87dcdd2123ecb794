"""What each rank is told: torchrun's variables, and Syncline's own.

Ranks of an elastic job are told where each lets newcomers in, and newcomers whom they join.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from syncline.cli.launcher.job import Job, RankProcess
from syncline.cli.launcher.scratch import reserved_port
from syncline.cli.launcher.supervisor import Limits, RestartLimits
from syncline.endpoints import LOOPBACK, format_endpoint, only_port, own_address, parse_ports
from syncline.errors import ConfigurationError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doors:
    """Where the ranks of this machine let newcomers in, if the job is elastic."""

    elastic: Elasticity | None
    job: Job
    near: Mapping[int, str] = field(default_factory=dict)
    """By rank, as the others of this machine reach it."""
    far: str | None = None
    """Where the first rank of the master's machine does, for when no rank lives on this one."""
    ports: Mapping[int, int] = field(default_factory=dict)

    def environment(self, rank: int) -> dict[str, str]:
        """Return what ``rank`` is told beside its place."""
        if self.elastic is None:
            return {}
        told = {
            "SYNCLINE_ELASTIC": "on",
            "SYNCLINE_MIN_RANKS": str(self.elastic.min_ranks or 1),
            JOIN_PORT: str(self.ports[rank]),
        }
        return told if self.job.join is None else told | {JOIN: self.job.join}

    def limits(self, limits: Limits, restarts: RestartLimits) -> Limits:
        """Let survivors of an elastic job go on, and those that fail join them again."""
        if self.elastic is None:
            return limits
        # of a job that has ranks elsewhere too, nobody here knows how many are left
        is_whole = self.job.is_whole
        min_ranks = (self.elastic.min_ranks or 1) if is_whole else 1
        return replace(limits, grace_s=math.inf, rejoins=restarts, min_ranks=min_ranks, is_whole=is_whole)


@contextmanager
def open_doors(elastic: Elasticity | None, job: Job, restarts: RestartLimits) -> Iterator[_Doors]:
    """Choose a port for each rank, which no other program gets as long as this lasts."""
    if elastic is None:
        yield _Doors(elastic=None, job=job)
        return
    shared = only_port(parse_ports(process_variables().get("SYNCLINE_PORTS", "")))
    join_port = elastic.join_port or shared
    if restarts.count and not job.is_whole and job.join is None and join_port is None:
        raise ConfigurationError(
            "--elastic and --restarts on several machines need --join-port PORT, the same on all: a machine that has "
            "lost all its ranks joins again at the master's"
        )
    ranks = [process.rank for process in job.processes]
    address = (
        None if job.is_whole else own_address(job.master_address, what="--join" if job.join else "--master")
    ) or LOOPBACK
    with ExitStack() as stack:
        if join_port is None:
            ports = {rank: stack.enter_context(reserved_port(address)) for rank in ranks}
        elif join_port == shared:
            ports = dict.fromkeys(ranks, join_port)
        else:
            ports = {rank: join_port + place for place, rank in enumerate(ranks)}
        far = job.join
        if far is None and not job.is_whole and join_port is not None:
            far = format_endpoint(job.master_address, join_port)
        yield _Doors(
            elastic=elastic,
            job=job,
            near={rank: format_endpoint(address, port) for rank, port in ports.items()},
            far=far,
            ports=ports,
        )
