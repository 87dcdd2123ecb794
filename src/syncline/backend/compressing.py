"""``syncline.compress_group()``: codes for a group of ``torch.distributed``, so for DDP and FSDP2 on it."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from syncline.arguments import checked
from syncline.backend.creation import state_of
from syncline.backend.group_state import GroupState
from syncline.errors import CheckpointError, ConfigurationError
from syncline.updates.compression import Compress

_NO_STATE = (
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.PickleError,
    struct.error,
)
"""What :func:`torch.load` raises for bytes that it did not write, as random ones have shown."""


class GroupCodec:
    """What :func:`compress_group` returns: gives a checkpoint what codes of this rank lack, and takes it back.

    A state as :func:`torch.distributed.checkpoint.save` and ``load`` take it. It is each rank's own, under a key with
    its number in the group; with :func:`torch.save` each rank writes its own file. Without it the first sums after a
    start lack what the last ones before it had left over.

    >>> torch.distributed.init_process_group("syncline", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> codec = syncline.compress_group("int8")
    >>> state = {"model": torch.nn.Linear(2, 2).state_dict(), "codec": codec.state_dict()}
    >>> codec.load_state_dict(state["codec"])
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, state: GroupState) -> None:
        self._state = state

    def __repr__(self) -> str:
        return f"<GroupCodec of rank {self._state.communicator.rank}: {'off' if self._state.coded is None else 'on'}>"

    def state_dict(self) -> dict[str, bytes]:
        """Return what codes lack, between two steps; waits for sums that are under way."""
        buffer, reductions = io.BytesIO(), self._state.coded
        torch.save({} if reductions is None else reductions.state(), buffer)
        return {self._key: buffer.getvalue()}

    @checked
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take it back, before the next step; on other sites or other ranks codes begin anew, as they do without it.

        Raises :class:`CheckpointError` for what is no such state.
        """
        reductions, saved = self._state.coded, state_dict.get(self._key)
        try:
            found = {} if saved is None else torch.load(io.BytesIO(saved), weights_only=True)
            if reductions is not None:
                reductions.load_state(found)
        except _NO_STATE as error:
            raise CheckpointError(
                f"This is no state of a group's codes: {error}; give what GroupCodec.state_dict() returned"
            ) from error

    @property
    def _key(self) -> str:
        return f"rank{self._state.communicator.rank}"


@checked
def compress_group(compress: Compress = "int8", group: dist.ProcessGroup | None = None) -> GroupCodec:
    """Let large sums of float32 of a process group of Syncline's cross slow links in codes from now on.

    That is gradients: ``all_reduce`` of one tensor (DDP's), and ``reduce_scatter_tensor`` (FSDP2's), of at least
    16,384 elements, with SUM or AVG; all else moves as it is. ``compress`` is as in :class:`AllReduce`; ``"off"``
    ends it. ``group`` is the default group if it is None; its timeout holds, and not that of a single call. On a GPU,
    gradients are copied to the host's memory at once, and are not sent in pieces.

    What codes lack is added to the same call of the next step. Save the :class:`GroupCodec` that is returned with the
    model, and a job that is resumed by as many ranks on the same sites takes the very steps of one that went on. With
    DDP that holds if it keeps its buckets from the first step on (``find_unused_parameters=True``, or one bucket):
    those that it makes anew in its first step after a start are other sums.

    Every rank of the group calls it alike, between two steps. Raises :class:`ConfigurationError` for a group of another
    backend, for a topology with gateways, and on all ranks where they wish for different codes.

    >>> torch.distributed.init_process_group("syncline", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> codec = syncline.compress_group("int8")
    >>> torch.distributed.destroy_process_group()
    """
    chosen = dist.group.WORLD if group is None else group
    state = None if chosen is None else state_of(chosen)
    if state is None:
        raise ConfigurationError(
            f"compress_group() wants a process group of Syncline's, not {chosen!r}; make one with "
            'torch.distributed.init_process_group("syncline")'
        )
    if state.communicator.topology.gateways:
        raise ConfigurationError(
            "compress_group() does not go with gateways, as each rank sends codes to other sites itself; leave gateway "
            "out of the topology"
        )
    state.compress(compress)
    return GroupCodec(state)
