"""Notices: what a machine tells its processes that is about to be taken away, taken down for the end of the step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from enum import IntEnum
from types import FrameType
from typing import Any, Literal

from syncline.errors import ConfigurationError

OnPreemption = Literal["leave", "checkpoint"]
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class Notice(IntEnum):
    """What a rank tells the others in a step's report."""

    NONE = 0
    LEAVE = 1
    CHECKPOINT = 2


class Preemption:
    """Takes note of this process's signals, from :meth:`begin` until :meth:`close`; ``wish`` is what to do then."""

    def __init__(self, wish: Notice) -> None:
        self.wish = wish
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def notice(self) -> Notice:
        """What to tell the others now."""
        return Notice.NONE if self.received is None else self.wish

    def begin(self) -> None:
        """Handle the signals; only the main thread can. A second one is handled as if there were nothing here."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "on_preemption= handles signals, which Python allows in the main thread alone; call syncline.init() "
                "there, or leave it out"
            )
        self._before = {number: signal.signal(number, self.receive) for number in SIGNALS}

    def close(self) -> None:
        """Put back what handled the signals before."""
        before, self._before = self._before, {}
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)

    def receive(self, number: int, _: FrameType | None = None) -> None:
        """Take note of a signal: its handler."""
        if self.received is None:
            self.received = signal.Signals(number)
        else:
            signal.signal(number, self._before.get(signal.Signals(number), signal.SIG_DFL))
            os.kill(os.getpid(), number)


def leaving_of(notices: Mapping[int, Notice]) -> int | None:
    """Return which rank leaves at the end of a step of which all have these ``notices``; None where all stay or end."""
    leaving = sorted(rank for rank, notice in notices.items() if notice is Notice.LEAVE)
    is_end = Notice.CHECKPOINT in notices.values() or len(leaving) == len(notices)
    return None if is_end or not leaving else leaving[0]
