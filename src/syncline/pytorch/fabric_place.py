"""Where a fleet makes its calls: it moves to another fabric when the job grows."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.members import Epoch
from syncline.runtime import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricPlace:
    """Where a fleet makes its calls."""

    base: Communicator
    communicator: Communicator
    epoch: Epoch
    numbers: tuple[int, ...]
    next_stream: int = 1

    def abort(self) -> None:
        """Leave it at once."""
        if self.communicator is not self.base:
            self.communicator.abort()
        self.base.abort()

    def close(self) -> None:
        """Leave it in good order, if its ranks do so too."""
        if self.communicator is not self.base:
            self.communicator.close()
        self.base.close()
