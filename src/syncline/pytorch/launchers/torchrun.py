"""torchrun, and whatever sets the same variables: ``syncline run``, Ray Train, a user's own script."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.endpoints import without_brackets
from syncline.pytorch.launchers.place import Place, check_place, optional_number, whole_number


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
