"""Buffers such as BatchNorm's running statistics: every rank goes on with those of rank 0, as in DDP.

Rank 0's buffers travel when ``step()`` is called and are taken over before the next forward pass, so nobody waits for
them. What a layer computes *within* a forward pass, such as BatchNorm's batch statistics, stays each rank's own.
"""

from __future__ import annotations

import torch
from torch import nn

from syncline.pytorch.packing import num_bytes, pack, unpack
from syncline.runtime.work import Work
from syncline.updates.control import ControlStream


class BufferBroadcast:
    """Keeps the buffers of a model equal on all ranks."""

    def __init__(self, model: nn.Module, control: ControlStream, *, is_enabled: bool) -> None:
        self._model = model
        self._control = control
        self._is_enabled = is_enabled and control.world_size > 1
        self._pending: tuple[Work, torch.Tensor] | None = None

    def start(self) -> None:
        """Send rank 0's buffers on their way."""
        buffers = list(self._model.buffers()) if self._is_enabled else []
        if not buffers:
            return
        self.finish()
        is_root = self._control.rank == 0
        packed = pack(buffers) if is_root else torch.empty(num_bytes(buffers), dtype=torch.uint8)
        self._pending = (self._control.start_broadcast(packed, "buffers"), packed)

    def finish(self) -> None:
        """Take over what has arrived; waits for it."""
        if self._pending is None:
            return
        (work, packed), self._pending = self._pending, None
        work.wait()
        if self._control.rank != 0:
            unpack(packed, list(self._model.buffers()))
