"""The shell for groups that are Syncline's alone, and for all before PyTorch 2.14: a whole ``ProcessGroup``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from syncline.backend.calls import GroupCalls
from syncline.backend.group_state import GroupState
from syncline.backend.name import NAME
from syncline.updates.private_torch import failing_backend


class SynclineProcessGroup(GroupCalls, dist.ProcessGroup):  # type: ignore[misc]  # the binding types nothing
    """One rank's part in a group, made by ``init_process_group("syncline")`` and ``new_group()``.

    Raises, in a call: :class:`MismatchError` on all ranks if their calls differ, :class:`PeerLostError` if a rank is
    lost, :class:`DeadlineError` at the timeout, :class:`ConfigurationError` for what it cannot take.
    """

    def __init__(self, state: GroupState) -> None:
        communicator = state.communicator
        super().__init__(communicator.rank, communicator.world_size)  # type: ignore[call-arg]  # one for subclasses
        self.state = state
        self._name = self._description = ""
        # A mesh asks the group for a backend of each device; the calls come to the group itself.
        kind = dist.ProcessGroup.BackendType.CUSTOM
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            self._register_backend(torch.device(device), kind, failing_backend(self.rank(), self.size()))

    def __repr__(self) -> str:
        return f"<SynclineProcessGroup {self._name!r}: {self.state.communicator!r}>"

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's own name
        """Return the name that the backend is registered by."""
        return NAME

    def getRank(self) -> int:  # noqa: N802 - as above
        """Return this process's rank in the group."""
        return self.state.communicator.rank

    def getSize(self) -> int:  # noqa: N802 - as above
        """Return the number of ranks of the group."""
        return self.state.communicator.world_size

    def setGroupName(self, name: str) -> None:  # noqa: N802 - as above
        """Take the name by which functional collectives find the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - as above
        """Return the name by which functional collectives find the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - as above
        """Take the user's description."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - as above
        """Return the user's description."""
        return self._description
