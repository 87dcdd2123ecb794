"""What a program put on its own optimizer: replaced methods, hooks, and wrappers that hold it.

With rules whose ranks have whole gradients, the update rule calls ``step()`` of the user's optimizer, so all of this is
called. With ``Sharded()`` each rank steps optimizers of its own on its shard. There the user's one is called all the
same, once for each step, and where its class's own step would begin the update rule makes it: a method that was
replaced on the instance, and hooks, see what they would see in one process. The state goes the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from syncline.errors import UpdateError
from syncline.pytorch.detachable import Hook
from syncline.pytorch.optimizer_state import gather_state, spread_state
from syncline.updates import Updater
from syncline.updates.inner import is_torchs
from syncline.updates.private_torch import has_step_hooks, is_of_scheduler

MakeStep = Callable[[Callable[[], Any] | None], Any]


class InnerCalls:
    """The calls of one user's optimizer, by the update rule, by the optimizer that is returned, and by others."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._optimizer = updater.optimizer
        self._class_step = type(updater.optimizer).step
        self._is_stepping = False
        self._is_direct = False
        self._make_step: MakeStep | None = None
        self._gathered = self._has_spread = False
        self._handles: list[Any] = [self._optimizer.register_step_pre_hook(Hook(self._before_step))]
        if updater.divides_gradients:
            self._handles += [
                self._optimizer.register_state_dict_post_hook(Hook(self._complete_state), prepend=True),
                self._optimizer.register_load_state_dict_pre_hook(Hook(self._take_state)),
            ]

    def remove(self) -> None:
        """Let the optimizer be a plain one."""
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Within this context the update rule may step the user's optimizer."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def step(self, make_step: MakeStep, closure: Callable[[], Any] | None) -> Any:
        """Make a step, by way of the user's optimizer; return the loss."""
        if not self._updater.divides_gradients:
            return make_step(closure)
        replaced = _replaced_step(self._optimizer)
        self._check(replaced)
        arguments = () if closure is None else (closure,)
        self._make_step, self._is_direct = make_step, replaced is None
        try:
            if replaced is not None:
                return replaced(*arguments)
            hooked = torch.optim.Optimizer.profile_hook_step(lambda _, closure=None: make_step(closure))
            return hooked(self._optimizer, *arguments)
        finally:
            self._make_step = None

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, by way of the user's optimizer."""
        self._gathered = False
        whole = self._optimizer.state_dict()
        if self._updater.divides_gradients and not self._gathered:
            raise _not_reached(self._optimizer, "state_dict")
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a whole state, by way of the user's optimizer."""
        self._has_spread = False
        self._optimizer.load_state_dict(state_dict)
        if self._updater.divides_gradients and not self._has_spread:
            raise _not_reached(self._optimizer, "load_state_dict")

    def zero_grad(self, *, set_to_none: bool) -> bool:
        """Call a ``zero_grad()`` that is not torch's own; return whether there was none."""
        optimizer = self._optimizer
        if "zero_grad" not in vars(optimizer) and type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
            return True
        optimizer.zero_grad(**({} if set_to_none else {"set_to_none": False}))
        return False

    def _check(self, replaced: Callable[..., Any] | None) -> None:
        kind = type(self._optimizer)
        if kind.step is not self._class_step:
            raise UpdateError(
                f"{kind.__name__}.step was replaced after distribute(), and Sharded() calls it on each rank's shard; "
                "replace it before distribute(), or use update=AllReduce()"
            )
        if replaced is not None and not is_torchs(kind):
            raise UpdateError(
                f"step() was replaced on this {kind.__name__}, whose own step() Sharded() calls on each rank's shard "
                "alone; put the change into the class, or use update=AllReduce()"
            )
        if self._updater.steps_in_backward and (replaced is not None or has_step_hooks(self._optimizer)):
            raise UpdateError(
                "step() of the optimizer was replaced, or has a hook (register_step_pre_hook, "
                "register_optimizer_step_pre_hook), which Sharded(step_in_backward=True) cannot call before the step: "
                "it is made in backward(); use Sharded()"
            )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where the class's own step begins: refuse it if it is of this rank alone, or put the update in its place."""
        if self._is_stepping:
            return None
        if self._make_step is None:
            raise UpdateError(
                "step() was called of the optimizer that was given to distribute(), which would step this rank alone; "
                "call step() of the optimizer that distribute() returned: model, optimizer = syncline.distribute(...). "
                "A wrapper that holds an optimizer (Lookahead, LARS ...) is made with that one, after distribute()"
            )
        if self._is_direct:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        return (_emptied(optimizer), partial(self._make_step, closure)), {}

    def _complete_state(self, _: torch.optim.Optimizer, own: dict[str, Any]) -> dict[str, Any]:
        """Put the whole state into what the user's optimizer has of it; every rank calls it."""
        self._updater.synchronize()
        self._gathered = True
        return {**own, "state": gather_state(self._updater)}

    def _take_state(self, _: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        """Keep the owned part of a whole state, and leave the hyper-parameters to the user's optimizer."""
        self._updater.synchronize()
        spread_state(self._updater, given)
        self._has_spread = True
        return {**given, "state": {}}


def _replaced_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """Return the ``step`` that was put on the instance, but for that by which LR schedulers count the class's own."""
    step = vars(optimizer).get("step")
    if step is None or (is_of_scheduler(step) and getattr(step, "__wrapped__", None) is type(optimizer).step):
        return None
    return step  # type: ignore[no-any-return]


def _emptied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer whose step evaluates the closure, and steps nothing."""
    empty: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(empty).update({**vars(optimizer), "param_groups": [], "state": {}})
    return empty


def _not_reached(optimizer: torch.optim.Optimizer, name: str) -> UpdateError:
    return UpdateError(
        f"{name}() of this {type(optimizer).__name__} does not call torch.optim.Optimizer.{name}(), where Sharded() "
        "joins the parts of the state; let it call what it replaced, or use update=AllReduce()"
    )
