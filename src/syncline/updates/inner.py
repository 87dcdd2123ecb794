"""Inner optimizers: the user's own optimizer class, made anew for the elements that this rank owns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import optim

from syncline.errors import UpdateError

ELEMENTWISE: frozenset[type[optim.Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.Adagrad,
        optim.Adadelta,
        optim.ASGD,
    }
)
"""Optimizers whose new element depends on that element's gradient and state alone: they may step on any piece."""


def check_is_served(optimizer: optim.Optimizer) -> None:
    """Raise :class:`UpdateError` if ``AllReduce`` alone can serve ``optimizer``."""
    if isinstance(optimizer, optim.LBFGS):
        raise UpdateError(
            "LBFGS evaluates the model inside step(), for which every rank needs all gradients; use "
            "update=AllReduce(), or another optimizer"
        )
    if isinstance(optimizer, optim.SparseAdam):
        raise UpdateError(
            "SparseAdam takes sparse gradients alone, which only update=AllReduce() serves; use that, or Adam with "
            "sparse=False"
        )


def check_divisible(optimizer: optim.Optimizer, *, whole_parameters: bool, rule: str = "Sharded") -> None:
    """Raise :class:`UpdateError` if ``optimizer`` cannot step on the pieces that ``rule`` would give it."""
    kind = type(optimizer)
    check_is_served(optimizer)
    is_replaced = kind in ELEMENTWISE and not is_torchs(kind)
    if kind in ELEMENTWISE and not is_replaced:
        return
    if is_replaced and not whole_parameters:
        raise UpdateError(
            f"{kind.__name__}.step was replaced on its class, and {rule}() would give it arbitrary pieces of "
            f'parameters; use {rule}(align="parameter"), where it gets whole ones, or update=AllReduce()'
        )
    if why := why_not_independent(partial(make_inner, optimizer, 0)):
        remedy = "update=AllReduce()" if rule == "Sharded" else "an optimizer that treats each parameter by itself"
        raise UpdateError(
            f"{rule}() gives each rank's optimizer a part of the parameters, which does not suit {kind.__name__}: "
            f"{why}; use {remedy}"
        )
    if not whole_parameters:
        names = ", ".join(sorted(known.__name__ for known in ELEMENTWISE))
        raise UpdateError(
            f"{rule}() gives an optimizer arbitrary pieces of parameters, which {kind.__name__} is not known to "
            f'allow (known: {names}); use {rule}(align="parameter"), where it gets whole parameters'
        )


_HOOKED = optim.Optimizer.profile_hook_step(lambda _: None).__code__


def own_step(kind: type[optim.Optimizer]) -> Any:
    """Return the step of a class without torch's wrapper, which calls hooks."""
    step: Any = kind.step
    while getattr(step, "__code__", None) is _HOOKED:
        step = step.__wrapped__
    return step


def is_torchs(kind: type[optim.Optimizer]) -> bool:
    """Whether its step is one of PyTorch's own, which loops over the groups."""
    home = getattr(own_step(kind), "__globals__", {}).get("__name__", "")  # ``__module__`` is what wrappers copy
    return str(home).startswith("torch.optim")


def step_without_hooks(optimizer: optim.Optimizer) -> None:
    """Step the optimizer of a shard: hooks that users registered are called with their own optimizer, once."""
    own_step(type(optimizer))(optimizer)


def make_inner(optimizer: optim.Optimizer, group: int, pieces: Sequence[torch.nn.Parameter]) -> optim.Optimizer:
    """Return an optimizer of the user's class, with the hyper-parameters of one of its groups, for ``pieces``."""
    kind = type(optimizer)
    options = hyperparameters(optimizer, group)
    accepted = inspect.signature(kind.__init__).parameters
    arguments = {name: value for name, value in options.items() if name in accepted and name in optimizer.defaults}
    try:
        inner: optim.Optimizer = kind(list(pieces), **arguments)
    except (TypeError, ValueError) as error:
        raise UpdateError(
            f"{kind.__name__} cannot be made again for the shard of parameter group {group} with {arguments}: {error}"
        ) from error
    inner.param_groups[0].update(options)
    _copy_settings(optimizer, inner)
    return inner


def _copy_settings(optimizer: optim.Optimizer, inner: optim.Optimizer) -> None:
    """Give ``inner`` what a class of the user's keeps of its arguments beside its groups, in plain values."""
    # a GradScaler's own are of one call of step(), and may be seen while an earlier step is made in another thread
    common = {*vars(optim.SGD([torch.zeros(1)], lr=0.0)), "grad_scale", "found_inf"}
    for name, value in vars(optimizer).items():
        if name not in common and (value is None or isinstance(value, (bool, int, float, str, tuple, torch.dtype))):
            setattr(inner, name, value)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of one of ``optimizer.param_groups``: what it has beside its parameters."""
    return {name: value for name, value in group.items() if name not in {"params", "param_names"}}


def hyperparameters(optimizer: optim.Optimizer, group: int) -> dict[str, Any]:
    """Return a snapshot of a group's hyper-parameters, which later changes by a scheduler do not reach."""
    options = options_of(optimizer.param_groups[group])
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def all_hyperparameters(optimizer: optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Return :func:`hyperparameters` of each group."""
    return tuple(hyperparameters(optimizer, group) for group in range(len(optimizer.param_groups)))


# Whether an optimizer treats each parameter by itself, found out by letting it step small matrices.
#
# One that looks at all of its parameters (clips by their common norm, adapts one rate to all) would, given the
# parameters that a rank owns, step otherwise on each rank and not as one process does, and nothing would show it.

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
