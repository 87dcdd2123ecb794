"""What a launcher tells a process of its place in a job, and how its variables are read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from syncline.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
"""What torchrun listens on, so that habits and firewalls fit."""
_FIRST_PORT, _NUM_PORTS = 12000, 17393
"""A prime number of ports, below torchrun's, Kubernetes' and those that the kernel gives to connections."""
_NEXT_JOB = 101

START_RANKS = (
    "start the ranks with `torchrun` or `syncline run` on each machine, or set RANK, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT for each; WORLD_SIZE=1 if this process is to train alone"
)
TELL_MASTER = (
    "set both, alike for all ranks, to the host of rank 0 and a free port there, or give init(master=), or use "
    "`syncline run`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process's place in its job."""

    rank: int
    world_size: int
    source: str
    """The variable that says how many ranks there are."""
    local_rank: int | None = None
    """Its number among the processes of its host, None if the launcher does not say."""
    local_world_size: int | None = None
    host: str | None = None
    """What the launcher calls this host."""
    master_address: str | None = None
    """Where rank 0 runs, as the other ranks reach it."""
    master_port: int | None = None
    remedy: str = TELL_MASTER
    """What to do where the launcher does not tell the master."""


Launcher = Callable[[Mapping[str, str]], Place | None]
"""From a process's variables to its place; None if that launcher did not start it, and :class:`ConfigurationError` if
what it says leaves the place open."""


def check_place(place: Place, name: str) -> Place:
    """Return ``place`` if its rank, from the variable ``name``, is one of the job's."""
    if not 0 <= place.rank < place.world_size:
        raise ConfigurationError(
            f"{name} must be from 0 to {place.source} - 1, but they are {place.rank} and {place.world_size}; "
            "start the ranks with `syncline run` or torchrun"
        )
    return place


def whole_number(values: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in a variable, ``default`` if it is absent."""
    number = optional_number(values, name)
    return default if number is None else number


def optional_number(values: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable, None if it is absent."""
    text = values.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a whole number, not {text!r}") from None


def derive_port(job: int | str, step: int = 0) -> int:
    """Return a port for rank 0 that all ranks of a job derive alike, and other jobs on its host hardly.

    Numbers of jobs that share a host are mostly near each other: of 17,393 consecutive jobs no two have the same port
    in the same step, nor do two less than 172 apart in any of their first 101 steps. The port may still be in use: then
    rank 0 says so, and MASTER_PORT goes before it. A job named by a text gets one of as many ports by its checksum.
    """
    number = job if isinstance(job, int) else zlib.crc32(job.encode())
    return _FIRST_PORT + (number * _NEXT_JOB + step) % _NUM_PORTS
