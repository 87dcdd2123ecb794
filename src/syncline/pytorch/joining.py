"""Ranks whose loaders end at different times: who is done follows the others until all are.

Before each backward pass, clipping and step, a rank within ``join()`` tells what comes, in one small sum over all
ranks. A rank that is done says so each time, and does the same with no weight; hyper-parameters of a step it takes from
the lowest rank that is still at work, whose schedulers go on. All are done when nobody is at work any more.

Where hosts have helpers, ranks without data, all of the training is such a ``join()``, in which helpers are done from
the start: they follow in ``serve()``, or else when their fleet closes, and the others then follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.sync_batch_norm import check_joinable
from syncline.runtime.failures import AS_MANY_BATCHES
from syncline.updates.control import ControlStream
from syncline.updates.inner import options_of
from syncline.updates.rule import Updater

_DONE, PASS, CLIP, _STEP, SAVE = 0.0, 1.0, 2.0, 3.0, 4.0

Save = Callable[[Mapping[str, Any]], None]
"""Takes part in writing a checkpoint, as another rank has told it."""


def check_join(updater: Updater, model: nn.Module, *, is_joining: bool) -> None:
    """Raise :class:`UpdateError` where ranks cannot make different numbers of steps; ``is_joining``: they do now."""
    if not updater.is_synchronous:
        raise UpdateError(
            f"join() is for rules in which every rank makes every step, not {updater.rule_name}(): with LocalSteps() "
            f"whoever ends its period follows the others anyway; with Overlapped() and Clustered() {AS_MANY_BATCHES}"
        )
    check_joinable(model)
    if updater.is_elastic:
        raise UpdateError(
            "join() does not go with elastic=True, where what a rank that is done follows may be lost with another; "
            "give all ranks as many steps"
        )
    if is_joining:
        raise UpdateError(
            "join() is not called within another of the same model, nor with helpers in the topology, when ranks "
            "may make different numbers of steps without it"
        )


class Follower(Protocol):
    """A training that makes, with no weight, what other ranks make."""

    updater: Updater

    def follow_pass(self) -> None:
        """Take part in a backward pass."""

    def follow_step(self) -> None:
        """Take part in a step."""


class Joining:
    """One ``join()`` of a model; ``control`` is a stream that nothing else uses."""

    def __init__(self, control: ControlStream, optimizer: torch.optim.Optimizer) -> None:
        self._control = control
        self._optimizer = optimizer

    def announce_step(self) -> None:
        """Say that this rank makes a step, and with which hyper-parameters."""
        self.announce(_STEP, [_hyperparameters(group) for group in self._optimizer.param_groups])

    def follow(self, training: Follower, save: Save | None = None) -> None:
        """Do what the others do, with no weight, until all are done; ``save`` takes part in checkpoints."""
        while True:
            codes = self._control.gather_numbers(_DONE, "ranks that join")
            if not any(codes):
                return
            leader = next(rank for rank, code in enumerate(codes) if code)
            if codes[leader] == PASS:
                training.follow_pass()
                continue
            told = self._control.all_gather(None, "what a rank that joins follows")[leader]
            if codes[leader] == SAVE:
                if save is None:
                    raise UpdateError(
                        "Ranks that still train write a checkpoint, for which the part of this one, which is done, is "
                        "missing; save after join(), or on a helper call optimizer.serve() in place of the loop"
                    )
                save(told)
            elif codes[leader] == CLIP:
                training.updater.clip_grad_norm(told["max_norm"], told["norm_type"], error_if_nonfinite=False)
            else:
                for group, options in zip(self._optimizer.param_groups, told, strict=True):
                    _follow_hyperparameters(group, options)
                training.follow_step()

    def announce(self, code: float, told: Any = None) -> None:
        """Say that this rank begins a backward pass, clips the combined gradients, or writes a checkpoint.

        ``told`` is what the others need for their part.
        """
        codes = self._control.gather_numbers(code, "ranks that join")
        others = {other for other in codes if other not in {_DONE, code}}
        if others:
            raise UpdateError(
                f"Within join() ranks differ in what they do next ({codes}: 0 done, 1 backward, 2 clip, 3 step, 4 "
                "save): every rank that has data runs the same backward passes, clipping, steps and checkpoints"
            )
        if _DONE in codes and code != PASS:
            self._control.all_gather(told, "what a rank that joins follows")


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what JSON can say of a group's hyper-parameters; a tensor of one number becomes that number."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in options_of(group).items()
        if value is None or isinstance(value, (bool, int, float, str, list, tuple, torch.Tensor))
    }


def _follow_hyperparameters(group: dict[str, Any], told: Mapping[str, Any]) -> None:
    """Take over hyper-parameters, in the types that they have here."""
    for key, value in told.items():
        if isinstance(group[key], torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(group[key], tuple) else value
