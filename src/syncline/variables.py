"""The environment variables that count here, each with the argument that goes before it; the one place that reads them.

An argument that is given always wins, the variable comes next, then the default. ``process_variables()`` is what all
others read, so that this list is complete: a test looks for other readers, and another tries each variable against its
argument. What a launcher passes on to the ranks is the whole environment, from here too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentVariable:
    """One environment variable; ``argument`` goes before it, as a user writes it."""

    name: str
    argument: str
    meaning: str


def _of_init(name: str, argument: str, meaning: str) -> EnvironmentVariable:
    return EnvironmentVariable(name=name, argument=f"init({argument}=)", meaning=meaning)


_LAUNCHER_PLACE = "init(rank=, world_size=)"
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "Open MPI's number of this process"),
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's number of processes"),
    ("PMI_RANK", "another MPI's number of this process"),
    ("PMI_SIZE", "another MPI's number of processes"),
    ("SLURM_PROCID", "Slurm's number of this process"),
    ("SLURM_STEP_NUM_TASKS", "Slurm's number of processes"),
    ("SLURM_NTASKS", "the same, where the step does not say it"),
    ("PET_NNODES", "torchrun's setting of machines: more than one, without WORLD_SIZE, is refused"),
    ("PET_NPROC_PER_NODE", "torchrun's setting of processes of a machine: likewise"),
    ("SKYPILOT_NUM_NODES", "SkyPilot's number of machines: likewise"),
    ("DSTACK_NODES_NUM", "dstack's number of machines: likewise"),
    ("PMIX_RANK", "a number without a size, so it is refused without WORLD_SIZE"),
    ("JOB_COMPLETION_INDEX", "Kubernetes' number without a size: likewise"),
)

VARIABLES: tuple[EnvironmentVariable, ...] = (
    _of_init("RANK", "rank", "this process's rank; without RANK and WORLD_SIZE, what MPI or Slurm say"),
    _of_init("WORLD_SIZE", "world_size", "number of ranks (default: 1)"),
    _of_init("MASTER_ADDR", "master", "host of rank 0, as the others reach it; also `syncline run --master`"),
    _of_init("MASTER_PORT", "master", "port on which rank 0 serves the store"),
    _of_init("TORCHELASTIC_USE_AGENT_STORE", "master", "torchrun's agent serves the store; not with an argument"),
    _of_init("TORCHELASTIC_RUN_ID", "job_id", "name of the job: ranks of other jobs are refused (default: syncline)"),
    _of_init("SYNCLINE_TOPOLOGY", "topology", "topology file or shipped name; also `syncline run --topology`"),
    _of_init("SYNCLINE_SECRET_FILE", "secret", "file with the job's secret; also `syncline run --secret-file`"),
    _of_init("SYNCLINE_SECRET", "secret", "the secret itself, where there is no file"),
    _of_init("SYNCLINE_AUTHENTICATE_FRAMES", "authenticate_frames", "on: a keyed code on each frame (default: off)"),
    _of_init("SYNCLINE_INTERFACE", "interface", "address, or name of the interface, that other ranks reach"),
    _of_init("SYNCLINE_TIMEOUT", "timeout_s", "seconds that a collective may take (default: 300)"),
    _of_init("SYNCLINE_CONNECT_TIMEOUT", "connect_timeout_s", "seconds that init() waits for others (default: 60)"),
    _of_init("SYNCLINE_SILENCE", "silence_s", "seconds without a sign of life: lost (default: 10)"),
    _of_init("SYNCLINE_STALL", "stall_s", "seconds without a call: not waited for (default: as the timeout)"),
    _of_init("SYNCLINE_TRACE", "trace", "file for this rank's trace; also `syncline run --trace`"),
    _of_init("SYNCLINE_NATIVE", "native", "0: Python moves messages; 1: compiled code or an error (default: if built)"),
    _of_init("SYNCLINE_SHARED_MEMORY", "shared_memory", "off: no collectives in memory that ranks share (default: on)"),
    _of_init("SYNCLINE_BIND_THREAD", "bind_thread", "off: the kernel places the communication thread (default: on)"),
    *(EnvironmentVariable(name=name, argument=_LAUNCHER_PLACE, meaning=meaning) for name, meaning in _LAUNCHERS),
    EnvironmentVariable(
        name="SYNCLINE_HOST", argument="syncline run --host", meaning="the topology's host whose ranks start here"
    ),
    EnvironmentVariable(name="NO_COLOR", argument="syncline --color", meaning="if set, commands print without colour"),
    EnvironmentVariable(
        name="FORCE_COLOR", argument="syncline --no-color", meaning="if set, they print with it into a file too"
    ),
)
"""Those that users set. Beside them ``SYNCLINE_LAB`` tells what the lab starts that it runs there, and ``LOCAL_RANK``
and ``CUDA_VISIBLE_DEVICES`` say which GPU is measured, where nobody names one."""


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
