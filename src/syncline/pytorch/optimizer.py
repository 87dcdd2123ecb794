"""The optimizer that ``distribute()`` returns: a ``torch.optim.Optimizer`` whose step is the update rule's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import torch

from syncline.arguments import Bounds, checked
from syncline.errors import UpdateError
from syncline.members import MembershipChange
from syncline.pytorch.contributions import Gradients
from syncline.pytorch.control import fleet_of
from syncline.pytorch.elastic_training import ElasticTraining
from syncline.pytorch.notices import Notice
from syncline.pytorch.optimizer_state import divided_state
from syncline.pytorch.training import Training
from syncline.runtime.control import Tally
from syncline.runtime.failures import STEP
from syncline.updates.class_tuner import TunerStatistics
from syncline.updates.private_torch import call_state_hooks, call_with_step_hooks, note_step, uncompiled

_MODES = frozenset({"train", "eval"})
"""Methods of schedule-free optimizers, which have other parameters in evaluation than in training."""


class Gate(Protocol):
    """What lets newcomers in between two steps."""

    extra: Any = None
    """What this rank was given when it came in itself."""
    offer: Callable[[], Any] | None = None
    """Returns what newcomers are given."""
    parts: Mapping[str, str] = MappingProxyType({})
    """Likewise, for ``resume()``: the states of schedulers and samplers, by name."""
    offer_parts: Callable[[], Mapping[str, str]] | None = None

    iteration: int = 0
    """Steps that were made when the training was put in place last."""

    @property
    def has_just_come(self) -> bool:
        """Whether this rank has come into the running job, and has made no step in it yet."""

    def end_step(self) -> None:
        """Take in who is connected; every member comes here at the end of the same step."""


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps the distributed model; LR schedulers, ``GradScaler`` and checkpoint code use it like any optimizer.

    :func:`syncline.distribute` returns it. Its methods belong to the training thread. ``param_groups`` are those of the
    user's optimizer, and stay live. ``state_dict()`` and ``load_state_dict()`` give and take the whole state, as one
    process would have it; every rank calls them (with ``Sharded``, collectives). What nobody would read cannot be set:
    ``optimizer.state = ...`` raises :class:`UpdateError`, with what to do.

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    >>> model(x).sum().backward(); optimizer.step(); scheduler.step()
    >>> optimizer.param_groups[0]["lr"]
    0.05
    """

    def __init__(
        self,
        training: Training,
        *,
        save_as_told: Callable[[DistributedOptimizer, Mapping[str, Any]], None],
        elastic: ElasticTraining | None = None,
    ) -> None:
        self.training = training
        self._elastic = elastic
        self.growing: Gate | None = None
        """What lets newcomers in; None in a job that takes nobody in."""
        self.heed: Callable[[Mapping[int, Notice]], None] | None = None
        """Does what ranks were told of their end; set by who knows the fleet."""
        self.onlookers: list[Callable[[], None]] = []
        """Called at the end of each step, alike on all ranks."""
        self.last_save: dict[str, Any] | None = None
        """What ``save_checkpoint`` or ``resume`` was given last, beside model and optimizer."""
        self._save_as_told = save_as_told  # who makes checkpoints knows this class, so it cannot be known here
        self.inner = training.updater.optimizer
        self._is_complete = False
        super().__init__(self.inner.param_groups, self.inner.defaults)  # what it sets is the inner optimizer's
        self._is_complete = True

    def __repr__(self) -> str:
        return f"<DistributedOptimizer of {type(self.training.updater).__name__} with {self.inner!r}>"

    def __reduce_ex__(self, _: object) -> Any:
        """Refuse to be copied or pickled: a copy would not be joined to the other ranks."""
        raise UpdateError(
            "An optimizer of distribute() is not copied or pickled, since it is joined to the other ranks; save "
            "optimizer.state_dict() (every rank calls it), or use syncline.save_checkpoint()"
        )

    @property  # type: ignore[override]
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The optimizer state, by model parameter; with ``Sharded`` what ranks keep in parts is refused, and named."""
        updater = self.training.updater
        return divided_state(updater) if updater.divides_gradients else updater.state

    @state.setter
    def state(self, _: object) -> None:
        self._refuse("state", "give a whole state to optimizer.load_state_dict(...), on every rank")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own groups: what is changed in them counts from the next step on."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, _: object) -> None:
        self._refuse("param_groups", 'change values within the groups: optimizer.param_groups[0]["lr"] = 0.1')

    @property
    def defaults(self) -> dict[str, Any]:
        """What the inner optimizer was made with."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, _: object) -> None:
        self._refuse("defaults", "no group can be added that they would count for; change optimizer.param_groups")

    def _refuse(self, name: str, remedy: str) -> None:
        """Raise for what users set; ``torch.optim.Optimizer.__init__`` sets them too, to what the inner has."""
        if self._is_complete:
            raise UpdateError(f"optimizer.{name} cannot be set after distribute(), where nobody reads it; {remedy}")

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of all ranks; every rank calls it. A rank that ran no backward pass has no weight.

        Where no rank ran one nothing is updated, with a :class:`SynclineWarning`.

        A ``closure`` clears the gradients, runs the forward and backward pass, and returns the loss. With ``AllReduce``
        the optimizer evaluates it as often as it likes (LBFGS), and gets the mean of the ranks' losses, which is
        returned. With other rules it is evaluated once, before the step, and this rank's loss is returned.

        Raises :class:`UpdateError`, and what went wrong since the last step.
        """
        if closure is not None and not callable(closure):
            raise UpdateError(f"closure must be a function that returns the loss, or None, not {closure!r}")
        return call_with_step_hooks(self, DistributedOptimizer._step, (self,) if closure is None else (self, closure))

    step.hooked = True  # type: ignore[attr-defined]  # torch's hooks on all optimizers are called with the inner one

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.training.calls.step(self.training.step, closure)
        note_step(self.inner)
        notices, place = self.training.notices(), id(self.training)  # a reference would keep it where the job grows
        if self._elastic is not None:
            self._elastic.end_step()
        if self.growing is not None:
            self.growing.end_step()
        for look in self.onlookers:
            look()
        if notices and self.heed is not None and place == id(self.training):  # else the next step tells a larger job
            self.heed(notices)
        return loss

    @property
    def checkpoint_if_state_is_lost(self) -> str | Path | None:
        """Where an elastic job goes back to, if what one rank owns is kept by no other; None if it is."""
        if self._elastic is None or not self.training.updater.divides_gradients:
            return None
        settings, schedules = self._elastic.recovery.settings, self.training.updater.collectives.bucket_schedules
        is_kept = any(schedule.spared or schedule.replicas for schedule in schedules)
        return None if is_kept else settings.checkpoint

    def count_steps(self) -> Tally:
        """Count the steps, for the errors of those who go on when this rank leaves."""
        return Tally(count=self.iteration, unit=STEP, num_idle=self.training.num_idle_steps)

    def go_on(self, training: Training, elastic: ElasticTraining | None) -> None:
        """Step another training of the same model from now on: that on a larger fleet."""
        self.training, self._elastic = training, elastic

    @property
    def extra(self) -> Any:
        """What the members offered when this rank came into a running job (:meth:`offer_extra`); None if it did not.

        >>> model, optimizer = syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True)
        >>> optimizer.extra is None  # it was there at the start
        True
        """
        return None if self.growing is None else self.growing.extra

    @checked
    def offer_extra(self, function: Callable[[], Any]) -> None:
        """Give newcomers what ``function`` returns, which JSON can say: the state of scheduler, scaler, sampler ...

        It is called on the training thread of one member, within the ``step()`` at whose end they come in. Newcomers
        find it in :attr:`extra` when their ``distribute()`` returns; they are where the members are when ``step()``
        returns, so what follows it in the loop, as ``scheduler.step()``, they do once before their first batch. It is
        called once at once too: :class:`UpdateError` if JSON cannot say what it returns, or the job is not elastic.

        >>> model, optimizer = syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True)
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        >>> optimizer.offer_extra(lambda: {"scheduler": scheduler.state_dict()})
        >>> if optimizer.extra is not None:
        ...     scheduler.load_state_dict(optimizer.extra["scheduler"])
        ...     scheduler.step()
        """
        if fleet_of(self.training).recovery is None:
            raise UpdateError("Newcomers come only into an elastic job: distribute(..., elastic=True)")
        try:
            json.dumps(function())
        except (TypeError, ValueError) as error:
            raise UpdateError(f"What is offered to newcomers must be what JSON can say, but {error}") from error
        if self.growing is not None:
            self.growing.offer = function

    @checked
    def on_membership_change(self, function: Callable[[MembershipChange], None]) -> None:
        """Call ``function`` with a :class:`MembershipChange` when ranks have been lost, or have joined.

        It is called on the training thread of every member, at the end of the first step that they have made together:
        then parameters are equal on all, and collectives of the fleet are allowed. Raises :class:`UpdateError` unless
        the job is elastic.

        >>> model, optimizer = syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True)
        >>> optimizer.on_membership_change(lambda change: print(change.lost, "lost"))
        """
        recovery = fleet_of(self.training).recovery
        if recovery is None:
            raise UpdateError("Members change only in an elastic job: distribute(..., elastic=True)")
        recovery.watch(function)

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients (``p.grad`` is None then), or make them zeros; also those that no step has used."""
        self.training.zero_grad(set_to_none=set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context, backward passes add to ``p.grad`` on this rank alone (gradient accumulation).

        As :func:`syncline.no_sync`, for the parameters of this optimizer alone.
        """
        return self.training.no_sync()

    @checked
    def batch_size(self, num_samples: float) -> None:
        """Weight this rank's gradient of this step by ``num_samples``, 0 or more; call it before ``backward()``."""
        self.training.samples.tell(num_samples)

    @checked
    def clip_grad_norm_(
        self, max_norm: Annotated[float, Bounds(0)], norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; return what it was, a scalar tensor.

        Every rank calls it, between ``backward()`` and ``step()``. It costs one number per rank. ``norm_type`` is the
        p of the norm, ``inf`` included. With ``error_if_nonfinite`` a norm that is not finite raises.

        >>> model, optimizer = syncline.distribute(model, optimizer)
        >>> model(x).sum().backward()
        >>> bool(optimizer.clip_grad_norm_(1.0) > 1.0)
        True
        """
        return self.training.clip_grad_norm(float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite)

    def synchronize(self) -> None:
        """Wait until all parameters are final; raises what went wrong since the last step. No other rank is needed."""
        self.training.synchronize()

    @property
    def is_server(self) -> bool:
        """Whether this rank only serves the others: see :meth:`serve`.

        So it is on the last ranks with ``Overlapped(servers="dedicated:k")``, and on the helpers of a topology.
        """
        return self.training.updater.is_server or self.training.is_helper

    def serve(self) -> None:
        """Serve the ranks that train, and return when all of them have closed their fleets, or are lost.

        It stands in place of the training loop on ranks where :attr:`is_server` is True; elsewhere it raises
        :class:`UpdateError`. A dedicated server's model keeps the parameters that it began with; a helper's follows the
        others', and it takes part in their steps, clipping and :func:`syncline.save_checkpoint`. Collectives of the
        whole fleet (``fleet.barrier()``, ``optimizer.state_dict()`` ...) would wait for it all the while.

        >>> rule = syncline.Overlapped(servers="dedicated:1")  # the last rank serves, with two ranks or more
        >>> def run(optimizer, train):
        ...     optimizer.serve() if optimizer.is_server else train()
        """
        updater = self.training.updater
        if not self.is_server:
            raise UpdateError(
                f"rank {updater.collectives.rank} trains, and serves beside that; call serve() only where "
                "optimizer.is_server is True: on the ranks of Overlapped(servers='dedicated:k'), and on helpers"
            )
        if updater.is_server:
            updater.serve()
        else:
            self.training.follow(partial(self._save_as_told, self))

    @checked
    def contribute(self, gradients: Gradients, samples: float) -> None:
        """Feed gradients that this rank was sent, by processing units behind it for example, into the coming step.

        ``gradients``: tensors in the shapes and number types of their parameters, by name, or in the order of
        ``model.parameters()`` (of those that are trained), None for one without. They are gradients of the *mean* loss
        over ``samples`` samples, as ``backward()`` leaves them in ``p.grad``; divide a sum by its samples before. With
        ``GradScaler`` they are scaled as this rank's own are.

        They join what this rank's next backward pass brings, or all that it brings if ``step()`` comes without one; so
        does what further calls bring. With ``samples="batch"`` in ``distribute()``, which this needs, the update is
        that of one process over the union of all samples. With ``AllReduce`` and ``Sharded``. The tensors are free
        again when it returns.

        Raises :class:`UpdateError`, and takes nothing, for an unknown name, another shape or number type, a negative
        number of samples, a rank that does not count samples, and after the backward pass of this step.

        >>> model, optimizer = syncline.distribute(model, optimizer, samples="batch")
        >>> optimizer.contribute({"bias": torch.tensor([1.0, 2.0])}, samples=8)
        >>> optimizer.step()  # this rank ran no backward pass
        """
        self.training.collector.contribute(gradients, samples)

    @property
    def iteration(self) -> int:
        """Steps that the fleet has made, with those before the checkpoint that was loaded.

        With ``Overlapped`` and a quorum, a slow rank leaves numbers out.
        """
        return self.training.updater.iteration

    def statistics(self) -> object | None:
        """Return what the update rule counts, such as staleness; None if it counts nothing of its own.

        >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Overlapped())
        >>> optimizer.statistics().num_steps
        0
        """
        return self.training.updater.statistics()

    def progress(self) -> str:
        """Say in a few words how the update rule fares, for a line of progress; empty if there is nothing to say."""
        return self.training.updater.progress()

    def class_statistics(self) -> TunerStatistics:
        """Return which bucket of the model is in which connection class, and what was measured and predicted.

        A frozen record, in bytes and seconds; no other rank is asked.

        >>> model, optimizer = syncline.distribute(model, optimizer)
        >>> optimizer.class_statistics().classes  # by bucket
        (0,)
        """
        return self.training.tuner.statistics()

    def end_period(self) -> None:
        """Make the parameters of all ranks equal now, with a rule that lets them differ; every rank calls it.

        With ``AllReduce`` and ``Sharded`` they always are, and nothing happens.

        >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Overlapped(period=64))
        >>> model(x).sum().backward(); optimizer.step()
        >>> optimizer.end_period()  # after 1 step of 64: now all ranks have the same parameters
        """
        self.training.end_period()
        if self._elastic is None and self.growing is not None:
            self.growing.end_step()
        elif self._elastic is not None and not self.training.updater.is_synchronous:
            self._elastic.end_step()

    if not TYPE_CHECKING:  # which would take any attribute for one that is there

        def __getattr__(self, name: str) -> Any:
            """Offer ``train()`` and ``eval()`` of the user's optimizer, if it has them (schedule-free ones do).

            Other methods of its own are not: one that steps would step this rank alone.
            """
            if name in _MODES and hasattr(self.inner, name):
                return partial(self._switch, name)
            return super().__getattribute__(name)  # which raises as it just did

    def _switch(self, mode: str, *args: Any, **options: Any) -> Any:
        """Let the user's optimizer write other values into the parameters, for evaluation or for training."""
        updater = self.training.updater
        if updater.divides_gradients or not updater.is_synchronous:
            has = "a part of it" if updater.is_synchronous else "one of its own, and would get parameters of its own"
            raise UpdateError(
                f"optimizer.{mode}() of {type(self.inner).__name__} makes parameters of its whole state, and with "
                f"{updater.rule_name}() each rank has {has}; use update=AllReduce()"
            )
        self.synchronize()
        return getattr(self.inner, mode)(*args, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 - refused, whatever it is
        """Raise :class:`UpdateError`: buckets are made once."""
        if self._is_complete:
            raise UpdateError(
                "Parameter groups cannot be added after distribute(); add them to the optimizer before it"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in torch's own form, on every rank; with ``Sharded``, every rank must call it.

        Hooks that were registered on this optimizer are called, as with any of torch's.

        >>> model, optimizer = syncline.distribute(model, optimizer)
        >>> sorted(optimizer.state_dict())
        ['param_groups', 'state']
        """
        self._check_state_is_here()
        self.synchronize()
        call_state_hooks(self, "state_dict_pre")
        return call_state_hooks(self, "state_dict_post", self.training.calls.state_dict())

    @checked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a whole state in torch's own form, from one process or any number of ranks; keep what is owned.

        Every rank gives the same. Raises :class:`UpdateError` for a state of other parameters or groups.

        >>> model, optimizer = syncline.distribute(model, optimizer)
        >>> optimizer.load_state_dict(torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.5).state_dict())
        >>> optimizer.param_groups[0]["lr"]
        0.5
        """
        self._check_state_is_here()
        self.synchronize()
        given = call_state_hooks(self, "load_state_dict_pre", dict(state_dict))
        if not {"state", "param_groups"} <= given.keys():
            raise UpdateError(
                f"state_dict must have state and param_groups, as optimizer.state_dict() returns them, not {given!r}"
            )
        self.training.calls.load_state_dict(given)
        call_state_hooks(self, "load_state_dict_post")

    def _check_state_is_here(self) -> None:
        """Raise :class:`UpdateError` where ranks that have left would be needed."""
        if self.training.updater.divides_gradients:
            self.training.check_open()

    @property
    def num_state_bytes(self) -> int:
        """Bytes of the optimizer state that this rank keeps; with ``Sharded`` those of its own shard alone."""
        return self.training.updater.num_state_bytes
