"""What ``p.grad`` is after ``backward()`` of a sharded model, until it is dropped: a gradient that no rank has whole.

It answers what can be answered for all ranks together: norms, multiplication, clamping, zeroing, and the check of
``GradScaler``. Thereby ``torch.nn.utils.clip_grad_norm_``, ``clip_grad_value_`` and ``torch.amp.GradScaler`` work
unchanged, with one small sum over all ranks for all parameters. Whatever else is asked of it is refused with a clear
error, in place of a wrong number. Each of these is a collective: every rank must ask alike.

Autograd adds to ``p.grad`` where there is one. What it would add here is this rank's own gradient of a further pass: it
is kept as the fresh part, which the gradient collector takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.updates.bucket import Slot, placed
from syncline.updates.inner import NOT_DIVIDED
from syncline.updates.private_torch import DESCRIBED, UNSCALE, tensor_without_memory, uncompiled
from syncline.updates.rule import Updater

_METADATA = frozenset(
    {
        "dtype", "device", "shape", "layout", "is_sparse", "is_leaf", "requires_grad", "is_cuda", "is_cpu", "ndim",
        "grad_fn", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size", "nelement",
        "is_contiguous", "is_nested", "is_mkldnn", "is_inference", "is_conj", "is_neg", "storage_offset",
        "untyped_storage", "grad", *DESCRIBED,
    }
)  # fmt: skip


class DividedGradient(torch.Tensor):
    """Stands for the combined gradient of one parameter."""

    slot: Slot
    updater: Updater
    fresh: torch.Tensor | None
    is_past: bool
    """Whether another pass has come since: its values are gone, as other gradients lie in their memory."""

    @staticmethod
    def __new__(
        cls: type[DividedGradient], parameter: torch.nn.Parameter, slot: Slot, updater: Updater
    ) -> DividedGradient:
        """Make the stand-in for the gradient of ``parameter``; it has no memory of its own."""
        stand_in = tensor_without_memory(cls, parameter)
        assert isinstance(stand_in, DividedGradient), "it is of the class that was asked for"
        stand_in.slot = slot
        stand_in.updater = updater
        stand_in.fresh = None
        stand_in.is_past = False
        return stand_in

    @property
    def divided(self) -> Any:
        """The :class:`~syncline.updates.divided.DividedGradients` of all parameters together."""
        divided = self.updater.divided_gradients
        assert divided is not None, "only divided gradients are stood in for"
        return divided

    def take_fresh(self) -> torch.Tensor:
        """Return what autograd has added since the last call: this rank's own gradient, in the parameter's shape."""
        fresh, self.fresh = self.fresh, None
        assert fresh is not None, "autograd has just added to it"
        return fresh

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<combined gradient of {self.slot.name}, divided between the ranks>"

    @classmethod
    @uncompiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what can be answered."""
        name = _name_of(func)
        if name in _ANSWERS and name != "__repr__":
            _check_present(args[0])
            return _ANSWERS[name](*args, **(kwargs or {}))
        if name in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise _refusal(name)

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take what autograd adds to it, and refuse all else."""
        target, *values = args
        is_sum = func in {torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor} and not kwargs
        if not (is_sum and isinstance(target, cls) and isinstance(values[0], torch.Tensor)):
            raise _refusal(str(func))
        target.fresh = values[0] if target.fresh is None else target.fresh + values[0]
        return target


def _check_present(asked: object) -> None:
    """Raise for a gradient of an earlier pass; ``asked`` may be several."""
    for gradient in asked if isinstance(asked, (list, tuple)) else (asked,):
        if isinstance(gradient, DividedGradient) and gradient.is_past:
            raise UpdateError(
                f"A gradient of {gradient.slot.name!r} was kept over another backward pass, but with Sharded() no rank "
                f"has it whole, and its memory has other gradients now; ask before, or use {NOT_DIVIDED}"
            )


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else str(name)


def _refusal(name: str) -> UpdateError:
    return UpdateError(
        f"{name} needs a whole gradient, but with Sharded() no rank has one after backward(). Norms and clipping work "
        f"(optimizer.clip_grad_norm_ or torch's own, on every rank); for whole gradients use {NOT_DIVIDED}"
    )


def _norm(
    gradient: DividedGradient,
    p: Any = 2.0,
    dim: Any = None,
    keepdim: bool = False,
    out: None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if out is not None:
        raise _refusal("A norm with out=")
    if (dim is not None and len(_dimensions(dim)) != gradient.dim()) or keepdim:
        raise _refusal(f"A norm by rows or columns (dim={dim!r}, keepdim={keepdim})")
    order = 2.0 if p in {"fro", None} else float(p)
    value: torch.Tensor = gradient.divided.norms(order)[gradient.slot.position]
    return value.to(gradient.device, dtype or gradient.dtype.to_real())


def _dimensions(dim: Any) -> tuple[int, ...]:
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _vector_norm(gradient: DividedGradient, ord: Any = 2.0, *where: Any, **options: Any) -> torch.Tensor:  # noqa: A002
    return _norm(gradient, ord, *where, **options)


def _number(value: Any, name: str) -> float:
    """Return the one number that a whole gradient can be multiplied by."""
    if isinstance(value, torch.Tensor) and (isinstance(value, DividedGradient) or value.numel() != 1):
        raise _refusal(f"{name} by a tensor of shape {tuple(value.shape)}, element by element,")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _refusal(f"{name} by {value!r}") from None


def _multiply(gradient: DividedGradient, factor: Any) -> DividedGradient:
    gradient.divided.scale(_number(factor, "mul_()"), (gradient.slot.position,))
    return gradient


def _divide(gradient: DividedGradient, divisor: Any, *, rounding_mode: str | None = None) -> DividedGradient:
    number = _number(divisor, "div_()")
    if rounding_mode is not None or number == 0.0:
        raise _refusal(f"div_({number:g}, rounding_mode={rounding_mode!r})")
    return _multiply(gradient, 1.0 / number)


def _check_and_unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Do what ``GradScaler`` asks: tell of infinities on any rank, and multiply all gradients.

    Those of parameters without elements are not divided, and say nothing.
    """
    stand_ins = [gradient for gradient in gradients if isinstance(gradient, DividedGradient)]
    divided = stand_ins[0].divided
    positions = [gradient.slot.position for gradient in stand_ins]
    if divided.has_nonfinite(positions):
        found_inf.fill_(1.0)
    divided.scale(float(inverse_scale), positions)


def _change(gradient: DividedGradient, function: Callable[[torch.Tensor], object]) -> DividedGradient:
    gradient.divided.change(gradient.slot.position, function)
    return gradient


def _clamp(gradient: DividedGradient, *bounds: Any, **named: Any) -> DividedGradient:
    for bound in (*bounds, *named.values()):
        if bound is not None:
            _number(bound, "clamp_()")
    return _change(gradient, lambda part: part.clamp_(*bounds, **named))


def _zero(gradient: DividedGradient) -> DividedGradient:
    return _change(gradient, torch.Tensor.zero_)


def _same(gradient: DividedGradient, *_: Any) -> DividedGradient:
    return gradient


def _of_each(answer: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Answer torch's functions of lists of tensors, to which a number or a list of numbers may be given."""

    def answer_all(gradients: Sequence[DividedGradient], *values: Any, **options: Any) -> list[Any]:
        each = [value if isinstance(value, (list, tuple)) else [value] * len(gradients) for value in values]
        return [answer(gradient, *of_one, **options) for gradient, *of_one in zip(gradients, *each, strict=True)]

    return answer_all


_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "linalg_vector_norm": _vector_norm,
    "norm": _norm,
    "mul_": _multiply,
    "div_": _divide,
    "clamp_": _clamp,
    "clamp_min_": lambda gradient, bound: _clamp(gradient, min=bound),
    "clamp_max_": lambda gradient, bound: _clamp(gradient, max=bound),
    "zero_": _zero,
    "requires_grad_": _same,
    "_foreach_norm": _of_each(_norm),
    "_foreach_mul_": _of_each(_multiply),
    "_foreach_div_": _of_each(_divide),
    "_foreach_zero_": _of_each(_zero),
    UNSCALE: _check_and_unscale,
    "detach": _same,
    "data": _same,
    "__repr__": DividedGradient.__repr__,
}


class StandIns:
    """One for each parameter in buckets, if the update rule divides gradients; else none, and nothing happens here."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._by_parameter: dict[nn.Parameter, DividedGradient] = {}
        if updater.divides_gradients:
            self._by_parameter = {
                tensor: DividedGradient(tensor, slot, updater) for _, slot, tensor in placed(updater.buckets)
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
                    f"has it whole, so the step would not see that; use {NOT_DIVIDED}"
                )
        dropped = [stand_in.slot.position for tensor, stand_in in self._by_parameter.items() if tensor.grad is None]
        self._updater.drop(dropped)
