"""An accelerator for benchmarks where there is none: it computes by waiting, and leaves the processors free.

All ranks of a lab share the processors of one machine. A host whose accelerator computes has its own free meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

import torch

LATE_S = 0.010
"""A host that gives its accelerator nothing for so long has let it idle."""


class Accelerator:
    """Computes by waiting; what it is given while it is busy, it begins when it is free, as an accelerator's queue.

    A host that is woken late (its processor was busy) has not kept an accelerator from going on; a host that waited for
    parameters has.
    """

    def __init__(self) -> None:
        self._free_s = 0.0

    def compute(self, seconds: float, *, had_to_wait: bool = False) -> None:
        """Return when ``seconds`` of computing are over."""
        now_s = time.monotonic()
        is_idle = had_to_wait or now_s - self._free_s > LATE_S
        self._free_s = (now_s if is_idle else self._free_s) + seconds
        time.sleep(max(0.0, self._free_s - time.monotonic()))


ACCELERATOR = Accelerator()


class Timer(torch.autograd.Function):
    """Passes values and gradients through, after a while."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float, had_to_wait: bool) -> torch.Tensor:
        """Compute."""
        ctx.seconds = seconds
        ACCELERATOR.compute(seconds, had_to_wait=had_to_wait)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Compute as long."""
        ACCELERATOR.compute(ctx.seconds)
        return gradient, None, None
