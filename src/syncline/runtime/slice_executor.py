"""What executes the slices of a call: Python on any fabric, or compiled code where the fabric's transport is compiled.

Both do the same, to the bit. What differs is that the engine hears of a compiled execution when it is over, and Python
of none of its slices and messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from syncline.runtime.call import CollectiveCall


class Execution(Protocol):
    """All slices of one call on their way."""

    @property
    def is_over(self) -> bool:
        """Whether every slice has ended."""

    @property
    def has_more(self) -> bool:
        """Whether there are slices that were not begun."""

    def start(self) -> None:
        """Begin as many slices as there is room for; the others follow."""

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""

    def open_peers(self) -> set[int]:
        """Return the ranks that slices under way still have to exchange messages with (-1: none, but work is left)."""


class SliceExecutor(Protocol):
    """Executes the calls of one engine, the most urgent first, a bounded number of bytes at once."""

    @property
    def num_active_slices(self) -> int:
        """Slices under way, now."""

    @property
    def inflight_bytes(self) -> int:
        """Bytes of the slices under way, now."""

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries, in use or kept, now."""

    def open(
        self, call: CollectiveCall, *, number: int, tag: int, signature: int, on_over: Callable[[], None]
    ) -> Execution:
        """Return an execution that has not begun; ``call`` has something to move.

        ``number`` counts the calls of this rank as it made them, over all streams; ``tag`` is the call's first. When
        all slices have ended ``on_over`` is called, once, unless the execution was stopped before.
        """

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived, by the loop's clock; 0 if none did."""
