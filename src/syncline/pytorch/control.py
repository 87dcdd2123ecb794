"""Functions on models in training, for code that does not hold the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.registry import trainings_of


def synchronize(model: nn.Module | None = None) -> None:
    """Wait until the parameters of ``model`` (default: of all models) are final; raises what went wrong meanwhile.

    Call it before parameters are read outside a forward pass: moving averages, norms, export. ``state_dict()``,
    forward passes and checkpoints wait by themselves.
    """
    for training in trainings_of(model):
        training.synchronize()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Within this context, backward passes add to ``p.grad`` on this rank alone (gradient accumulation)."""
    with ExitStack() as stack:
        for training in trainings_of(model):
            stack.enter_context(training.no_sync())
        yield


def batch_size(num_samples: float, model: nn.Module | None = None) -> None:
    """Weight this rank's gradient of the current step by ``num_samples``, in place of the counted samples."""
    for training in trainings_of(model):
        training.batch_size(num_samples)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of ``model`` so that their total norm is at most ``max_norm``; return what it was.

    Every rank calls it, between ``backward()`` and ``step()``.
    """
    trainings = trainings_of(model)
    if len(trainings) != 1:
        raise UpdateError(
            f"This model has {len(trainings)} optimizers; call clip_grad_norm_ of each that distribute() returned"
        )
    return trainings[0].updater.clip_grad_norm(float(max_norm), float(norm_type), error_if_nonfinite=False)
