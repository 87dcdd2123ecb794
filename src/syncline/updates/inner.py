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


NOT_DIVIDED = "update=AllReduce() (or within=AllReduce(), if Sharded() is within another rule)"
"""What helps where the parts that ranks have with ``Sharded()`` do not do; few who raise know whether it is within."""


def check_is_served(optimizer: optim.Optimizer) -> None:
    """Raise :class:`UpdateError` if ``AllReduce`` alone can serve ``optimizer``."""
    if wanted := _wanted_by_step(optimizer):
        raise UpdateError(
            f"{type(optimizer).__name__} evaluates the model inside step({wanted}), for which every rank needs all "
            "gradients; use update=AllReduce(), or another optimizer"
        )
    if isinstance(optimizer, optim.SparseAdam):
        raise UpdateError(
            "SparseAdam takes sparse gradients alone, which only update=AllReduce() serves; use that, or Adam with "
            "sparse=False"
        )


def check_is_real(optimizer: optim.Optimizer, rule: str) -> None:
    """Raise :class:`UpdateError` if parameters are complex, where ``rule`` takes differences of real numbers alone."""
    tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
    found = next((tensor for tensor in tensors if tensor.is_complex()), None)
    if found is not None:
        raise UpdateError(
            f"{rule}() averages real numbers, and a parameter of shape {tuple(found.shape)} is {found.dtype}; use "
            "update=AllReduce() or Sharded(), or keep it as real numbers (torch.view_as_complex() in the model)"
        )


def _wanted_by_step(optimizer: optim.Optimizer) -> str:
    """Name what ``step()`` cannot be called without: a closure, whatever it is called there; empty for nothing."""
    try:
        _self, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError):  # it is written in C, say
        return ""
    several = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return next((one.name for one in parameters if one.default is one.empty and one.kind not in several), "")


def check_divisible(optimizer: optim.Optimizer, *, whole_parameters: bool, rule: str = "Sharded") -> None:
    """Raise :class:`UpdateError` if ``optimizer`` cannot step on the pieces that ``rule`` would give it."""
    kind = type(optimizer)
    check_is_served(optimizer)
    remedy = NOT_DIVIDED if rule == "Sharded" else "an optimizer that treats each parameter by itself"
    is_replaced = kind in ELEMENTWISE and not is_torchs(kind)
    if kind in ELEMENTWISE and not is_replaced:
        return
    if is_replaced and not whole_parameters:
        raise UpdateError(
            f"{kind.__name__}.step was replaced on its class, and {rule}() would give it arbitrary pieces of "
            f'parameters; use {rule}(align="parameter"), where it gets whole ones, or {remedy}'
        )
    if why := why_not_independent(partial(make_inner, optimizer, 0)):
        raise UpdateError(
            f"{rule}() gives each rank's optimizer a part of the parameters, which does not suit {kind.__name__}: "
            f"{why}; use {remedy}"
        )
    if not whole_parameters:
        names = ", ".join(sorted(known.__name__ for known in ELEMENTWISE))
        home = kind.__module__.partition(".")[0]  # others have an AdamW, too
        raise UpdateError(
            f"{rule}() gives an optimizer arbitrary pieces of parameters, which {kind.__name__} of {home} is not known "
            f'to allow (known: {names} of torch); use {rule}(align="parameter"), where it gets whole parameters'
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
# parameters that a rank owns, step otherwise on each rank and not as one process does, and nothing would show it. Nor
# would it where steps count in the group, which is given anew what the user's has before each step.

_SHAPE = (4, 3)
_SIZES = (1e-3, 1e3)
"""How large gradients are: a common norm is often looked at only beyond a limit."""
_NUM_STEPS = 2

Make = Callable[[Sequence[torch.nn.Parameter]], optim.Optimizer]


def why_not_independent(make: Make) -> str | None:
    """Say why an optimizer that ``make`` makes for parameters cannot step some of them by itself; None if it can."""
    try:
        with torch.random.fork_rng(devices=()), torch.enable_grad():
            alone, changed = _stepped(make, num_others=0)
            among_others, _ = _stepped(make, num_others=2)
    except Exception as error:
        return f"its step() on two matrices raised {type(error).__name__}: {error}"
    if changed:
        return f"its step() changes {', '.join(changed)} of its parameter group, which is one for all ranks"
    if torch.equal(alone, among_others):
        return None
    return "what it makes of a parameter depends on the other parameters that it was given"


def _stepped(make: Make, *, num_others: int) -> tuple[torch.Tensor, list[str]]:
    """Return what a few steps, with gradients of every size, make of one matrix; what of their group they change."""
    values, changed = [], set[str]()
    for size in _SIZES:
        draw = torch.Generator().manual_seed(1)
        parameters = [torch.nn.Parameter(torch.randn(_SHAPE, generator=draw)) for _ in range(1 + num_others)]
        optimizer = make(parameters)
        before = hyperparameters(optimizer, 0)
        for step in range(_NUM_STEPS):
            for number, parameter in enumerate(parameters):
                draw = torch.Generator().manual_seed(10 * step + number)
                parameter.grad = torch.randn(_SHAPE, generator=draw) * size
            torch.manual_seed(step)
            optimizer.step()
        values.append(parameters[0].detach())
        now = hyperparameters(optimizer, 0)
        changed.update(name for name in before | now if repr(before.get(name)) != repr(now.get(name)))
    return torch.stack(values), sorted(changed)
