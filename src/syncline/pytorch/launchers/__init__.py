"""Which rank this process is, of how many, and where they meet: from the variables of whatever started it.

Each launcher has one pure function from the variables to a :class:`Place`, or to None. ``RANK`` and ``WORLD_SIZE``
(torchrun, ``syncline run``, Ray Train, a user) go before everything else. Without ``WORLD_SIZE`` the job has one rank
only if no launcher says, or may mean, more: a rank that believes itself alone trains a model of its own, in silence. So
a launcher that says more than one is used or refused.

Launchers may be nested: the one that is asked first is the one that usually stands inside. ``mpirun`` in a Slurm
allocation leaves each process the variables of the daemon that started it, and SkyPilot may run on Slurm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from syncline.endpoints import without_brackets
from syncline.errors import ConfigurationError
from syncline.pytorch.launchers.clouds import dstack, job_set, skypilot, train_job
from syncline.pytorch.launchers.mpi import mpich, open_mpi
from syncline.pytorch.launchers.place import (
    DEFAULT_MASTER_PORT,
    START_RANKS,
    Launcher,
    Place,
    check_place,
    optional_number,
    whole_number,
)
from syncline.pytorch.launchers.slurm import srun

__all__ = ["DEFAULT_MASTER_PORT", "LAUNCHERS", "Launcher", "Place", "find_place", "whole_number"]
_OTHERS: tuple[Launcher, ...] = (open_mpi, mpich, skypilot, dstack, train_job, srun, job_set)


def torchrun(values: Mapping[str, str]) -> Place | None:
    """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    >>> place = torchrun({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a0", "MASTER_PORT": "29500"})
    >>> place.rank, place.world_size, place.master_address
    (1, 2, 'a0')
    """
    if not values.get("WORLD_SIZE") or not values.get("RANK"):
        return None
    place = Place(
        rank=whole_number(values, "RANK", 0),
        world_size=whole_number(values, "WORLD_SIZE", 1),
        source="WORLD_SIZE",
        local_rank=optional_number(values, "LOCAL_RANK"),
        local_world_size=optional_number(values, "LOCAL_WORLD_SIZE"),
        master_address=without_brackets(values.get("MASTER_ADDR", "")) or None,
        master_port=optional_number(values, "MASTER_PORT") if values.get("MASTER_PORT") else None,
    )
    return check_place(place, "RANK")


def ray_train(values: Mapping[str, str]) -> Place | None:
    """Read what a worker of Ray Train finds: torchrun's variables with ``NODE_RANK`` in place of ``GROUP_RANK``.

    Ray has made a process group before the user's function runs, so the ranks meet at that group's store.
    """
    if not values.get("NODE_RANK") or values.get("GROUP_RANK"):
        return None
    return torchrun(values)


_NAMED: tuple[Launcher, ...] = (ray_train, torchrun)
LAUNCHERS = _NAMED + _OTHERS
"""In the order in which they are asked."""


def find_place(values: Mapping[str, str]) -> Place:
    """Return the process's place; :class:`ConfigurationError` names the variable that is wrong or leaves it open."""
    for launcher in _NAMED:
        named = launcher(values)
        if named is not None:
            return named
    if values.get("WORLD_SIZE"):
        return _of_size(whole_number(values, "WORLD_SIZE", 1), values)
    for launcher in _OTHERS:
        found = launcher(values)
        if found is not None and found.world_size > 1:
            return _with_master(found, values)
    return check_place(Place(rank=whole_number(values, "RANK", 0), world_size=1, source="WORLD_SIZE"), "RANK")


def _of_size(world_size: int, values: Mapping[str, str]) -> Place:
    """Take WORLD_SIZE's word; without RANK, a launcher's number if it starts as many: scripts export the size alone."""
    if world_size == 1:
        return Place(rank=0, world_size=1, source="WORLD_SIZE")
    for launcher in _OTHERS:
        with contextlib.suppress(ConfigurationError):  # it knows less than the user said
            found = launcher(values)
            if found is not None and found.world_size == world_size:
                return _with_master(found, values)
    raise ConfigurationError(f"WORLD_SIZE is {world_size}, but RANK is not set; {START_RANKS}")


def _with_master(place: Place, values: Mapping[str, str]) -> Place:
    """Return ``place`` with the master of another launcher that says the same, if it does not know one itself.

    With ``srun --mpi=pmi2`` the rank is PMI's as well as Slurm's, and Slurm alone tells where rank 0 runs.
    """
    for launcher in _OTHERS if place.master_port is None else ():
        with contextlib.suppress(ConfigurationError):
            other = launcher(values)
            if other and (other.rank, other.world_size) == (place.rank, place.world_size) and other.master_port:
                return replace(other, source=place.source)
    return place
