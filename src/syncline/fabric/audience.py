"""Who hears of a fabric's events: its one listener, who is told later of what happened before it came."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from syncline.fabric.callbacks import call_back
from syncline.fabric.protocol import FabricListener

Event = Callable[[FabricListener], None]


class Audience:
    """Tells the listener, or keeps what there is to tell; a listener's mistake breaks nothing here."""

    def __init__(self) -> None:
        self._listener: FabricListener | None = None
        self._backlog: list[Event] = []

    def seat(self, listener: FabricListener) -> None:
        """Tell ``listener`` from now on; what happened before is told at once."""
        self._listener = listener
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.tell(event)

    def tell(self, event: Event) -> None:
        """Tell an event, at once or when somebody is there."""
        if self._listener is None:
            self._backlog.append(event)
        else:
            call_back(partial(event, self._listener))
