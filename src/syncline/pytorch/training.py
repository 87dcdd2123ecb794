"""One model in training: joins the update rule to the hooks on modules and gradients, and keeps them in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.backward import GradientCollector
from syncline.pytorch.buffers import BufferBroadcast
from syncline.pytorch.detachable import Hook
from syncline.pytorch.divided_gradient import DividedGradient
from syncline.pytorch.flatten import check_in_place
from syncline.pytorch.reading import Reading
from syncline.pytorch.samples import SampleCount
from syncline.updates import Updater
from syncline.updates.report import LocalReports, StepReports
from syncline.updates.steering import Unsteered


class Training:
    """What ``distribute()`` installs; the optimizer that it returns is this object's face."""

    def __init__(
        self,
        model: nn.Module,
        updater: Updater,
        samples: SampleCount,
        steering: Unsteered,
        *,
        broadcast_buffers: bool,
    ) -> None:
        control = updater.channel.control
        self.model = model
        self.updater = updater
        self.steering = steering
        self._samples = samples
        is_synchronous = updater.is_synchronous
        self._buffers = BufferBroadcast(model, control, is_enabled=broadcast_buffers and is_synchronous)
        reports = StepReports(control) if is_synchronous else LocalReports()
        self._collector = GradientCollector(
            updater, reports, samples, before=self._before_backward, after=self._after_backward
        )
        self._reading = Reading(model, updater.buckets, self._wait_parameters) if updater.defers_parameters else None
        self._bucketed = frozenset(tensor for bucket in updater.buckets for tensor in bucket.tensors)
        self._stand_ins = self._make_stand_ins()
        self._forward_ns = 0
        self._handles = [
            model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self._after_forward), with_kwargs=True),
            *self._state_hooks(),
        ]
        self.is_closed = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes add to ``p.grad`` on this rank alone, until the next one outside."""
        was_synchronised, self._collector.is_synchronised = self._collector.is_synchronised, False
        try:
            yield
        finally:
            self._collector.is_synchronised = was_synchronised

    @property
    def tensors(self) -> frozenset[nn.Parameter]:
        """The parameters that lie in this training's buckets."""
        return self._bucketed

    def batch_size(self, num_samples: float) -> None:
        """Weight this rank's gradient of the current step by ``num_samples``."""
        self._samples.tell(num_samples)

    def step(self) -> None:
        """Update the parameters, or begin to; a rank that had no data takes part with no weight."""
        self._check_open()
        self._collector.forget_broken()
        check_in_place(self.updater.buckets)
        self._check_unfrozen()
        has_gradients = any(tensor.grad is not None for tensor in self._bucketed)
        if has_gradients and self._collector.has_local_gradients:
            raise UpdateError(
                "step() came after a backward pass under no_sync(), so the gradients of other ranks are missing; run "
                "the last backward pass of each step outside no_sync()"
            )
        if not has_gradients:
            self._forget_cleared()
            self._collector.run_empty()
        else:
            self._check_stand_ins()
        self.steering.begin_step()
        self.updater.step()
        if self._stand_ins:
            # Graphs that are kept over the step hold values that the all-gather is about to overwrite.
            torch.autograd.graph.increment_version(self._stand_ins)
            self._clear_gradients()
        self._buffers.start()
        self.steering.end_step()

    def zero_grad(self) -> None:
        """Drop all gradients, also combined ones that were not used for a step."""
        self.updater.discard()
        self._clear_gradients()
        self._collector.has_local_gradients = False

    def synchronize(self) -> None:
        """Wait until parameters and buffers are final on this rank; raises what went wrong in the meantime."""
        self.updater.synchronize()
        self._buffers.finish()

    def close(self) -> None:
        """Take the hooks off the model, which is a plain one from then on."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._reading is not None:
            self._reading.remove()
        self._collector.remove()
        for handle in self._handles:
            handle.remove()
        self.updater.close()

    def _make_stand_ins(self) -> Mapping[nn.Parameter, DividedGradient]:
        if not self.updater.divides_gradients:
            return {}
        return {
            tensor: DividedGradient(tensor, slot, self.updater)
            for bucket in self.updater.buckets
            for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True)
        }

    def _state_hooks(self) -> Iterator[Any]:
        """Let whoever takes or loads the state of a module see final values."""
        for module in self.model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                yield module.register_state_dict_pre_hook(Hook(self._on_state))  # type: ignore[no-untyped-call]
                yield module.register_load_state_dict_pre_hook(Hook(self._on_state))  # type: ignore[no-untyped-call]

    def _on_state(self, *_: Any) -> None:
        self.synchronize()

    def _before_forward(self, _: nn.Module, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint runs the model again, within the backward pass
        self._collector.forget_broken()
        self._buffers.finish()
        if self.updater.channel.trace.enabled:  # torch.compile traces through here, and knows no clock
            self._forward_ns = self.updater.channel.trace.now_ns()
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.steering.begin_forward()

    def _after_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        trace = self.updater.channel.trace
        if trace.enabled:
            trace.span("forward", "compute", self._forward_ns, trace.now_ns())
        if torch.is_grad_enabled():
            self._samples.see(args, kwargs)
            if not torch.compiler.is_compiling():
                self.steering.end_forward()
            self._collector.watch_outputs(output)

    def _wait_parameters(self, buckets: tuple[int, ...]) -> None:
        if torch.compiler.is_compiling():
            self.updater.wait_parameters(buckets)
        else:
            self.steering.wait(buckets, self.updater.wait_parameters)

    def _before_backward(self) -> None:
        self._check_open()
        self._forget_cleared()

    def _forget_cleared(self) -> None:
        """Forget combined gradients that were dropped without us, as ``model.zero_grad()`` does."""
        if self._stand_ins and not any(tensor.grad is stand_in for tensor, stand_in in self._stand_ins.items()):
            self.updater.discard()

    def _after_backward(self, exist: Sequence[bool] | None) -> None:
        """Show the combined gradients where PyTorch looks for them."""
        if exist is None:
            for tensor, stand_in in self._stand_ins.items():
                tensor.grad = stand_in
            return
        for bucket in self.updater.buckets:
            bucket.show_gradients(exist)

    def _clear_gradients(self) -> None:
        for tensor in self._bucketed:
            tensor.grad = None

    def _check_stand_ins(self) -> None:
        """Refuse gradients that the user put in place of the combined ones: the step would not see them."""
        for tensor, stand_in in self._stand_ins.items():
            if tensor.grad is not stand_in:
                raise UpdateError(
                    f"The gradient of {stand_in.slot.name!r} was replaced or dropped after backward(), but with "
                    "Sharded() no rank has it whole, so the step would not see that; use update=AllReduce(), or freeze "
                    "the parameter before distribute()"
                )

    def _check_unfrozen(self) -> None:
        for group in self.updater.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._bucketed and parameter.numel():
                    raise UpdateError(
                        f"A parameter of shape {tuple(parameter.shape)} was frozen at distribute() and requires a "
                        "gradient now; unfreeze parameters before distribute(), or give these to it in a second "
                        "optimizer"
                    )

    def _check_open(self) -> None:
        if self.is_closed:
            raise UpdateError("The fleet of this model was closed; call syncline.init() and distribute() again")
