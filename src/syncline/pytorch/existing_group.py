"""A process group that exists before ``init()``: Ray has made one when user code begins, and so have many scripts.

Its ranks and its store are those of the job. It has been proved by meeting once, so it counts where launchers say
nothing; where they say something else, or the caller does, two parts of one process would train as different ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import distributed as dist

from syncline.errors import ConfigurationError
from syncline.updates.private_torch import default_store


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """This process's place in the default process group."""

    rank: int
    world_size: int
    address: str | None
    """The host that serves the group's store; None if the store is a file, or in memory."""


def find_group() -> GroupPlace | None:
    """Return the place in the default process group; None if there is no such group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return GroupPlace(rank=dist.get_rank(), world_size=dist.get_world_size(), address=_address_of(default_store()))


def check_same(group: GroupPlace, values: Mapping[str, str], *, rank: int | None, world_size: int | None) -> None:
    """Raise :class:`ConfigurationError` if the arguments, or else RANK and WORLD_SIZE, are not those of the group.

    Slurm's and MPI's variables are not compared: what starts Ray leaves them to all that Ray starts.
    """
    pairs = (
        ("rank", "RANK", rank, group.rank),
        ("world_size", "WORLD_SIZE", world_size, group.world_size),
    )
    for argument, variable, given, of_group in pairs:
        said = f"init({argument}={given})" if given is not None else f"{variable}={values.get(variable)}"
        found = str(given) if given is not None else values.get(variable) or str(of_group)
        if found.strip() != str(of_group):
            raise ConfigurationError(
                f"{said}, but this process is rank {group.rank} of {group.world_size} in the process group of "
                "torch.distributed that exists already; leave the argument or the variable out, or call "
                "torch.distributed.destroy_process_group() before syncline.init()"
            )


def _address_of(store: Any) -> str | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
