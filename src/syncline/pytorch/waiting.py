"""Parameters whose new values are still under way: whoever touches one through PyTorch waits for it, in any thread.

``Sharded(overlap_forward=True)`` lets ``step()`` return before the all-gather is over. Until a bucket is final, its
parameters are of a waiting class: PyTorch calls ``__torch_function__`` of a subclass for every function that gets such
a parameter as an argument, so that a layer, a clamp, a moving average, ``deepcopy`` or ``.data`` waits for the bucket,
gives its parameters their own class back, and goes on. (``torch.nn.parameter.UninitializedParameter`` changes its class
in the same way.) What only asks for the shape, the gradient or a hook does not wait.

Some ways of reading pass ``__torch_function__`` by: ``torch.vmap`` and ``torch.func`` wrap a parameter in C++, nested
tensors call on with subclasses switched off, an extension reads memory. So a module that is called waits first for the
parameters that it has itself, however its ``forward`` reads them; and who forks waits for all, as nothing arrives in
the child.

It cannot see memory that was reached before ``step()``: a ``p.data`` or a NumPy array that is kept over the step.
Functions compiled around the model would be compiled anew for the waiting class, so models that are compiled or
scripted are waited for in ``step()``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import nn

from syncline.updates.bucket import Bucket
from syncline.updates.private_torch import UNVALUED_PROPERTIES

_lock = threading.Lock()
_waiting: dict[int, tuple[WaitingParameters, int]] = {}
"""By ``id`` of a parameter: who knows when it is final, and its bucket. An entry lives as long as the class does."""


class WaitingParameters:
    """The parameters of one model; ``wait`` waits for buckets by number, and raises what went wrong with them."""

    def __init__(self, buckets: Sequence[Bucket], wait: Callable[[tuple[int, ...]], None]) -> None:
        self._members = [[(tensor, bucket.index) for tensor in bucket.tensors] for bucket in buckets]
        self._wait = wait

    def buckets_of(self, module: nn.Module) -> tuple[int, ...]:
        """Return the buckets of a module's own parameters, and of containers in it, which nobody calls."""
        own = set(map(id, _own_parameters(module)))
        members = chain.from_iterable(self._members)
        return tuple(sorted({bucket for tensor, bucket in members if id(tensor) in own}))

    def begin(self) -> None:
        """From now on nobody gets at the parameters before they are final."""
        with _lock:
            for tensor, bucket in chain.from_iterable(self._members):
                if id(tensor) not in _waiting:
                    _waiting[id(tensor)] = self, bucket
                    tensor.__class__ = _waiting_class(tensor.__class__)

    def finish(self, buckets: Iterable[int] | None = None) -> None:
        """Wait for some buckets, or all; their parameters are plain ones again."""
        wanted = tuple(range(len(self._members)) if buckets is None else buckets)
        if wanted and any(id(tensor) in _waiting for bucket in wanted for tensor, _ in self._members[bucket]):
            self._wait(wanted)
            self.release(wanted)

    def release(self, buckets: Iterable[int] | None = None) -> None:
        """Give parameters their own class back, without a wait."""
        wanted = range(len(self._members)) if buckets is None else buckets
        with _lock:
            for tensor, _ in chain.from_iterable(self._members[bucket] for bucket in wanted):
                if _waiting.pop(id(tensor), None) is not None:
                    tensor.__class__ = tensor.__class__.__mro__[2]


class _Waiting:
    """What comes before a parameter's own class while its value is under way."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for the parameters among the arguments, unless their values are not asked for; then call ``func``."""
        keywords = dict(kwargs or {})
        if func not in _WITHOUT_VALUES:
            _finish((*args, *keywords.values()))
            return func(*args, **keywords)
        return super().__torch_function__(func, types, args, keywords)  # type: ignore[misc]  # of the own class

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the final value, as a parameter of its own class."""
        _finish((self,))
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the final value, as a parameter of its own class."""
        _finish((self,))
        return self.__reduce_ex__(protocol)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield what a module has itself, or in a ``ParameterDict`` and the like, whose class has no forward."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _own_parameters(child)


def _finish(values: Iterable[Any]) -> None:
    """Wait for all waiting parameters in ``values``, also within lists, tuples and dictionaries."""
    wanted: dict[WaitingParameters, set[int]] = {}
    _collect(values, wanted)
    if wanted:
        _finish_buckets(wanted)
    else:  # they are within something that only the function can look into
        _finish_all()


def _finish_all() -> None:
    wanted: dict[WaitingParameters, set[int]] = {}
    for owner, bucket in tuple(_waiting.values()):
        wanted.setdefault(owner, set()).add(bucket)
    _finish_buckets(wanted)


def _finish_buckets(wanted: Mapping[WaitingParameters, set[int]]) -> None:
    for owner, buckets in wanted.items():
        owner.finish(sorted(buckets))


os.register_at_fork(before=_finish_all)


def _collect(values: Iterable[Any], wanted: dict[WaitingParameters, set[int]]) -> None:
    for value in values:
        if isinstance(value, _Waiting):
            place = _waiting.get(id(value))
            if place is not None:  # else another thread has just waited for it
                wanted.setdefault(place[0], set()).add(place[1])
        elif isinstance(value, (list, tuple)):
            _collect(value, wanted)
        elif isinstance(value, dict):
            _collect(value.values(), wanted)


@cache
def _waiting_class(own: type) -> type:
    return type(f"Waiting{own.__name__}", (_Waiting, own), {})


_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "retains_grad", "output_nr", "itemsize", "nbytes", *UNVALUED_PROPERTIES,
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size", "is_contiguous", "ndimension",
    "is_floating_point", "is_complex", "get_device", "register_hook", "register_post_accumulate_grad_hook",
    "requires_grad_", "is_shared", "is_pinned", "__len__", "__hash__",
)  # fmt: skip
_WITHOUT_VALUES = frozenset(
    {getattr(getattr(torch.Tensor, name), access) for name in _PROPERTIES for access in ("__get__", "__set__")}
    | {getattr(torch.Tensor.grad, "__delete__")}  # noqa: B009 - which types do not know
    | {getattr(torch.Tensor, name) for name in _METHODS}
    | {torch.is_floating_point, torch.is_complex, torch.numel}
)
