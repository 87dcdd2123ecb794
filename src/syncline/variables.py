"""The environment variables that count here, each with the argument that goes before it; the one place that reads them.

An argument that is given always wins, the variable comes next, then the default. ``process_variables()`` is what all
others read, so that this list is complete: a test looks for other readers, and another tries each variable against its
argument. What a launcher passes on to the ranks is the whole environment, from here too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import NamedTuple, TextIO

from syncline.errors import ConfigurationError

BEHIND, FLIGHT, METRICS = "SYNCLINE_BEHIND", "SYNCLINE_FLIGHT_RECORD", "SYNCLINE_METRICS"
LIVE, REPORT, TRACE = "SYNCLINE_LIVE", "SYNCLINE_REPORT", "SYNCLINE_TRACE"


class EnvironmentVariable(NamedTuple):
    """One environment variable; ``argument`` goes before it, as a user writes it."""

    name: str
    argument: str
    meaning: str


def _of_init(name: str, argument: str, meaning: str) -> EnvironmentVariable:
    return EnvironmentVariable(name=name, argument=f"init({argument}=)", meaning=meaning)


_LAUNCHER_PLACE = "init(rank=, world_size=)"
_LAUNCHERS = (
    ("LOCAL_RANK", "its number among the processes of its host, as torchrun sets it"),
    ("LOCAL_WORLD_SIZE", "their number"),
    ("NODE_RANK", "set by Ray Train beside torchrun's"),
    ("GROUP_RANK", "torchrun's number of the host"),
    ("OMPI_COMM_WORLD_RANK", "Open MPI's number of this process"),
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's number of processes"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "its number on its host"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "their number on its host: where it is that of all, rank 0 is on loopback"),
    ("PMIX_RANK", "a number without a size: refused, if nothing else tells it"),
    ("PMIX_NAMESPACE", "name of Open MPI's job, for the port"),
    ("OMPI_MCA_ess_base_jobid", "the same, of Open MPI 4"),
    ("OMPI_MCA_orte_ess_jobid", "the same, before that"),
    ("PMIX_HOSTNAME", "Open MPI's name of this host"),
    ("PMI_RANK", "another MPI's number of this process"),
    ("PMI_SIZE", "another MPI's number of processes"),
    ("PMI_JOBID", "name of its job, for the port"),
    ("PMI_ID", "a number without a size, of Hydra with -pmi-port: refused likewise"),
    ("PMI_HOSTNAME", "its name of this host"),
    ("MPI_LOCALRANKID", "its number on its host"),
    ("MPI_LOCALNRANKS", "their number on its host"),
    ("SLURM_PROCID", "Slurm's number of this process"),
    ("SLURM_STEP_NUM_TASKS", "Slurm's number of processes in the step"),
    ("SLURM_LOCALID", "its number on its host"),
    ("SLURM_NODEID", "the host's number in the step"),
    ("SLURM_STEP_TASKS_PER_NODE", "processes of each host"),
    ("SLURM_STEP_NODELIST", "hosts of the step, of which the first runs rank 0"),
    ("SLURM_DISTRIBUTION", "how tasks are placed: if arbitrary, MASTER_ADDR must be set"),
    ("SLURM_STEP_RESV_PORTS", "ports that Slurm keeps free for the step, of which the first is taken"),
    ("SLURM_JOB_ID", "the job's number, for the port"),
    ("SLURM_STEP_ID", "the step's, likewise"),
    ("SLURMD_NODENAME", "Slurm's name of this host"),
    ("SLURM_NTASKS", "tasks of the allocation: more than one, outside a step, is refused"),
    ("SLURM_NNODES", "nodes of the allocation: likewise"),
    ("PET_NNODES", "a TrainJob's number of pods"),
    ("PET_NPROC_PER_NODE", "processes of a pod: more than one is refused, as torchrun is to start them"),
    ("PET_NODE_RANK", "the pod's number"),
    ("PET_MASTER_ADDR", "host of the first pod"),
    ("PET_MASTER_PORT", "port there"),
    ("JOB_COMPLETION_INDEX", "a pod's number without a size: refused without WORLD_SIZE"),
    ("SKYPILOT_NUM_NODES", "SkyPilot's number of nodes"),
    ("SKYPILOT_NODE_RANK", "the node's number"),
    ("SKYPILOT_NODE_IPS", "addresses of the nodes, the first is rank 0's"),
    ("SKYPILOT_NUM_GPUS_PER_NODE", "more than one is refused, as torchrun is to start a process for each"),
    ("SKYPILOT_TASK_ID", "name of the task, for the port"),
    ("DSTACK_NODES_NUM", "dstack's number of nodes"),
    ("DSTACK_NODE_RANK", "the node's number"),
    ("DSTACK_MASTER_NODE_IP", "address of rank 0's node"),
    ("DSTACK_GPUS_PER_NODE", "more than one is refused: likewise"),
    ("DSTACK_RUN_NAME", "name of the run, for the port"),
)

VARIABLES: tuple[EnvironmentVariable, ...] = (
    _of_init("RANK", "rank", "this process's rank; without RANK and WORLD_SIZE, what the launcher says"),
    _of_init("WORLD_SIZE", "world_size", "number of ranks (default: 1)"),
    _of_init("MASTER_ADDR", "master", "host of rank 0, as the others reach it; also `syncline run --master`"),
    _of_init("MASTER_PORT", "master", "port on which rank 0 serves the store"),
    _of_init("TORCHELASTIC_USE_AGENT_STORE", "master", "torchrun's agent serves the store; not with an argument"),
    _of_init("TORCHELASTIC_RUN_ID", "job_id", "name of the job: ranks of other jobs are refused (default: syncline)"),
    _of_init("SYNCLINE_TOPOLOGY", "topology", "topology file or shipped name, auto, measure, or flat (default: auto)"),
    _of_init("SYNCLINE_SECRET_FILE", "secret", "file with the job's secret; also `syncline run --secret-file`"),
    _of_init("SYNCLINE_SECRET", "secret", "the secret itself, where there is no file"),
    _of_init(
        "SYNCLINE_AUTHENTICATE_FRAMES",
        "authenticate_frames",
        "on, off: a keyed code on each frame (default: on several machines)",
    ),
    _of_init(
        "SYNCLINE_INTERFACE",
        "interface",
        "address, or interface's name, that others reach; none: its host's ranks lend",
    ),
    _of_init(
        "SYNCLINE_PORTS",
        "ports",
        "FIRST-LAST, on which ranks listen, and rank 0's store; one number: a host's ranks share it (default: any)",
    ),
    _of_init("SYNCLINE_ADVERTISE", "advertise", "address[:port] at which others reach this rank, or none"),
    _of_init("SYNCLINE_HOST", "host", "the topology's name of this rank's host; also `syncline run --host`"),
    _of_init("SYNCLINE_TIMEOUT", "timeout_s", "seconds that a collective may take (default: 300)"),
    _of_init("SYNCLINE_CONNECT_TIMEOUT", "connect_timeout_s", "seconds that init() waits for others (default: 60)"),
    _of_init("SYNCLINE_SILENCE", "silence_s", "seconds without a sign of life: lost (default: 10)"),
    _of_init("SYNCLINE_STALL", "stall_s", "seconds without a call: not waited for (default: as the timeout)"),
    _of_init("SYNCLINE_CONGESTION", "congestion", "TCP's congestion control, as cubic (default: see init())"),
    _of_init("SYNCLINE_JOIN", "join", "host:port of members of a running job to come into, with commas"),
    _of_init("SYNCLINE_JOIN_PORT", "join_port", "port where this rank listens for newcomers (default: any)"),
    _of_init("SYNCLINE_ON_PREEMPTION", "on_preemption", "leave, checkpoint: what SIGTERM means (default: the end)"),
    _of_init(
        "SYNCLINE_REPLAN", "replan", "on, off: plan again where rates change (default: if the network was measured)"
    ),
    _of_init(TRACE, "trace", "file for this rank's trace, or a folder for all; also `syncline run --trace`"),
    _of_init("SYNCLINE_SHARED_MEMORY", "shared_memory", "off: no collectives in memory that ranks share (default: on)"),
    _of_init("SYNCLINE_BIND_THREAD", "bind_thread", "off: the kernel places the communication thread (default: on)"),
    EnvironmentVariable(
        name="SYNCLINE_ELASTIC",
        argument="distribute(elastic=)",
        meaning="on: go on without lost ranks (default: off); also `syncline run --elastic`",
    ),
    EnvironmentVariable(
        name="SYNCLINE_MIN_RANKS",
        argument="distribute(elastic=Elastic(min_ranks=))",
        meaning="the fewest ranks with which an elastic job goes on (default: 1); also `syncline run --min-ranks`",
    ),
    EnvironmentVariable(
        name=METRICS,
        argument="syncline run --metrics",
        meaning="[HOST:]PORT for Prometheus, to which each rank adds its number; a folder for files; or opentelemetry",
    ),
    EnvironmentVariable(
        name=LIVE,
        argument="syncline run --live",
        meaning="on: rank 0 writes a line every ten seconds; or a file for a view of all ranks as JSON (default: off)",
    ),
    EnvironmentVariable(
        name=REPORT,
        argument="syncline run --report",
        meaning="file for a report of the run, which rank 0 writes under other launchers",
    ),
    EnvironmentVariable(
        name="SYNCLINE_LOG_DIR",
        argument="syncline run --log-dir",
        meaning="folder where the launcher writes each rank's output, rank-N.log",
    ),
    EnvironmentVariable(
        name=FLIGHT,
        argument="syncline run --log-dir",
        meaning="folder where ranks write their last calls at a failure, at the end, and on SIGUSR1",
    ),
    EnvironmentVariable(
        name=BEHIND,
        argument="syncline run --behind",
        meaning="seconds without a finished step, or off: then rank 0 says who is behind (default: 60)",
    ),
    EnvironmentVariable(
        name="SYNCLINE_CHECK_STALE",
        argument="Sharded(overlap_forward=False)",
        meaning="1: what has not arrived when step() returns is NaN until it has, to find who reads it (default: off)",
    ),
    *(EnvironmentVariable(name=name, argument=_LAUNCHER_PLACE, meaning=meaning) for name, meaning in _LAUNCHERS),
    EnvironmentVariable(name="NO_COLOR", argument="syncline --color", meaning="if set, commands print without colour"),
    EnvironmentVariable(
        name="FORCE_COLOR", argument="syncline --no-color", meaning="if set, they print with it into a file too"
    ),
)
"""Those that users and launchers set. Beside them ``SYNCLINE_LAB`` tells what the lab starts that it runs there,
``SYNCLINE_LAST_WORDS`` where a rank that fails tells its launcher whom it names, and
``CUDA_VISIBLE_DEVICES`` says, with ``LOCAL_RANK``, which GPU is measured, where nobody names one; ``XDG_RUNTIME_DIR``
where the secret of a job lies that was given none, and ``XDG_CACHE_HOME`` (or ``HOME``) where networks are kept that
were measured."""


def behind_limit_s() -> float:
    """Return for how many seconds no step may be finished before it is said who is behind; infinite: for ever."""
    text = process_variables().get(BEHIND) or "60"
    try:
        limit_s = math.inf if text == "off" else float(text)
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise ConfigurationError(f"{BEHIND} must be a number of seconds, or off, not {text!r}")
    return limit_s


def live_place() -> str:
    """Return where rank 0 shows the job as it runs: a file, ``"on"`` for standard error, or nothing."""
    text = process_variables().get(LIVE) or "off"
    if text not in ("on", "off") and not {".", os.sep} & set(text):
        raise ConfigurationError(f"{LIVE} must be on, off, or a file such as view.json, not {text!r}")
    return "" if text == "off" else text


def process_variables() -> Mapping[str, str]:
    """Return the variables of this process, live; who starts another process passes them on."""
    return os.environ


def choose_colour(*, is_wanted: bool) -> None:
    """Let this process, and what it starts, print with colour or without, whatever its variables said."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        os.environ.pop(name, None)
    os.environ["FORCE_COLOR" if is_wanted else "NO_COLOR"] = "1"


def is_coloured(stream: TextIO) -> bool:
    """Whether ``stream`` is written to with colour: as was chosen, else where a person reads it."""
    return "NO_COLOR" not in os.environ and ("FORCE_COLOR" in os.environ or stream.isatty())
