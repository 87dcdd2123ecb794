"""Sums that several threads add to: seconds waited per phase, calls and bytes per collective."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType


class Counters:
    """Named running sums; any thread may add, and :meth:`statistics` gives a frozen copy.

    >>> counters = Counters()
    >>> counters.add("waited_s", 0.5); counters.add("waited_s", 0.25)
    >>> dict(counters.statistics())
    {'waited_s': 0.75}
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: float) -> None:
        """Add ``amount`` to the sum called ``name``."""
        with self._lock:
            self._sums[name] = self._sums.get(name, 0) + amount

    def statistics(self) -> Mapping[str, float]:
        """All sums as they are now."""
        with self._lock:
            return MappingProxyType(dict(self._sums))
