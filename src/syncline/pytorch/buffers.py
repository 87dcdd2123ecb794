"""Buffers such as BatchNorm's running statistics: every rank goes on with those of rank 0, as in DDP.

Rank 0's buffers travel at the end of each step, so that ranks evaluate with the same ones, and again before the first
forward pass of the next step, if they were written in between: as in DDP, what rank 0's program writes there reaches
all. That second message is one byte where nothing was written. Rank 0 never waits. What a layer computes *within* a
forward pass, such as BatchNorm's batch statistics, stays each rank's own.
"""

from __future__ import annotations

import torch
from torch import nn

from syncline.pytorch.packing import pack, unpack
from syncline.runtime.work import Work
from syncline.updates.control import ControlStream


class BufferBroadcast:
    """Keeps the buffers of a model equal on all ranks; ``control`` is a stream that nothing else uses.

    ``root`` stands in for rank 0 where that makes no forward passes.
    """

    def __init__(self, model: nn.Module, control: ControlStream, *, is_enabled: bool, root: int = 0) -> None:
        self._model = model
        self._control = control
        self._is_enabled = is_enabled and not control.is_alone
        self._first_root = control.members[root]
        self._last: torch.Tensor | None = None
        """What rank 0 has sent last."""
        self._pending: tuple[Work, torch.Tensor, bool] | None = None
        """What is on its way, and whether from this rank."""
        self._is_due = True

    @property
    def _root(self) -> int:
        """The rank whose buffers count: in an elastic job the first that is left, if it was lost."""
        members = self._control.members
        return members.index(self._first_root) if self._first_root in members else 0

    @property
    def _is_root(self) -> bool:
        return self._control.rank == self._root

    def begin_forward(self) -> None:
        """Take over what rank 0 has written since the last step; once for each step, every rank in its own time."""
        if not self._is_due:
            return
        self._is_due = False
        buffers = self._buffers()
        if not buffers:
            return
        self.finish()
        is_root = self._is_root
        is_new = is_root and (self._last is None or not torch.equal(pack(buffers), self._last))
        flag = torch.tensor([is_new], dtype=torch.uint8)
        work = self._control.start_broadcast(flag, "whether buffers were written", root=self._root)
        if not is_root:
            work.wait()
        if flag[0]:
            self._start(buffers)
            self.finish()
        elif not is_root and self._last is not None:
            unpack(self._last, buffers)  # over what this rank's program alone has written

    def end_step(self) -> None:
        """Send rank 0's buffers on their way."""
        self.begin_forward()
        self._is_due = True
        buffers = self._buffers()
        if buffers:
            self.finish()
            self._start(buffers)

    def finish(self) -> None:
        """Take over what is on its way; waits for it."""
        if self._pending is None:
            return
        work, packed, is_root = self._pending
        if is_root:
            return
        self._pending = None
        work.wait()
        self._last = packed
        unpack(packed, list(self._model.buffers()))

    def drain(self) -> None:
        """Wait until rank 0's last message has left too, before the fleet closes."""
        if self._pending is not None:
            self._pending[0].wait()

    def _start(self, buffers: list[torch.Tensor]) -> None:
        packed = pack(buffers)  # also elsewhere: who sends them may be lost before anybody has them
        is_root = self._is_root
        if is_root:
            self._last = packed
        self._pending = self._control.start_broadcast(packed, "buffers", root=self._root), packed, is_root

    def _buffers(self) -> list[torch.Tensor]:
        return list(self._model.buffers()) if self._is_enabled else []
