"""Which models are in training, and functions on them, for code that does not hold the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, cast

import torch
from torch import nn

from syncline.arguments import Bounds, checked
from syncline.errors import UpdateError
from syncline.pytorch.detachable import ContextMethod
from syncline.pytorch.outside_gradients import all_trained, all_trainings

if TYPE_CHECKING:
    from syncline.pytorch.fleet import Fleet
    from syncline.pytorch.training import Training


def check_untrained(model: nn.Module, named: Mapping[nn.Parameter, tuple[str, int]]) -> None:
    """Raise :class:`UpdateError` for a parameter that a distributed optimizer trains: it lies in that one's bucket.

    ``named`` maps the parameters that are to be trained to their names (and groups).
    """
    trained = all_trained()
    taken = [name for parameter, (name, _) in named.items() if parameter in trained]
    if taken:
        raise UpdateError(
            f"{len(taken)} of {len(named)} parameters of this {type(model).__name__} (first: {taken[0]!r}) were given "
            "to distribute() before; use the optimizer that it returned, give each further optimizer parameters of its "
            "own, or close the fleet first"
        )


def fleet_of(training: Training) -> Fleet:
    """Return the fleet of a model that is in training, or was."""
    assert training.fleet is not None, "a training is added when it begins"
    return training.fleet


def is_in_training(model: nn.Module) -> bool:
    """Whether ``model`` is in training with some optimizer."""
    return any(training.model is model for training in all_trainings())


def trainings_of(model: nn.Module | None) -> tuple[Training, ...]:
    """Return the trainings of ``model`` (a model may have several optimizers), or all; an error if there is none."""
    found = tuple(cast("Training", one) for one in all_trainings() if model is None or one.model is model)
    if model is not None and not found:
        raise UpdateError(
            f"This {type(model).__name__} was not given to distribute(), or its fleet was closed; give the model "
            "that distribute() returned"
        )
    return found


@checked
def synchronize(model: nn.Module | None = None) -> None:
    """Wait until the parameters of ``model`` (default: of all models) are final; raises what went wrong meanwhile.

    Any thread may call it; no other rank needs to.

    They are final when ``step()`` returns, unless ``Sharded(overlap_forward=True)`` was asked for. Then who touches
    a parameter through PyTorch waits by itself; call this before parameters are read or written by another way, such
    as an array or a ``p.data`` that was taken before the step.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Sharded(overlap_forward=True))
    >>> model(x).sum().backward(); optimizer.step()
    >>> syncline.synchronize(model)  # now memory that was reached before the step holds the new values too
    """
    for training in trainings_of(model):
        training.synchronize()


@checked
@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Within this context, backward passes add to ``p.grad`` on this rank alone (gradient accumulation).

    Run the last one of a step outside it: ``step()`` raises :class:`UpdateError` else.

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> with syncline.no_sync(model):
    ...     model(x).sum().backward()
    >>> model(x).sum().backward(); optimizer.step()  # with the gradients of both passes, of all ranks
    """
    with ExitStack() as stack:
        for training in trainings_of(model):
            stack.enter_context(training.no_sync())
        yield


def offer_no_sync(model: nn.Module) -> None:
    """Make :func:`no_sync` a method of the model, where Accelerate and others look for it; one of its own stays."""
    if not (hasattr(model, "no_sync") or isinstance(model, torch.jit.ScriptModule)):
        model.no_sync = ContextMethod(no_sync, model)  # type: ignore[assignment]  # a function of this object alone


def withdraw_no_sync(model: nn.Module) -> None:
    """Take the method away, unless the model is still in training with another optimizer."""
    if isinstance(getattr(model, "no_sync", None), ContextMethod) and not is_in_training(model):
        del model.no_sync


@checked
@contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Within this context ranks may make different numbers of steps, since their loaders end at different times.

    A rank that leaves it goes on in the steps of the others, with no weight, until all have left. Every rank enters it
    once, with its loop inside; the same backward passes, ``optimizer.clip_grad_norm_`` and steps make up a step on all.
    Raises :class:`UpdateError` with rules in which ranks step by themselves (``Overlapped``, ``Clustered``, and
    ``LocalSteps``, whose periods end that way in any case).

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> with syncline.join(model):
    ...     for batch in x.split(2):
    ...         model(batch).sum().backward(); optimizer.step(); optimizer.zero_grad()
    """
    with ExitStack() as stack:
        for training in trainings_of(model):
            stack.enter_context(training.join())
        yield


@checked
def batch_size(num_samples: float, model: nn.Module | None = None) -> None:
    """Weight this rank's gradient of the current step by ``num_samples``, in place of the counted samples.

    Call it before ``backward()``, on the training thread; ranks may give different numbers, 0 or more. ``model``: the
    distributed model that is meant (default: all).

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> syncline.batch_size(len(x))
    >>> model(x).mean().backward(); optimizer.step()
    """
    trainings = trainings_of(model)
    if not trainings:
        raise UpdateError(f"batch_size({num_samples:g}) counts for a model in training; call distribute() before")
    for training in trainings:
        training.samples.tell(num_samples)


@checked
def clip_grad_norm_(model: nn.Module, max_norm: Annotated[float, Bounds(0)], norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of ``model`` so that their total norm is at most ``max_norm``; return what it was, a scalar.

    Every rank calls it, between ``backward()`` and ``step()``. ``norm_type`` is the p of the norm. Raises
    :class:`UpdateError` for a model with several optimizers: clip with each of them.

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> model(x).sum().backward()
    >>> bool(syncline.clip_grad_norm_(model, max_norm=1.0) > 1.0)
    True
    """
    trainings = trainings_of(model)
    if len(trainings) != 1:
        raise UpdateError(
            f"This model has {len(trainings)} optimizers; call clip_grad_norm_ of each that distribute() returned"
        )
    return trainings[0].clip_grad_norm(float(max_norm), float(norm_type), error_if_nonfinite=False)
