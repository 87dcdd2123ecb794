"""The shell for PyTorch 2.14 and later: a ``Backend`` written in Python, beside others in one group.

Untested: the library's own tests run with older versions, where there is no ``PyBackend``; it is written against its
declaration, and everything but the names is shared with the shell that is tested.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from syncline.backend.calls import GroupCalls
from syncline.backend.group_state import GroupState
from syncline.backend.name import NAME

_PyBackend: Any = getattr(dist, "PyBackend", object)


class SynclineBackend(GroupCalls, _PyBackend):  # type: ignore[misc]  # no version that is known here has it
    """One rank's part in a group, as ``cpu:syncline,cuda:nccl`` makes it for the devices that it was named for."""

    supports_coalescing = False
    supports_splitting = False

    def __init__(self, state: GroupState) -> None:
        communicator = state.communicator
        super().__init__(communicator.rank, communicator.world_size)
        self.state = state

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's own name
        """Return the name that the backend is registered by."""
        return NAME

    def setTimeout(self, timeout: timedelta) -> None:  # noqa: N802 - as above
        """Let each later call that names no timeout of its own take at most this long."""
        self.set_timeout(timeout)
