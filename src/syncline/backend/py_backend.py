"""The shell for PyTorch 2.14 and later: a ``Backend`` written in Python, beside others in one group.

Untested: the library's own tests run with older versions, where that cannot be done. It follows PyTorch's own test of
such backends, and everything but a few names is shared with the shell that is tested.
"""

from __future__ import annotations

from typing import Any

from syncline.backend.calls import GroupCalls
from syncline.backend.group_state import GroupState
from syncline.backend.name import NAME
from syncline.updates.private_torch import backend_class

_Backend: Any = backend_class() or object


class SynclineBackend(GroupCalls, _Backend):  # type: ignore[misc]  # no version that is known here has it
    """One rank's part in a group, as ``cpu:syncline,cuda:nccl`` makes it for the devices that it was named for."""

    def __init__(self, state: GroupState) -> None:
        communicator = state.communicator
        super().__init__(communicator.rank, communicator.world_size)
        self.state = state

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's own name
        """Return the name that the backend is registered by."""
        return NAME

    @property
    def supports_splitting(self) -> bool:
        """Groups of some ranks are made by ``new_group()``."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Calls that are made together need no marks around them."""
        return False

    start_coalescing = GroupCalls._start_coalescing
    end_coalescing = GroupCalls._end_coalescing
