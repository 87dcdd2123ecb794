"""Collects gradients while autograd makes them, and hands each bucket to the update rule when it is complete.

Autograd owns ``p.grad``. A hook behind each accumulation (and behind the user's own hooks on the parameter) only counts
it: there may be thousands. In a synchronised backward pass the gradients of a bucket are moved into it all at once,
weighted, when it has all of them. The cases:

- Under ``no_sync`` nothing is moved; ``p.grad`` grows until the first synchronised pass takes it.
- Reentrant checkpoints let a hook fire several times. How often is learnt in the first step, in which buckets leave at
  the end of the backward pass; later a bucket leaves when every gradient has come as often as it ever did.
- Parameters without a gradient are found when the backward pass ends, and take part with zeros.
- A pass that raises (no memory, an error of the user's) never ends; the next forward pass finds that out, and drops
  what it has brought.
- Passes inside a pass (checkpoints again) have ends of their own; the outer one is recognised by the model's outputs.
  Where the model was not called itself, each is a pass of its own, and what they bring adds up.
- Several passes before a step add up. Where each rank has whole gradients, ``p.grad`` holds the mean of the passes
  before and autograd adds to it: the mean of equal terms is that term. Divided gradients are carried (``Updater``).
- What others contributed (:mod:`syncline.pytorch.contributions`) joins each bucket when it leaves.
- A sparse gradient travels dense, with a count for each row of the ranks that have it; so it is sparse again after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.fabric.progress import BACKWARD
from syncline.pytorch.contributions import Contributions, Gradients
from syncline.pytorch.detachable import Hook
from syncline.pytorch.divided_gradient import DividedGradient
from syncline.pytorch.outside_gradients import OutsideGradients
from syncline.pytorch.samples import ForwardPass, SampleCount
from syncline.pytorch.watch import StepWatch
from syncline.updates.bucket import Bucket, Slot, placed
from syncline.updates.control import ControlStream
from syncline.updates.private_torch import (
    at_end_of_backward,
    backward_pass,
    is_backward_compiled,
    tree_leaves,
    uncompiled,
)
from syncline.updates.report import LocalReports, PendingReport, StepReports
from syncline.updates.rule import Updater


class GradientCollector:
    """The hooks on the gradients of one model. ``before`` and ``after`` run around each synchronised backward pass.

    ``sparse`` takes the sparse gradients, if the update rule gives every rank whole ones. ``outside`` averages those of
    parameters that are in no bucket.
    """

    def __init__(
        self,
        updater: Updater,
        reports: StepReports | LocalReports,
        samples: SampleCount,
        watch: StepWatch,
        *,
        sparse: SparseGradients | None,
        outside: OutsideGradients,
        before: Callable[[], None],
        after: Callable[[Sequence[bool] | None, dict[int, torch.Tensor]], None],
    ) -> None:
        self._sparse = sparse
        self._outside = outside
        self._updater = updater
        self._progress = updater.collectives.communicator.progress
        self._buckets = updater.buckets
        self._reports = reports
        self._samples = samples
        self._watch = watch
        self._before = before
        self._after = after
        self._sparse_positions = sparse.positions if sparse is not None else frozenset()
        self.contributions = Contributions(self._buckets, sparse=self._sparse_positions)
        num_parameters = sum(len(bucket.plan.slots) for bucket in self._buckets)
        self._expected = [1] * num_parameters
        self._fired = [0] * num_parameters
        self._remaining: list[int] = []
        self._has_learnt = False
        self._is_running = False
        self._outer_task = -1
        self._uncleared: dict[int, torch.Tensor] = {}
        """Gradients that were there when the pass began, by position: who keeps one finds the new gradient in it."""
        self.last_weight = 0.0
        """This rank's weight in the last pass."""
        self._expected_total = 1.0
        self._scale = 1.0
        self.is_synchronised = True
        self.has_local_gradients = False
        self.report: PendingReport | None = None
        """The report of the last pass."""
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        for bucket, slot, parameter in placed(self._buckets):
            self._hear(parameter, partial(self._on_gradient, bucket, slot, parameter))
        for parameter in outside.candidates:
            self._hear(parameter, partial(self._on_outside, parameter))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()

    def watch_outputs(self, outputs: Any, forward: ForwardPass) -> None:
        """Recognise the backward pass that begins at these outputs of the model as the outer one."""
        for leaf in tensors_in(outputs):
            if leaf.requires_grad:
                leaf.register_hook(Hook(self._on_output, forward))  # type: ignore[no-untyped-call]

    def forget_broken(self) -> None:
        """Forget a pass that raised before its end: the next one begins anew, unless gradients had left already.

        Call it where no pass is under way. That gradients had left, the update rule says when the next pass begins.
        """
        if self._outer_task == -1:
            return
        if self._is_running:
            self._drop_fired()
        else:
            self._samples.forget_pass()
        self._is_running, self._outer_task = False, -1

    def contribute(self, gradients: Gradients, num_samples: float) -> None:
        """Let the next pass of this rank bring these too: means over so many samples."""
        if not self._updater.is_synchronous:
            raise UpdateError(
                f"contribute() is for rules in which every rank makes every step, not {self._updater.rule_name}(); use "
                "AllReduce() or Sharded()"
            )
        if not self._samples.is_counting:
            raise UpdateError(
                "contribute() weighs gradients by their samples, and here every rank that runs a backward pass counts "
                '1; write distribute(..., samples="batch"), on every rank'
            )
        has_gradients = any(parameter.grad is not None for bucket in self._buckets for parameter in bucket.tensors)
        if self._is_running or (has_gradients and not self.has_local_gradients):
            raise UpdateError(
                "contribute() came after the backward pass that it belongs to began, or before the gradients of the "
                "last step were dropped; call it before backward(), and zero_grad() after step()"
            )
        self.contributions.add(gradients, num_samples)

    def run_empty(self) -> None:
        """Take part in a pass without a backward pass: what was contributed, else no weight and zeros."""
        self._begin(0.0)
        self._finish()

    def _hear(self, parameter: torch.nn.Parameter, hook: Callable[[Any, Any], None]) -> None:
        """Call ``hook`` after each accumulation."""
        node = _accumulation(parameter)
        self._nodes.append(node)  # a parameter keeps its node only as long as somebody else does
        self._handles.append(node.register_hook(hook))

    @uncompiled
    def _on_output(self, forward: ForwardPass, _: torch.Tensor) -> None:
        task = backward_pass()
        self._samples.reach(forward, task)
        if self.is_synchronised:
            self._begin_task(task)
        self._enter_phase()

    def _begin_task(self, task: int) -> None:
        if self._outer_task == -1:
            if is_backward_compiled():
                raise UpdateError(
                    "Compiled autograd runs this backward pass, and tells nobody of its end, so gradients would stay "
                    "this rank's own; leave torch._dynamo.config.compiled_autograd off: torch.compile() of a model "
                    "compiles its backward pass without it"
                )
            self._outer_task = task
            at_end_of_backward(self._on_end)

    def _enter_phase(self) -> None:
        """Be in the backward phase until the end of the pass, and of what was to be done then before this came."""
        if self._progress.phase != BACKWARD:
            self._progress.enter(BACKWARD)
            at_end_of_backward(self._progress.leave)

    @uncompiled
    def _on_gradient(self, bucket: Bucket, slot: Slot, parameter: torch.nn.Parameter, _: Any, __: Any) -> None:
        if parameter.grad is None:  # autograd came here with nothing
            return
        if not self.is_synchronised:
            self.has_local_gradients = True
            return
        if not self._is_running:
            self._begin_first()
        index, position = bucket.index, slot.position
        fired = self._fired[position] + 1
        if self._has_learnt and self._remaining[index] <= 0:
            self._expected[position] = fired
            raise UpdateError(
                f"Parameter {slot.name!r} got another gradient after its bucket had left: the model was used in "
                "a way that earlier steps did not show; use non-reentrant checkpoints (use_reentrant=False)"
            )
        self._fired[position] = fired
        if fired <= self._expected[position]:
            self._remaining[index] -= 1
            if self._has_learnt and self._remaining[index] == 0:
                self._leave(bucket, is_early=self.last_weight > 0)

    @uncompiled
    def _on_outside(self, parameter: torch.nn.Parameter, _: Any, __: Any) -> None:
        if self._outside.note(parameter) and self.is_synchronised and not self._is_running:
            self._begin_first()

    def _begin_first(self) -> None:
        self._begin_task(backward_pass())
        self._enter_phase()
        self._begin(self._samples.weight())

    def _begin(self, weight: float) -> None:
        self._before()
        self._updater.begin_backward()
        if not self._updater.divides_gradients:
            self._keep_apart()
        if self._sparse is not None:
            self._sparse.start_pass()
        self.last_weight = weight
        self._expected_total = self._reports.expected_total(weight + self.contributions.weight)
        self._scale = weight / self._expected_total
        self._updater.weigh(weight + self.contributions.weight, self._expected_total)
        self._fired = [0] * len(self._fired)
        self._remaining = [sum(self._expected[slot.position] for slot in bucket.plan.slots) for bucket in self._buckets]
        self._is_running = True

    def _keep_apart(self) -> None:
        """See that the pass that begins writes into no gradient that the program keeps but those it adds to."""
        self._uncleared = {
            slot.position: tensor.grad
            for _, slot, tensor in placed(self._buckets)
            if tensor.grad is not None and tensor.grad.layout is torch.strided
        }
        for bucket in self._buckets:
            bucket.renew_gradients(self._uncleared)

    def _take(self, bucket: Bucket) -> None:
        """Move the gradients of a bucket into it, those too that were accumulated before this pass; zeros for none."""
        values: list[torch.Tensor | None] = []
        special = self._uncleared.keys() | self._sparse_positions
        for slot, parameter in zip(bucket.plan.slots, bucket.tensors, strict=True):
            gradient = parameter.grad
            if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided or slot.position in special:
                gradient = self._special(slot, gradient)
            values.append(gradient)
            if gradient is not None:
                parameter.grad = None
                if not self._fired[slot.position]:
                    self._fired[slot.position] = 1
        self._updater.wait_parameters((bucket.index,))
        bucket.fill_gradients(values, self._scale)

    def _special(self, slot: Slot, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return what this rank's pass has brought where that is not simply ``p.grad``; None for nothing."""
        position = slot.position
        if gradient is None or (isinstance(gradient, DividedGradient) and gradient.fresh is None):
            return None
        if position in self._uncleared and self._uncleared[position] is not gradient:
            del self._uncleared[position]  # replaced meanwhile, or a pass with create_graph
        if isinstance(gradient, DividedGradient):
            gradient = gradient.take_fresh()
        if self._sparse is not None and position in self._sparse_positions:
            gradient = self._sparse.take(position, gradient)
        if gradient.layout is not torch.strided:
            raise UpdateError(
                f"The gradient of {slot.name!r} is {gradient.layout}; make the layer with sparse=False, or use "
                "update=AllReduce(), which serves nn.Embedding and nn.EmbeddingBag with sparse=True"
            )
        return gradient

    def _drop_fired(self) -> None:
        """Drop what a pass has brought that goes no further."""
        for _, slot, parameter in placed(self._buckets):
            if self._fired[slot.position]:
                parameter.grad = None

    @uncompiled
    def _on_end(self) -> None:
        self._outer_task = -1
        if self._is_running:
            self._finish()
        else:
            self._outside.check_known()

    def _finish(self) -> None:
        has_left = [self._has_learnt and remaining == 0 for remaining in self._remaining]
        for bucket in self._buckets:
            if not has_left[bucket.index]:
                self._leave(bucket)
        contributed = self.contributions
        present = [
            (fired > 0 and self.last_weight > 0) or position in contributed.positions
            for position, fired in enumerate(self._fired)
        ]
        notes = (self._samples.batch if self.last_weight else -1.0, *self._watch.notes())
        weight = self.last_weight + contributed.weight
        contributed.clear()
        self.report = self._reports.start(weight, self._expected_total, present, notes, step=self._updater.step_number)
        exist = self._updater.finish_backward(self.report)
        self._outside.average(self.last_weight)
        if self._fired != self._expected:
            self._expected = [max(old, new) for old, new in zip(self._expected, self._fired, strict=True)]
        self._has_learnt = self._has_learnt or any(self._fired)
        self._is_running = False
        self.has_local_gradients = False
        self._after(exist, self._uncleared)
        self._uncleared = {}
        if self._sparse is not None and exist is not None:
            self._sparse.show(exist)
        self._samples.end_pass()

    def _leave(self, bucket: Bucket, *, is_early: bool = False) -> None:
        """Hand a complete bucket to the update rule; early, if this rank's own pass made all of it."""
        self._take(bucket)
        self.contributions.join(bucket, 1.0 / self._expected_total)
        self._watch.look(bucket)
        bucket.has_left_early = is_early
        self._updater.reduce(bucket)


def _accumulation(parameter: torch.nn.Parameter) -> Any:
    """Return the node of the graph that adds to ``p.grad``: hooks behind it come after all hooks on the parameter."""
    with torch.enable_grad():
        (node, _), *_ = parameter.expand_as(parameter).grad_fn.next_functions  # type: ignore[union-attr]
    return node


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a model returned, also within dataclasses."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))


# Sparse gradients of embeddings, where every rank gets whole ones: they travel dense, and are sparse again after it.
#
# A parameter of a module with ``sparse=True`` has gradients for the rows that were looked up. Which rows any rank has
# is told by one count for each row, summed over the ranks; so the optimizer touches the rows that it would touch in one
# process with all batches. One more count per parameter says whether some rank's gradient is dense, as that of a tied
# weight: then all ranks have it dense.


class SparseGradients:
    """The sparse gradients of one model; parameters go by their position in buckets."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], control: ControlStream) -> None:
        self._control = control
        weights = {id(module.weight) for module in model.modules() if getattr(module, "sparse", False) is True}
        self._places: dict[int, tuple[slice, nn.Parameter, Bucket, Slot]] = {}
        """By position, where the counts of a parameter lie: its rows, then the one for dense gradients."""
        start = 0
        for bucket, slot, parameter in placed(buckets):
            if id(parameter) in weights and len(slot.shape) > 0:
                stop = start + slot.shape[0] + 1
                self._places[slot.position] = slice(start, stop), parameter, bucket, slot
                start = stop
        self._counts = torch.zeros(start, dtype=torch.int32)

    @property
    def positions(self) -> frozenset[int]:
        """The parameters whose gradients may be sparse."""
        return frozenset(self._places)

    def take(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        """Note the rows of this rank's gradient, and return it dense."""
        counts = self._counts[self._places[position][0]]
        if gradient.layout is torch.strided:
            counts[-1] = 1
            return gradient
        gradient = gradient.coalesce()
        counts[gradient.indices()[0].cpu()] = 1
        return gradient.to_dense()

    def start_pass(self) -> None:
        """Forget the rows of the pass before."""
        self._counts.zero_()

    def show(self, exist: Sequence[bool]) -> None:
        """Put the combined gradients that exist (by position) where PyTorch looks for them; a collective."""
        if not self._places:
            return
        self._control.sum(self._counts, "rows of sparse gradients")
        for position, (where, parameter, bucket, slot) in self._places.items():
            counts = self._counts[where]
            if not exist[position] or counts[-1]:
                continue
            place = bucket.gradient(slot)
            rows = counts[:-1].nonzero().to(place.device)
            parameter.grad = torch.sparse_coo_tensor(
                rows.T, place[rows[:, 0]], place.shape, is_coalesced=True, check_invariants=False
            )
