"""The time that the engine lives in: an asyncio loop's, or one that a simulator moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """Something that will happen."""

    def cancel(self) -> None:
        """Let it not happen."""


class Clock(Protocol):
    """What an asyncio loop is to the engine."""

    def time(self) -> float:
        """Return the time in seconds, from any beginning."""

    def call_later(self, delay: float, callback: Callable[..., object], *args: object) -> Timer:
        """Call ``callback(*args)`` after ``delay`` seconds."""
