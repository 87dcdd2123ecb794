"""How a group of some ranks of a world comes about: on the world's connections, by its members alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncline.backend.group_state import GroupState


def open_part(world: GroupState, ranks: Sequence[int], store: Any, timeout_s: float) -> GroupState:
    """Return what is behind a group of some ranks of a world; they alone call it."""
    assert world.streams is not None, "a world gives out streams"
    own = world.communicator
    streams = world.streams.take(ranks, rank=own.rank, timeout_s=timeout_s, is_lost=own.is_lost)
    communicator = own.open_group(ranks, streams=streams)
    communicator.timeout_s = timeout_s
    try:
        communicator.open_segment(is_wanted=world.uses_shared_memory)
    except BaseException:
        communicator.abort()
        raise
    return GroupState(
        communicator,
        message_stream=streams[-1],
        staging_stream=streams[-2],
        timeout_s=timeout_s,
        store=store,
        world=world,
    )


def split_state(state: GroupState, ranks: Sequence[int], store: Any, timeout_s: float) -> GroupState:
    """Return what is behind a group of some ranks of a group, numbered as in that; they alone call it."""
    members = state.communicator.members
    return open_part(state.world, [members[rank] for rank in ranks], store, timeout_s)
