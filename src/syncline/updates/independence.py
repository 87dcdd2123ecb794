"""Whether an optimizer treats each parameter by itself, found out by letting it step small matrices.

One that looks at all of its parameters (clips by their common norm, adapts one rate to all) would, given the parameters
that a rank owns, step otherwise on each rank and not as one process does, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import optim

_SHAPE = (4, 3)
_SIZES = (1e-3, 1e3)
"""How large gradients are: a common norm is often looked at only beyond a limit."""
_NUM_STEPS = 2

Make = Callable[[Sequence[torch.nn.Parameter]], optim.Optimizer]


def why_not_independent(make: Make) -> str | None:
    """Say why an optimizer that ``make`` makes for parameters cannot step some of them by itself; None if it can."""
    try:
        with torch.random.fork_rng(devices=()), torch.enable_grad():
            alone = _stepped(make, num_others=0)
            among_others = _stepped(make, num_others=2)
    except Exception as error:
        return f"its step() on two matrices raised {type(error).__name__}: {error}"
    if torch.equal(alone, among_others):
        return None
    return "what it makes of a parameter depends on the other parameters that it was given"


def _stepped(make: Make, *, num_others: int) -> torch.Tensor:
    """Return what a few steps, with gradients of every size, make of one matrix."""
    values = []
    for size in _SIZES:
        draw = torch.Generator().manual_seed(1)
        parameters = [torch.nn.Parameter(torch.randn(_SHAPE, generator=draw)) for _ in range(1 + num_others)]
        optimizer = make(parameters)
        for step in range(_NUM_STEPS):
            for number, parameter in enumerate(parameters):
                draw = torch.Generator().manual_seed(10 * step + number)
                parameter.grad = torch.randn(_SHAPE, generator=draw) * size
            torch.manual_seed(step)
            optimizer.step()
        values.append(parameters[0].detach())
    return torch.stack(values)
