"""Rounds: every method in turns, with a barrier before each, and the time of the slowest rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from syncline.bench.pace import Pace, Tally

Timed = Callable[[], float]
"""Does the work once and returns the seconds that this rank needed."""
NOTEWORTHY_S = 2.0
"""A round that takes longer is told, so that who waits sees that it goes on, and what a broken-off benchmark saw."""


def measure_rounds(methods: Mapping[str, Timed], *, pace: Pace) -> dict[str, tuple[float, ...]]:
    """Return, for each method, the slowest rank's seconds in each round that counts.

    The methods take turns within each round, so that whatever else the machine does befalls them alike. After each the
    ranks tell each other their times, so that all agree on who needs another.
    """
    tallies = {name: Tally(pace) for name in methods}
    while due := [name for name, tally in tallies.items() if tally.wants_more]:
        begin, measured = time.perf_counter(), []
        for name in due:
            dist.barrier()
            start = time.perf_counter()
            measured_s = methods[name]()
            slowest = torch.tensor([measured_s, time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            measured_s, elapsed_s = slowest.tolist()
            tallies[name].add(measured_s, elapsed_s=elapsed_s)
            measured.append(f"{name} {measured_s:.3g} s")
        if dist.get_rank() == 0 and time.perf_counter() - begin > NOTEWORTHY_S:
            print(f"bench: a round: {', '.join(measured)}", file=sys.stderr, flush=True)
    return {name: tuple(tally.seconds) for name, tally in tallies.items()}
