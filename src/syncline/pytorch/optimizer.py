"""The optimizer that ``distribute()`` returns: a ``torch.optim.Optimizer`` whose step is the update rule's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from syncline.errors import UpdateError
from syncline.pytorch.optimizer_state import divided_state, gather_state, spread_state
from syncline.pytorch.training import Training
from syncline.updates.class_tuning import ClassStatistics


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps the distributed model; LR schedulers, ``GradScaler`` and checkpoint code use it like any optimizer.

    ``param_groups`` are those of the user's optimizer, and stay live. ``state_dict()`` and ``load_state_dict()`` give
    and take the whole state, as one process would have it; every rank calls them (with ``Sharded``, collectives).
    """

    def __init__(self, training: Training) -> None:
        inner = training.updater.optimizer
        self._is_complete = False
        super().__init__([dict(group) for group in inner.param_groups], dict(inner.defaults))
        self._is_complete = True
        self.training = training
        self.inner = inner
        self.param_groups = inner.param_groups

    def __repr__(self) -> str:
        return f"<DistributedOptimizer of {type(self.training.updater).__name__} with {self.inner!r}>"

    @property  # type: ignore[override]
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The optimizer state, by model parameter; with ``Sharded`` what ranks keep in parts is refused, and named."""
        updater = self.training.updater
        return divided_state(updater) if updater.divides_gradients else updater.state

    @state.setter
    def state(self, value: object) -> None:
        """Ignore what ``torch.optim.Optimizer`` begins with: the state is the update rule's."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of all ranks; every rank calls it. A rank that ran no backward pass has no weight.

        A ``closure`` clears the gradients, runs the forward and backward pass, and returns the loss. With ``AllReduce``
        the optimizer evaluates it as often as it likes (LBFGS), and gets the mean of the ranks' losses, which is
        returned. With other rules it is evaluated once, before the step, and this rank's loss is returned.

        Raises :class:`UpdateError`, and what went wrong since the last step.
        """
        loss = self.training.step(closure)
        # what lr_scheduler looks for on the optimizer that it was made with
        self.inner._opt_called = True  # type: ignore[attr-defined]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or make them zeros."""
        self.training.zero_grad(set_to_none=set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context, backward passes add to ``p.grad`` on this rank alone (gradient accumulation)."""
        return self.training.no_sync()

    def batch_size(self, num_samples: float) -> None:
        """Tell the weight of this rank's gradient in the current step, in place of the counted samples."""
        self.training.batch_size(num_samples)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; return what it was.

        Every rank calls it, between ``backward()`` and ``step()``. It costs one number per rank.
        """
        return self.training.clip_grad_norm(float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite)

    def synchronize(self) -> None:
        """Wait until all parameters are final."""
        self.training.synchronize()

    @property
    def is_server(self) -> bool:
        """Whether this rank only serves the others (``Overlapped(servers="dedicated:k")``): see :meth:`serve`."""
        return self.training.updater.is_server

    def serve(self) -> None:
        """Serve the ranks that train, and return when all of them have closed their fleets, or are lost.

        It stands in place of the training loop on ranks where :attr:`is_server` is True; elsewhere it raises
        :class:`UpdateError`. A server's model keeps the parameters that it began with. Collectives of the whole fleet
        (``fleet.barrier()`` ...) would wait for it all the while.
        """
        updater = self.training.updater
        if not updater.is_server:
            raise UpdateError(
                f"rank {updater.collectives.rank} trains, and serves beside that; call serve() only where "
                "optimizer.is_server is True: on the ranks of Overlapped(servers='dedicated:k')"
            )
        updater.serve()

    @property
    def iteration(self) -> int:
        """Steps that the fleet has made; with ``Overlapped`` and a quorum, a slow rank leaves numbers out."""
        return self.training.updater.iteration

    def statistics(self) -> object | None:
        """Return what the update rule counts, such as staleness; None if it counts nothing of its own."""
        return self.training.updater.statistics()

    def progress(self) -> str:
        """Say in a few words how the update rule fares, for a line of progress; empty if there is nothing to say."""
        return self.training.updater.progress()

    def class_statistics(self) -> ClassStatistics:
        """Return which bucket of the model is in which connection class, and what was measured and predicted."""
        return self.training.tuner.statistics()

    def end_period(self) -> None:
        """Make the parameters of all ranks equal now, with a rule that lets them differ; every rank calls it."""
        self.training.end_period()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: buckets are made once."""
        if self._is_complete:
            raise UpdateError(
                "Parameter groups cannot be added after distribute(); add them to the optimizer before it"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in torch's own form; with ``Sharded``, every rank must call it."""
        self.synchronize()
        if self.training.updater.divides_gradients:
            return gather_state(self.training.updater)
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a whole state in torch's own form, from one process or any number of ranks; keep what is owned."""
        self.synchronize()
        if self.training.updater.divides_gradients:
            spread_state(self.training.updater, state_dict)
        else:
            self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups

    @property
    def num_state_bytes(self) -> int:
        """Memory of the optimizer state that this rank keeps."""
        return self.training.updater.num_state_bytes
