"""The stand-ins of one model: what ``p.grad`` is after a backward pass where each rank has a part of gradients."""

from __future__ import annotations

import sys

from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.divided_gradient import DividedGradient
from syncline.updates import Updater


class StandIns:
    """One for each parameter in buckets, if the update rule divides gradients; else none, and nothing happens here."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._by_parameter: dict[nn.Parameter, DividedGradient] = {}
        if updater.divides_gradients:
            self._by_parameter = {
                tensor: DividedGradient(tensor, slot, updater)
                for bucket in updater.buckets
                for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True)
            }

    def __bool__(self) -> bool:
        return bool(self._by_parameter)

    def show(self) -> None:
        """Put each where PyTorch looks for a gradient; a new one where somebody keeps that of an earlier pass."""
        kept = []
        for tensor in tuple(self._by_parameter):
            stand_in = self._by_parameter[tensor]
            stand_in.fresh = None  # of a pass that broke
            # 3: the table, this name, and what the function is given; one that was added to is shown already
            if sys.getrefcount(stand_in) > 3 and tensor.grad is not stand_in:
                kept.append((tensor, stand_in))
            else:
                tensor.grad = stand_in
        for tensor, stand_in in kept:
            stand_in.is_past = True
            new = DividedGradient(tensor, stand_in.slot, self._updater)
            tensor.grad = self._by_parameter[tensor] = new

    def begin_pass(self) -> None:
        """Let a pass that begins add to the gradients that the user has not cleared."""
        if self._by_parameter:
            self._updater.carry([tensor.grad is stand_in for tensor, stand_in in self._by_parameter.items()])

    def begin_step(self) -> None:
        """Leave out what the user dropped, and refuse what they put in its place: the step would not see it."""
        if not self._by_parameter:
            return
        for tensor, stand_in in self._by_parameter.items():
            if tensor.grad is not stand_in and tensor.grad is not None:
                raise UpdateError(
                    f"The gradient of {stand_in.slot.name!r} was replaced after backward(), but with Sharded() no rank "
                    "has it whole, so the step would not see that; use update=AllReduce()"
                )
        dropped = [stand_in.slot.position for tensor, stand_in in self._by_parameter.items() if tensor.grad is None]
        self._updater.drop(dropped)
