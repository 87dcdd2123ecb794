"""One model in training: joins the update rule to the hooks on modules and gradients, and keeps them in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from syncline.errors import SynclineError, UpdateError
from syncline.fabric.progress import FORWARD
from syncline.pytorch.backward import GradientCollector, SparseGradients
from syncline.pytorch.buffers import BufferBroadcast
from syncline.pytorch.consistency import Consistency
from syncline.pytorch.detachable import Hook
from syncline.pytorch.divided_gradient import StandIns
from syncline.pytorch.flatten import WriteStatus, check_in_place
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.inner_calls import InnerCalls
from syncline.pytorch.joining import CLIP, PASS, SAVE, Joining, Save, check_join
from syncline.pytorch.notices import Notice, leaving_of
from syncline.pytorch.outside_gradients import OutsideGradients
from syncline.pytorch.samples import SampleCount
from syncline.pytorch.waiting import WaitingParameters
from syncline.pytorch.watch import StepWatch
from syncline.updates import Updater
from syncline.updates.class_tuner import ClassTuner
from syncline.updates.control import ControlStream
from syncline.updates.inner import NOT_DIVIDED
from syncline.updates.private_torch import backward_pass, is_compiled
from syncline.updates.report import PendingReport


class Training:
    """What ``distribute()`` installs; the optimizer that it returns is this object's face."""

    _after_pass: WriteStatus | None = None
    """Where the pass has made the new parameters already: how they were at its end, until the step."""
    tensors: frozenset[nn.Parameter]
    """The parameters that lie in its buckets."""
    num_idle_steps = 0
    """Steps to which this rank brought neither a backward pass nor a contribution."""

    def __init__(
        self,
        model: nn.Module,
        updater: Updater,
        samples: SampleCount,
        tuner: ClassTuner,
        buffers: BufferBroadcast,
        *,
        joins: ControlStream,
        check_every: int | None,
        notice: Callable[[], Notice],
        helpers: Sequence[int] = (),
    ) -> None:
        control = updater.collectives.control
        self.model = model
        self.fleet: Fleet | None = None
        """Where it is registered; it is told here, and not in a table, as the fleet keeps it: so both are freed."""
        self.updater = updater
        self.tuner = tuner
        self.samples = samples
        self._buffers = buffers
        self._joins = joins
        self._joining = Joining(joins, updater.optimizer) if helpers else None
        self.is_helper = control.rank in helpers
        """Whether this rank has no data, and follows the others in :meth:`serve`."""
        self.tensors = frozenset(tensor for bucket in updater.buckets for tensor in bucket.tensors)
        self._consistency = Consistency(model, updater, every=check_every)
        self._watch = _watch_steps(updater, notice)
        self.collector = GradientCollector(
            updater,
            updater.make_reports(),
            samples,
            self._watch,
            sparse=SparseGradients(model, updater.buckets, control) if updater.takes_sparse_gradients else None,
            outside=OutsideGradients(model, updater, self.tensors),
            before=self._before_backward,
            after=self._after_backward,
        )
        self._waiting = WaitingParameters(updater.buckets, updater.wait_parameters)
        self._stand_ins = StandIns(updater.dividing)
        self._grouped = _parameters_of(updater.optimizer)
        self._progress = updater.collectives.communicator.progress
        self._has_compiled_parts = self._following = False
        self._report_before: PendingReport | None = None
        self.calls = InnerCalls(updater)
        self._handles = [
            *self._forward_hooks(),
            *self._state_hooks(),
        ]
        self.is_closed = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes add to ``p.grad`` on this rank alone, until the next one outside."""
        was_synchronised, self.collector.is_synchronised = self.collector.is_synchronised, False
        try:
            yield
        finally:
            self.collector.is_synchronised = was_synchronised

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Within this context ranks may make different numbers of steps; who is done goes on in the others' steps."""
        check_join(self.updater, self.model, is_joining=self._joining is not None)
        self._joining = Joining(self._joins, self.updater.optimizer)
        try:
            yield
            self.follow()
        finally:
            self._joining = None

    def follow(self, save: Save | None = None) -> None:
        """Go on in the others' steps until all are done, within :meth:`join` or where there are helpers."""
        if self._joining is None:
            return
        self.zero_grad()
        self._buffers.begin_forward()  # before others wait for it
        self._following = True
        try:
            self._joining.follow(self, save)
        finally:
            self._following, self._joining = False, None

    def announce_save(self, told: Mapping[str, Any]) -> None:
        """Let those who follow take part in a checkpoint."""
        if self._joining is not None and not self._following:
            self._joining.announce(SAVE, told)

    def follow_pass(self) -> None:
        """Take part in a backward pass of others with no weight."""
        self.collector.run_empty()

    def follow_step(self) -> None:
        """Make the step of others."""
        self._stand_ins.begin_step()
        self._step()
        self.zero_grad()
        self._buffers.begin_forward()

    @property
    def is_joining(self) -> bool:
        """Whether it is within :meth:`join`."""
        return self._joining is not None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, without weight if this rank ran no backward pass; return the closure's loss."""
        self.check_open()
        if backward_pass() != -1:
            raise UpdateError(
                "step() was called within a backward pass, by a hook of it, where gradients are of this rank alone; "
                "call it after backward(), or let update=Sharded(step_in_backward=True) step each layer as early"
            )
        self.collector.forget_broken()
        self.samples.check_told_early()
        check_in_place(self.updater.buckets)
        self._check_unwritten()
        self._check_groups()
        loss, is_idle, is_evaluated = None, False, False
        if closure is not None and not self.updater.takes_closures:
            with torch.enable_grad():
                loss, closure, is_evaluated = closure(), None, True
        if closure is None:
            is_idle = self._make_complete()
        elif self._joining is not None:
            raise UpdateError(
                "Within join(), and with helpers, step(closure) is not served with AllReduce(), whose optimizer "
                "decides how often it evaluates the model; call step() without a closure"
            )
        if self._joining is not None:
            self._joining.announce_step()
        try:
            inner_loss = self._step(closure)
        except Exception as error:
            if is_evaluated and not isinstance(error, SynclineError):
                error.add_note(self._why_no_closure())
            raise
        if is_idle:
            self.zero_grad()  # there were none before, so the next backward pass must not add to those of the others
        return inner_loss if loss is None else loss

    def end_period(self) -> None:
        """Make the parameters of all ranks equal now, with a rule that lets them differ."""
        if self.updater.is_synchronous:
            return
        self._buffers.begin_forward()  # before others wait for it
        with self.calls.stepping():
            self.updater.end_period()
        self._end_step_of_buffers()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop all gradients, also combined ones that were not used for a step; or make them zeros."""
        if not self.calls.zero_grad(set_to_none=set_to_none) and any(p.grad is not None for p in self.tensors):
            return  # so it was meant
        if not set_to_none:
            for tensor in self.tensors:
                if tensor.grad is not None:
                    tensor.grad.zero_()
            return
        self._after_pass = None
        self.samples.drop_pass()
        self.updater.dividing.discard()
        for tensor in self.tensors:
            tensor.grad = None
        self.collector.has_local_gradients = False

    def clip_grad_norm(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the combined gradients to a norm of at most ``max_norm``; return what it was."""
        if self._joining is not None:
            self._joining.announce(CLIP, {"max_norm": max_norm, "norm_type": norm_type})
        try:
            return self.updater.dividing.clip_grad_norm(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        except (UpdateError, RuntimeError) as error:  # torch's own, where ranks have whole gradients
            if error_if_nonfinite and (origin := self._watch.origin(self.collector.report, self.updater.iteration + 1)):
                error.add_note(origin)
            raise

    def notices(self) -> dict[int, Notice]:
        """Return what ranks were told of their end, the same on all ranks at the end of the same step.

        Where a step does not wait for its report, it is that of the step before. Within :meth:`join`, and where there
        are helpers, whose ranks end steps in different places, nothing is told.
        """
        report = self.collector.report
        if self.updater.defers_parameters:
            report, self._report_before = self._report_before, report
        if report is None or self._joining is not None or not self.updater.is_synchronous:
            return {}
        return self._watch.notices(report)

    def leaving(self) -> int | None:
        """Return who leaves at the end of this step, where its report is there and tells that somebody does."""
        report = self.collector.report
        return None if report is None or not report.is_done else leaving_of(self._watch.notices(report))

    def synchronize(self) -> None:
        """Wait until parameters and buffers are final on this rank; raises what went wrong in the meantime."""
        self.updater.synchronize()
        if self.updater.defers_parameters:
            self._waiting.release()
        self._buffers.finish()

    def finish(self) -> None:
        """End what is under way on all ranks, before the fleet closes."""
        self.follow()
        if not self.updater.is_synchronous:
            self._buffers.begin_forward()
        with self.calls.stepping():
            self.updater.finish()
        self.synchronize()
        self._watch.read()
        self.tuner.finish()
        self._buffers.drain()

    def close(self) -> None:
        """Take the hooks off the model, which is a plain one from then on."""
        if self.is_closed:
            return
        self.is_closed = True
        self._waiting.release()
        self.collector.remove()
        self.calls.remove()
        for handle in self._handles:
            handle.remove()
        self.updater.close()

    def _forward_hooks(self) -> Iterator[Any]:
        if not isinstance(self.model, torch.jit.ScriptModule):  # which takes no hooks, and does not need them
            yield self.model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True, prepend=True)
            yield self.model.register_forward_hook(Hook(self._after_forward), with_kwargs=True)
        if not self.updater.defers_parameters:
            return
        for module in self.model.modules():
            buckets = self._waiting.buckets_of(module)
            if buckets and not isinstance(module, torch.jit.ScriptModule):
                yield module.register_forward_pre_hook(Hook(self._before_owner, buckets))

    def _state_hooks(self) -> Iterator[Any]:
        """Let whoever takes or loads the state of a module see final values."""
        for module in self.model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                yield module.register_state_dict_pre_hook(Hook(self._on_state))  # type: ignore[no-untyped-call]
                yield module.register_load_state_dict_pre_hook(Hook(self._on_state))  # type: ignore[no-untyped-call]

    def _on_state(self, *_: Any) -> None:
        self.synchronize()

    def _make_complete(self) -> bool:
        """See that there are combined gradients to step on; return whether this rank has brought nothing to them."""
        is_idle = False
        if not self._has_gradients():
            self._buffers.begin_forward()
            self.updater.dividing.discard()
            is_idle = not self.collector.contributions.positions
            self.num_idle_steps += is_idle
            self.collector.run_empty()
        self._stand_ins.begin_step()
        return is_idle

    def _has_gradients(self) -> bool:
        """Whether there are gradients to step on, which must be those of all ranks."""
        has_gradients = any(tensor.grad is not None for tensor in self.tensors)
        if has_gradients and self.collector.has_local_gradients:
            raise UpdateError(
                "step() came after a backward pass under no_sync(), so the gradients of other ranks are missing; run "
                "the last backward pass of each step outside no_sync()"
            )
        return has_gradients

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        with self._progress.stepping(self.updater.step_number):
            return self._make_step(closure)

    def _make_step(self, closure: Callable[[], Any] | None) -> Any:
        self._after_pass = None
        self.tuner.begin_step()
        is_compiled = self._has_compiled_parts or self._waiting.is_compiled or has_compiled_parts(self.model)
        overlaps = self.updater.defers_parameters and not (is_compiled or self._waiting.is_held)
        if overlaps:
            self._waiting.begin()
        loss = None
        with self.calls.stepping():
            if closure is None:
                self.updater.step()
            else:
                loss = self.updater.step_with_closure(self._averaged(closure))
        if self._stand_ins:
            # Graphs that are kept over the step hold values that the all-gather is about to overwrite.
            torch.autograd.graph.increment_version(self.tensors)
        if self.updater.is_synchronous:
            self._end_step_of_buffers()
        self.tuner.end_step()
        self.samples.end_step()
        if not overlaps:
            self.synchronize()
        self._watch.begin_step(self.collector.report, self.updater.iteration)
        return loss

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Let the closure's loss be the mean over ranks, so that an optimizer that decides by it does so alike."""
        control = self.updater.collectives.control

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._has_gradients()
            self._stand_ins.begin_step()
            weight = self.collector.last_weight
            try:
                own = 0.0 if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UpdateError(f"closure must return the loss, one number, not {loss!r}") from error
            pair = torch.tensor([own * weight if weight else 0.0, weight], dtype=torch.float64)
            total, weights = control.sum(pair, "loss of a closure").tolist()
            if loss is None:
                return None  # as in one process: Lightning's closure, where the loop has made the backward pass
            mean = total / weights if weights else own
            return loss.new_tensor(mean) if isinstance(loss, torch.Tensor) else mean

        return evaluate

    def _before_forward(self, _: nn.Module, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._has_compiled_parts = True
            return
        if backward_pass() != -1:
            return  # a checkpoint runs the model again, within the backward pass
        self.collector.forget_broken()
        self._buffers.finish()
        self._progress.enter(FORWARD)
        if self.updater.is_synchronous and self._joining is None:
            self._buffers.begin_again()
        if not torch.is_grad_enabled():
            self._finish_waiting()  # PyTorch may take fused paths here, which it does not take with waiting parameters
            return
        self._buffers.begin_forward()
        self.tuner.begin_forward()

    def _after_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if backward_pass() == -1:
            self._progress.leave()
            self._buffers.end_forward(is_synchronised=self.collector.is_synchronised and torch.is_grad_enabled())
            if torch.is_grad_enabled():
                self._watch.see_batch(args, kwargs)
                self.tuner.end_forward()
        if torch.is_grad_enabled():
            self.collector.watch_outputs(output, self.samples.see(args, kwargs))

    def _before_owner(self, buckets: tuple[int, ...], *_: Any) -> None:
        """Wait for what a module has itself: its forward may read that by any way, also by vmap or C++."""
        if not torch.compiler.is_compiling():
            self._waiting.finish(buckets)

    def _finish_waiting(self) -> None:
        if self.updater.defers_parameters:
            self._waiting.finish()

    def _before_backward(self) -> None:
        self.check_open()
        self._watch.read()
        if sum(tensor.grad is not None for tensor in self.tensors) <= 1:  # only that whose gradient begins the pass
            self._watch.forget()
        if self._joining is not None and not self._following:
            self._joining.announce(PASS)
        self._consistency.begin_pass(is_joining=self._joining is not None)
        self._stand_ins.begin_pass()
        if self.updater.steps_in_backward:
            check_in_place(self.updater.buckets)

    def _after_backward(self, exist: Sequence[bool] | None, uncleared: dict[int, torch.Tensor]) -> None:
        """Show the combined gradients where PyTorch looks for them; ``uncleared`` are those that were there before."""
        if self.updater.steps_in_backward:
            self._after_pass = WriteStatus.take(self.updater.buckets)
        if exist is None:
            self._stand_ins.show()
            return
        for bucket in self.updater.buckets:
            bucket.show_gradients(exist, uncleared)

    def _end_step_of_buffers(self) -> None:
        self._buffers.end_step()
        self._buffers.finish()  # what the loop writes into a buffer from here on must not be overwritten

    def _why_no_closure(self) -> str:
        """Say why the user's optimizer was given none, though they gave one: it may have failed by that."""
        name = type(self.updater.optimizer).__name__
        return (
            f"With {self.updater.rule_name}() the closure is evaluated once, before the step, and {name}.step() is "
            "called without it; an optimizer that evaluates it itself is served by update=AllReduce()"
        )

    def _check_unwritten(self) -> None:
        if self._after_pass is not None and not self._after_pass.is_same_as(WriteStatus.take(self.updater.buckets)):
            raise UpdateError(
                "Parameters were written between backward() and step(), but Sharded(step_in_backward=True) has updated "
                "them from what they were; write them after step(), or before backward(), or use Sharded() without "
                "step_in_backward. To go on without this update, call optimizer.zero_grad()"
            )

    def _check_groups(self) -> None:
        for group in self.updater.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self.tensors and parameter.numel():
                    raise UpdateError(
                        f"{_describe(parameter, self.model)} was frozen at distribute() or is new, and requires a "
                        "gradient. Unfreeze it before, and freeze it again after that until it is to be trained; or "
                        "leave it out of this optimizer, and distribute() the model with a second one, which has it, "
                        "once it is unfrozen"
                    )
        # Where ranks have whole gradients the user's optimizer decides what it steps; else nobody reads the lists.
        if self.updater.divides_gradients and _parameters_of(self.updater.optimizer) != self._grouped:
            raise UpdateError(
                "The list of parameters in a group of optimizer.param_groups was changed after distribute(), which "
                f"Sharded() cannot follow; freeze a parameter by dropping its gradient, or use {NOT_DIVIDED}"
            )

    def check_open(self) -> None:
        """Raise :class:`UpdateError` if the fleet was closed."""
        if self.is_closed:
            raise UpdateError("The fleet of this model was closed; call syncline.init() and distribute() again")


def _watch_steps(updater: Updater, notice: Callable[[], Notice]) -> StepWatch:
    return StepWatch(
        updater.buckets,
        rank=updater.collectives.control.rank,
        ranks=updater.reporting_ranks,
        notice=notice,
        heard=lambda: updater.nonfinite_origin,
    )


def _describe(parameter: nn.Parameter, model: nn.Module) -> str:
    """Say which parameter of the model it is, or what it looks like if it is none of them."""
    name = next((name for name, one in model.named_parameters(remove_duplicate=False) if one is parameter), None)
    return f"A parameter of shape {tuple(parameter.shape)}" if name is None else f"Parameter {name!r}"


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Say which parameters are in which group."""
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether the model or a module in it is compiled by ``torch.compile`` or ``torch.jit``, as far as it can tell."""
    return any(isinstance(module, torch.jit.ScriptModule) or is_compiled(module) for module in model.modules())
