"""Update rules where every rank steps the whole model with the user's own optimizer, inside ``step()``.

Then parameters are final when ``step()`` returns, gradients are clipped as torch does it, and the whole state is at
hand on each rank. What is left to such a rule is how gradients become the ones that are stepped on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from syncline.updates.bucket_schedule import BucketScheduleOptions
from syncline.updates.inner import check_is_served
from syncline.updates.rule import Updater
from syncline.updates.state import StateEntry, StateSource, load_parameter_state, parameter_entries


class WholeRule:
    """What rules have in common whose buckets are not divided, and whose ranks step the user's optimizer as it is."""

    __slots__ = ()

    @property
    def schedule_options(self) -> BucketScheduleOptions:
        """Buckets move whole, if a collective moves them; else this is the cheapest to plan."""
        return BucketScheduleOptions(is_divided=False)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` if the optimizer wants a closure."""
        check_is_served(optimizer)


class WholeUpdater(Updater):
    """An updater whose ranks each step all parameters and keep all state; nothing lies between backward and step."""

    defers_parameters = False

    def discard(self) -> None:
        """Nothing is kept between a backward pass and the step."""

    def wait_parameters(self, buckets: Iterable[int]) -> None:
        """Parameters are final when ``step()`` returns."""

    def synchronize(self) -> None:
        """Parameters are final when ``step()`` returns; what went wrong is raised by the next step."""

    def clip_grad_norm(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip the gradients as they stand when ``backward()`` has returned."""
        tensors = [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
        return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def state_entries(self) -> list[StateEntry]:
        """Return the whole state on rank 0 and nothing elsewhere; where ranks differ in state, rank 0's is kept."""
        if self.collectives.rank != 0:
            return []
        return [
            entry
            for bucket in self.buckets
            for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True)
            for entry in parameter_entries(slot, self.optimizer.state.get(tensor, {}))
        ]

    def load_state(self, source: StateSource) -> None:
        """Take the whole state."""
        self.optimizer.state.clear()
        for bucket in self.buckets:
            for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True):
                state = load_parameter_state(source, slot, tensor)
                if state:
                    self.optimizer.state[tensor] = state
