"""Whether memory is flat: what a process holds late in its life is not more than what it held early, but for a bound.

Early is after a warm-up, in which modules are imported, buffers are made and caches filled. One value that is large,
or small, decides nothing: compared are medians.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Sequence
from pathlib import Path
from statistics import median

WARM_STEPS = 60
LEAST_SAMPLES = 9
"""With fewer, of a job that was short, nothing is judged."""
MOST_GROWTH_KIB = 16 << 10
"""Of a rank, which holds some 0.5 MiB of parameters, momenta and gradients: a copy of them in twenty steps shows.

Ranks of jobs that lose and gain nine others come to 13 MiB, ever more slowly: caches for each fabric, and what is free
between blocks that are not.
"""


def growth_kib(samples: Sequence[int]) -> int | None:
    """Return by how much the last third of equally distant samples exceeds the first; None for too few of them.

    >>> growth_kib([100, 100, 400, 100, 100, 100, 110, 110, 110])
    10
    """
    if len(samples) < LEAST_SAMPLES:
        return None
    third = len(samples) // 3
    return round(median(samples[-third:]) - median(samples[:third]))


def rss_kib() -> int:
    """Return how much memory this process has; what is free is given back before."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024
