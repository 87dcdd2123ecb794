"""What part of a benchmark's time other machines had the processors of this one, where machines share them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

COUNTED = Path("/proc/stat")
_STEAL = 8
"""Where its first line says it: "cpu user nice system idle iowait irq softirq steal"."""
NOTEWORTHY = 0.02


class StolenTime:
    """Begins to count when it is made; where the kernel does not tell, nothing was stolen."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s, self._before_s = clock(), _stolen_s()

    @property
    def share(self) -> float:
        """What was stolen so far, of the time of all processors."""
        elapsed_s = (self._clock() - self._begun_s) * (os.cpu_count() or 1)
        return (_stolen_s() - self._before_s) / elapsed_s if elapsed_s else 0.0


def _stolen_s() -> float:
    if not COUNTED.exists():
        return 0.0
    ticks = COUNTED.read_text().split("\n", 1)[0].split()
    return int(ticks[_STEAL]) / os.sysconf("SC_CLK_TCK")
