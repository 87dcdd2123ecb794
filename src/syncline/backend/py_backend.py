"""The shell for groups of several backends: a ``Backend`` written in Python, which PyTorch takes from 2.14 on.

All but a few names is shared with the shell of groups that are Syncline's alone. C++ stands between callers and works
here, and hands out ``wait()`` and ``get_future()`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from syncline.backend import NAME
from syncline.backend.calls import GroupCalls
from syncline.backend.group_state import GroupState, open_part
from syncline.updates.private_torch import backend_class

_Backend: Any = backend_class() or object


class SynclineBackend(GroupCalls, _Backend):  # type: ignore[misc]  # mypy sees a version without it
    """One rank's part in a group, as ``cpu:syncline,cuda:nccl`` makes it for the devices that it was named for."""

    is_dispatched = True

    def __init__(self, state: GroupState) -> None:
        communicator = state.communicator
        super().__init__(communicator.rank, communicator.world_size)
        self.state = state

    @property
    def supports_splitting(self) -> bool:
        """A mesh splits its group, where that was made with ``device_id=``."""
        return True

    @property
    def options(self) -> Any:
        """What PyTorch copies for :meth:`split`."""
        return _Backend.Options(NAME, timeout=timedelta(seconds=self.state.timeout_s))

    def split(self, store: Any, ranks: Sequence[int], options: Any) -> SynclineBackend | None:
        """Return the part of this group that has ``ranks`` of it, on the same connections; None on other ranks."""
        if self.state.communicator.rank not in ranks:
            return None
        members = self.state.communicator.members
        timeout_s = options._timeout.total_seconds()
        return SynclineBackend(open_part(self.state.world, [members[rank] for rank in ranks], store, timeout_s))

    def eager_connect_single_device(self, device: Any) -> None:
        """Do nothing: the ranks are connected."""

    def perform_nocolor_split(self, device: Any) -> None:
        """Do nothing: who is not in a new group has no part in making it."""

    @property
    def supports_coalescing(self) -> bool:
        """Calls that are made together need no marks around them."""
        return False

    allreduce_sparse = GroupCalls.allreduce
    start_coalescing = GroupCalls._start_coalescing
    end_coalescing = GroupCalls._end_coalescing
