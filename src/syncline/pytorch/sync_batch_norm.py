"""``nn.SyncBatchNorm`` on the fleet's collectives: statistics of a layer over the batches of all ranks.

torch's own synchronises within ``torch.distributed`` alone, and on accelerators alone; elsewhere it is a plain
BatchNorm without a word. :func:`synchronise_layers` makes every such layer of a model sum over the fleet, forward and
backward, each with one small all-reduce in float64, on any device. The class of a layer is exchanged for a subclass
until :func:`restore_layers`; copies and pickles are of the plain class.

Numerics: each rank has its own mean and its squared differences from it. They are moved to a shift that all ranks know
(the layer's last mean), added, and moved to the common mean, after Chan, Golub and LeVeque, "Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances" (1979). If the shift was so far away that digits were lost, all
ranks see that in the same sums, and add once more with the new mean as the shift.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from syncline import updates
from syncline.errors import UpdateError
from syncline.updates.control import ControlStream
from syncline.updates.rule import UpdateRule

_ATTRIBUTE = "_statistics_of_fleet"
_MAX_LOSS = 1e4
"""A variance may be so many times smaller than the squared distance from the shift: 4 of 16 digits are lost then."""

Moments = tuple[float, torch.Tensor, torch.Tensor]
"""Of each channel: the number of values, their mean, and the sum of their squared differences from it."""


def find_layers(model: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    """Return the layers of ``model`` that are to be synchronised, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}


def check_layers(model: nn.Module, rule: UpdateRule) -> None:
    """Raise :class:`UpdateError` if the ``SyncBatchNorm`` layers of ``model`` cannot be synchronised."""
    for name, layer in find_layers(model).items():
        if isinstance(rule, updates.Overlapped | updates.Clustered | updates.LocalSteps):
            raise UpdateError(
                f"{name!r} is a SyncBatchNorm, whose forward pass waits for every rank, but with "
                f"{type(rule).__name__}() no rank waits for another; use BatchNorm or GroupNorm, or update=Sharded()"
            )
        if layer.process_group is not None:
            raise UpdateError(
                f"{name!r} is a SyncBatchNorm with a process_group, but distribute() synchronises over all ranks; "
                "convert the model without process_group"
            )
        if _ATTRIBUTE not in vars(layer) and type(layer).forward is not nn.SyncBatchNorm.forward:
            raise UpdateError(
                f"{name!r} is a {type(layer).__name__} with a forward() of its own, which distribute() would replace; "
                "use nn.SyncBatchNorm itself"
            )


def check_joinable(model: nn.Module) -> None:
    """Raise :class:`UpdateError` if a rank that is done would be missed in a layer's sums."""
    for name in find_layers(model):
        raise UpdateError(
            f"join() lets ranks end early, and helpers make no forward passes, but that of {name!r}, a SyncBatchNorm, "
            "waits for every rank; give all ranks as many batches, or use BatchNorm"
        )


def synchronise_layers(
    model: nn.Module, control: ControlStream, loss_weight: Callable[[], float]
) -> tuple[nn.SyncBatchNorm, ...]:
    """Make every ``SyncBatchNorm`` of ``model`` synchronise over the fleet; return those that did not before.

    In training, forward and backward passes through a layer are collectives then: every rank makes as many, in the
    same order, if need be with an empty batch. ``loss_weight`` returns the weight of this rank's loss in the mean over
    ranks; what the losses of other ranks say about this rank's inputs is weighed by it.
    """
    layers = {name: layer for name, layer in find_layers(model).items() if _ATTRIBUTE not in vars(layer)}
    for name, layer in layers.items():
        setattr(layer, _ATTRIBUTE, LayerStatistics(name, control, loss_weight))
        layer.__class__ = _synchronised(type(layer))  # type: ignore[arg-type]
    return tuple(layers.values())


def restore_layers(layers: Iterable[nn.SyncBatchNorm]) -> None:
    """Make the layers plain again."""
    for layer in layers:
        layer.__class__ = type(layer).__bases__[0]
        delattr(layer, _ATTRIBUTE)


class LayerStatistics:
    """The sums of one layer over all ranks."""

    def __init__(self, name: str, control: ControlStream, loss_weight: Callable[[], float]) -> None:
        self._name = name
        self._control = control
        self._loss_weight = loss_weight
        self._shift: torch.Tensor | None = None

    def moments(self, inputs: torch.Tensor) -> Moments:
        """Return the moments of ``inputs`` (batch, channels, ...) of all ranks together: float64, in host memory."""
        own = _own_moments(inputs)
        shift = torch.zeros_like(own[1]) if self._shift is None else self._shift
        (count, mean, squares), is_precise = self._add_moments(own, shift)
        if not is_precise:
            (count, mean, squares), _ = self._add_moments(own, mean)
        self._shift = torch.where(mean.isfinite(), mean, 0.0)
        return count, mean, squares

    def add_gradients(self, *sums: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return sums over all ranks, weighted as their losses and then in the unit of this rank's loss."""
        weight = self._loss_weight()
        together = torch.stack(sums).to("cpu", torch.float64)
        total = self._control.sum(together * weight, f"gradients of {self._name}")
        return tuple((total / weight if weight else total).to(sums[0].device, sums[0].dtype))

    def _add_moments(self, own: Moments, shift: torch.Tensor) -> tuple[Moments, bool]:
        count, mean, squares = own
        offset = mean - shift
        sums = torch.stack([torch.full_like(mean, count), count * offset, squares + count * offset**2])
        counts, offset, squares = self._control.sum(sums, f"statistics of {self._name}")
        total = float(counts[0])
        if total <= 1:
            raise UpdateError(
                f"SyncBatchNorm {self._name!r} needs more than one value of each channel on all ranks together, but "
                f"they have {total:g}; use larger batches, or model.eval()"
            )
        offset = offset / total
        moved = total * offset**2
        squares = (squares - moved).clamp(min=0)
        return (total, shift + offset, squares), not bool((moved > _MAX_LOSS * squares).any())


class _Normalise(torch.autograd.Function):
    """Normalise with the moments of all ranks, and let gradients flow through these."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: LayerStatistics,
        moments: Moments,
        eps: float,
    ) -> torch.Tensor:
        """Return the normalised ``inputs``, in their number type."""
        count, mean, squares = moments
        wide = _wide(inputs)
        mean, scale = (value.to(wide) for value in (mean, (squares / count + eps).rsqrt()))
        ctx.save_for_backward(inputs, weight, mean, scale)
        ctx.statistics, ctx.count = statistics, count
        output = wide - _spread(mean, wide)
        output *= _spread(scale if weight is None else scale * weight, wide)
        if bias is not None:
            output += _spread(bias.to(wide), wide)
        return output.to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of the inputs, and this rank's part of those of weight and bias."""
        inputs, weight, mean, scale = ctx.saved_tensors
        gradient, difference = _wide(gradient), _wide(inputs) - _spread(mean, inputs)
        axes = _axes(inputs)
        of_output, of_difference = gradient.sum(axes), (gradient * difference).sum(axes)
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            all_output, all_difference = ctx.statistics.add_gradients(of_output, of_difference)
            slope = scale**2 * all_difference / ctx.count
            of_inputs = gradient - _spread(all_output / ctx.count, inputs) - difference * _spread(slope, inputs)
            of_inputs *= _spread(scale if weight is None else scale * weight, inputs)
            of_inputs = of_inputs.to(inputs.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (of_difference * scale).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = of_output.to(weight.dtype)
        return of_inputs, of_weight, of_bias, None, None, None


def _forward(layer: nn.SyncBatchNorm, inputs: torch.Tensor) -> torch.Tensor:
    if not layer.training:
        return nn.SyncBatchNorm.forward(layer, inputs)
    if inputs.dim() < 2 or inputs.shape[1] == 0:
        raise ValueError(f"SyncBatchNorm needs inputs of shape (batch, channels, ...), not {tuple(inputs.shape)}")
    statistics: LayerStatistics = getattr(layer, _ATTRIBUTE)
    moments = statistics.moments(inputs.detach())
    if layer.track_running_stats:
        _track(layer, moments)
    output: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        inputs, layer.weight, layer.bias, statistics, moments, layer.eps
    )
    return output


def _track(layer: nn.SyncBatchNorm, moments: Moments) -> None:
    """Move the running statistics, with the unbiased variance, as torch does."""
    count, mean, squares = moments
    assert layer.running_mean is not None, "statistics are tracked"
    assert layer.running_var is not None, "statistics are tracked"
    assert layer.num_batches_tracked is not None, "statistics are tracked"
    layer.num_batches_tracked.add_(1)
    factor = 1.0 / int(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    for running, value in ((layer.running_mean, mean), (layer.running_var, squares / (count - 1))):
        running.mul_(1 - factor).add_(value.to(running), alpha=factor)


@functools.cache
def _synchronised(kind: type[nn.SyncBatchNorm]) -> type[nn.SyncBatchNorm]:
    """Return the subclass of ``kind`` that synchronises."""
    # Dynamo cannot trace collectives, nor break the graph within an autograd.Function.
    forward = torch.compiler.disable(_forward)  # type: ignore[no-untyped-call]
    return type(kind.__name__, (kind,), {"forward": forward, "__reduce_ex__": _reduce, "__module__": __name__})


def _reduce(layer: nn.SyncBatchNorm, _: Any) -> tuple[Any, ...]:
    """Copy and pickle the layer as the plain one that it was."""
    state = {name: value for name, value in vars(layer).items() if name != _ATTRIBUTE}
    return object.__new__, (type(layer).__bases__[0],), state


def _own_moments(inputs: torch.Tensor) -> Moments:
    """Return the moments of this rank's ``inputs``, in two sweeps."""
    wide, axes = _wide(inputs), _axes(inputs)
    count = wide.numel() // wide.shape[1]
    mean = wide.sum(axes) / max(count, 1)
    squares = (wide - _spread(mean, wide)).square_().sum(axes)
    return float(count), mean.to("cpu", torch.float64), squares.to("cpu", torch.float64)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of halves in single precision; sums of them would lose too much."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _axes(tensor: torch.Tensor) -> list[int]:
    return [axis for axis in range(tensor.dim()) if axis != 1]


def _spread(of_channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return values of channels in a shape that combines with ``like``."""
    return of_channels.reshape(1, -1, *[1] * (like.dim() - 2))
