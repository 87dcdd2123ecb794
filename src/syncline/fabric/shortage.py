"""How long this process was ready to run, and had no processor: the kernel counts that for each thread (schedstat)."""

from __future__ import annotations

import contextlib
from pathlib import Path

_TASKS = Path("/proc/self/task")


class ProcessorShortage:
    """Sums, from one look to the next, what the thread lacked that lacked most; 0 where the kernel does not count it.

    >>> ProcessorShortage().seconds() >= 0
    True
    """

    def __init__(self) -> None:
        self._seen_ns: dict[str, int] | None = None
        self._total_ns = 0

    def seconds(self) -> float:
        """Return the sum from the first look until now; at most the time that has passed."""
        now_ns = self._read_ns()
        if self._seen_ns is not None:
            lacked_ns = (ns - self._seen_ns.get(thread, 0) for thread, ns in now_ns.items())
            self._total_ns += max(lacked_ns, default=0)
        self._seen_ns = now_ns
        return self._total_ns / 1e9

    @staticmethod
    def _read_ns() -> dict[str, int]:
        found = {}
        with contextlib.suppress(OSError):
            for task in _TASKS.iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended; another system
                    found[task.name] = int((task / "schedstat").read_text().split()[1])
        return found
