"""Rounds: every method in turns, with a barrier before each, and the time of the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

Timed = Callable[[], float]
"""Does the work once and returns the seconds that this rank needed."""


def measure_rounds(methods: Mapping[str, Timed], *, num_rounds: int, num_warm_ups: int) -> dict[str, tuple[float, ...]]:
    """Return, for each method, the slowest rank's seconds in each round; the warm-ups do not count.

    The methods take turns within each round, so that whatever else the machine does befalls them alike. The ranks tell
    each other their times when all is over.
    """
    own = torch.zeros(len(methods), num_rounds, dtype=torch.float64)
    for turn in range(num_warm_ups + num_rounds):
        for number, run in enumerate(methods.values()):
            dist.barrier()
            seconds = run()
            if turn >= num_warm_ups:
                own[number, turn - num_warm_ups] = seconds
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return {name: tuple(own[number].tolist()) for number, name in enumerate(methods)}
