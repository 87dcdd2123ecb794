"""Buffers such as BatchNorm's running statistics: every rank goes on with those of rank 0, as in DDP.

Rank 0's buffers travel at the end of each step, so that ranks evaluate with the same ones, and again before the first
forward pass of the next step, if they were written in between: as in DDP, what rank 0's program writes there reaches
all. That second message is one byte where nothing was written. Rank 0 never waits. What a layer computes *within* a
forward pass, such as BatchNorm's batch statistics, stays each rank's own.

DDP makes buffers equal before each forward pass that follows one with gradients, outside ``no_sync()``; here that is
done only where a pass changed what the next one may read (a running mean that inputs are normalised by, a codebook).
All others may make as many passes in a step as they like, on each rank: BatchNorm in training mode reads no buffer.
Where passes change buffers by chance, rank 0 decides: once it has sent them so, it tells in each step that it goes on.
"""

from __future__ import annotations

import torch
from torch import nn

from syncline.runtime.work import Work
from syncline.tensors.memory import pack, unpack
from syncline.updates.control import ControlStream

ARE_NEW, ARE_READ = 1, 2
"""What rank 0 tells before buffers: that it has others than before, and that forward passes read what others write."""
WRITE_IN_TRAINING = frozenset(
    {
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    }
)
"""Modules of these classes, but not of classes made of them, read their buffers in eval mode alone."""


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
        self._is_due_again = self._are_read = False

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
        if self._is_due:
            self._is_due = False
            self._make_equal()

    def begin_again(self) -> None:
        """Take over what rank 0's last forward pass of this step wrote, if the next may read that; on every rank."""
        if not self._is_due and self._is_due_again and (self._are_read or self._were_written()):
            self._are_read = True
            self._make_equal()

    def end_forward(self, *, is_synchronised: bool) -> None:
        """Note whether buffers are to be equal before the next forward pass, as after this one in DDP."""
        self._is_due_again = is_synchronised

    def _were_written(self) -> bool:
        """Whether buffers that a forward pass may read are others than rank 0 has sent last."""
        unread = {
            id(buffer)
            for module in self._model.modules()
            if type(module) in WRITE_IN_TRAINING and module.training
            for buffer in module.buffers(recurse=False)
        }
        last, start = self._last, 0
        if last is None:
            return False
        for buffer in self._buffers():
            stop = start + buffer.numel() * buffer.element_size()
            if id(buffer) not in unread and not torch.equal(pack([buffer]), last[start:stop]):
                return True
            start = stop
        return False

    def _make_equal(self) -> None:
        buffers = self._buffers()
        if not buffers:
            return
        self.finish()
        is_root = self._is_root
        is_new = is_root and (self._last is None or not torch.equal(pack(buffers), self._last))
        flag = torch.tensor([ARE_NEW * is_new + ARE_READ * self._are_read], dtype=torch.uint8)
        work = self._control.start_broadcast(flag, "whether buffers were written", root=self._root)
        if not is_root:
            work.wait()
        told = int(flag)
        self._are_read = bool(told & ARE_READ)
        if told & ARE_NEW:
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
