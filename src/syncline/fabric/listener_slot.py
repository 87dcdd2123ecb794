"""Who hears of a fabric's events: its one listener, who is told later of what happened before it came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from syncline.fabric.callbacks import call_back
from syncline.fabric.protocol import FabricListener

MAX_BACKLOG_BYTES = 16 << 20
"""Control messages of one peer that are kept until somebody listens: a start may take its time."""
COST_BYTES = 256
"""What keeping a message costs beside its bytes."""

Event = Callable[[FabricListener], None]


class ListenerSlot:
    """Tells the listener, or keeps what there is to tell; a listener's mistake breaks nothing here."""

    def __init__(self) -> None:
        self._listener: FabricListener | None = None
        self._backlog: list[Event] = []
        self._backlog_bytes: Counter[int] = Counter()

    def listen(self, listener: FabricListener) -> None:
        """Tell ``listener`` from now on; what happened before is told at once."""
        self._listener = listener
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.tell(event)

    def has_room(self, peer: int, num_bytes: int) -> bool:
        """Whether a message of ``peer`` may be told; False if nobody listens and too much of it is kept already."""
        if self._listener is not None:
            return True
        self._backlog_bytes[peer] += num_bytes + COST_BYTES
        return self._backlog_bytes[peer] <= MAX_BACKLOG_BYTES

    def tell(self, event: Event) -> None:
        """Tell an event, at once or when somebody is there."""
        if self._listener is None:
            self._backlog.append(event)
        else:
            call_back(partial(event, self._listener))
