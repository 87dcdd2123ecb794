"""``syncline.compress_group()``: codes for a group of ``torch.distributed``, so for DDP and FSDP2 on it."""

from __future__ import annotations

import torch.distributed as dist

from syncline.arguments import checked
from syncline.backend.creation import state_of
from syncline.errors import ConfigurationError
from syncline.updates.compression import Compress


@checked
def compress_group(compress: Compress = "int8", group: dist.ProcessGroup | None = None) -> None:
    """Let large sums of float32 of a process group of Syncline's cross slow links in codes from now on.

    That is gradients: ``all_reduce`` of one tensor (DDP's), and ``reduce_scatter_tensor`` (FSDP2's), of at least
    16,384 elements, with SUM or AVG; all else moves as it is. ``compress`` is as in :class:`AllReduce`; ``"off"``
    ends it. ``group`` is the default group if it is None; its timeout holds, and not that of a single call. What
    codes lack is added to the same call of the next step, as long as this process lives: checkpoints of DDP and
    FSDP2 have no place for it. On a GPU, gradients are copied to the host's memory at once, and are not sent in
    pieces.

    Every rank of the group calls it alike, between two steps. Raises :class:`ConfigurationError` for a group of another
    backend, for a topology with gateways, and on all ranks where they wish for different codes.

    >>> torch.distributed.init_process_group("syncline", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> syncline.compress_group("int8")
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
