"""Which rank this process is, and of how many: from the variables of whatever started it, without side effects.

``RANK`` and ``WORLD_SIZE`` (torchrun, ``syncline run``, Ray, a user) go before everything else. Without ``WORLD_SIZE``
the job has one rank only if no launcher says, or may mean, more: a rank that believes itself alone trains a model of
its own, in silence. A launcher that gives each process a number is used; one that starts one process per machine, and
leaves the rest to torchrun, is refused with what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from syncline.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process's place in its job."""

    rank: int
    world_size: int
    source: str
    """The variable that says how many ranks there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbering:
    """A launcher that numbers its processes: the variables of its size (the first that is set counts) and its rank."""

    name: str
    sizes: tuple[str, ...]
    rank: str
    command: str


# mpirun inside a Slurm allocation leaves each process SLURM_PROCID of the daemon that started it, so MPI goes first.
_NUMBERING = (
    _Numbering(name="Open MPI", sizes=("OMPI_COMM_WORLD_SIZE",), rank="OMPI_COMM_WORLD_RANK", command="mpirun"),
    _Numbering(name="MPI", sizes=("PMI_SIZE",), rank="PMI_RANK", command="mpiexec"),
    _Numbering(name="Slurm", sizes=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), rank="SLURM_PROCID", command="srun"),
)
# These start one process per machine; each is to start that machine's ranks.
_COUNTING = ("PET_NNODES", "PET_NPROC_PER_NODE", "SKYPILOT_NUM_NODES", "DSTACK_NODES_NUM")
# These number processes and do not say how many there are.
_NUMBERING_ONLY = ("PMIX_RANK", "JOB_COMPLETION_INDEX")
_REMEDY = (
    "start the ranks with `torchrun` or `syncline run` on each machine, or set RANK, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT for each; WORLD_SIZE=1 if this process is to train alone"
)


def find_place(values: Mapping[str, str]) -> Place:
    """Return the process's place; :class:`ConfigurationError` names the variable that is wrong or leaves it open."""
    if values.get("WORLD_SIZE"):
        return _given_place(values)
    for launcher in _NUMBERING:
        place = _place_of(launcher, values)
        if place is not None and place.world_size > 1:
            return place
    for name in _COUNTING:
        if values.get(name) not in (None, "", "1", "1:1"):
            raise ConfigurationError(f"{name} is {values[name]!r}, but WORLD_SIZE is not set; {_REMEDY}")
    is_counted = any(values.get(name) for launcher in _NUMBERING for name in launcher.sizes)
    for name in _NUMBERING_ONLY:
        if values.get(name) and not is_counted:
            raise ConfigurationError(
                f"{name} is {values[name]!r}, so this may be one process of several, but WORLD_SIZE is not set; "
                f"{_REMEDY}"
            )
    return _checked(Place(rank=whole_number(values, "RANK", 0), world_size=1, source="WORLD_SIZE"), "RANK")


def whole_number(values: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in a variable, ``default`` if it is absent."""
    text = values.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a whole number, not {text!r}") from None


def _given_place(values: Mapping[str, str]) -> Place:
    """Take WORLD_SIZE's word; without RANK, a launcher's number if it starts as many: scripts export the size alone."""
    world_size = whole_number(values, "WORLD_SIZE", 1)
    if values.get("RANK") or world_size == 1:
        rank = whole_number(values, "RANK", 0)
        return _checked(Place(rank=rank, world_size=world_size, source="WORLD_SIZE"), "RANK")
    for launcher in _NUMBERING:
        place = _place_of(launcher, values)
        if place is not None and place.world_size == world_size:
            return place
    raise ConfigurationError(f"WORLD_SIZE is {world_size}, but RANK is not set; {_REMEDY}")


def _place_of(launcher: _Numbering, values: Mapping[str, str]) -> Place | None:
    """Return what ``launcher`` says, None if it did not start this process."""
    source = next((name for name in launcher.sizes if values.get(name)), None)
    if source is None:
        return None
    world_size = whole_number(values, source, 1)
    if world_size > 1 and not values.get(launcher.rank):
        raise ConfigurationError(
            f"{source} is {world_size}, but {launcher.rank} is not set, so {launcher.name} did not start this process "
            f"as one of them; start it with {launcher.command}, or {_REMEDY}"
        )
    rank = whole_number(values, launcher.rank, 0) if world_size > 1 else 0
    return _checked(Place(rank=rank, world_size=world_size, source=source), launcher.rank)


def _checked(place: Place, name: str) -> Place:
    if not 0 <= place.rank < place.world_size:
        raise ConfigurationError(
            f"{name} must be from 0 to {place.source} - 1, but they are {place.rank} and {place.world_size}; "
            "start the ranks with `syncline run` or torchrun"
        )
    return place
