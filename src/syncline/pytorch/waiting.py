"""Parameters whose new values are still under way: whoever touches one through PyTorch waits for it, in any thread.

``Sharded(overlap_forward=True)`` lets ``step()`` return before the all-gather is over. Until a bucket is final, its
parameters are of a waiting class: PyTorch calls ``__torch_function__`` of a subclass for every function that gets such
a parameter as an argument, so that a layer, a clamp, a moving average, ``deepcopy`` or ``.data`` waits for the bucket,
gives its parameters their own class back, and goes on. (``torch.nn.parameter.UninitializedParameter`` changes its class
in the same way.) What only asks for the shape, the gradient or a hook does not wait.

Some ways of reading pass ``__torch_function__`` by: ``torch.vmap`` and ``torch.func`` wrap a parameter in C++, scripted
modules and extensions call operations there, nested tensors call on with subclasses switched off. For these, a waiting
parameter has no memory, and a dispatch key by which each operation with it comes here first, in any thread. What is
read without an operation, by its address, finds no memory, and never the old value.

Where operations cannot be heard of, others wait earlier: a module that is called, for the parameters that it has
itself; who forks, as nothing arrives in the child; who compiles, since compiled code would be made anew for the waiting
class; and ``step()``, from then on, for what was compiled or scripted, and while anything else (a view, an array, a
graph) holds the parameters' memory. ``tests/pytorch/test_stale_reads.py`` tries each way, and the guide lists them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.updates.bucket import Bucket, placed
from syncline.updates.private_torch import (
    UNVALUED_PROPERTIES,
    before_compiling,
    is_unarrived,
    num_storage_users,
    on_unarrived_read,
    replace_data,
    storage_number,
    tree_leaves,
    unarrived_data,
)

_lock = threading.Lock()
_owners: WeakSet[WaitingParameters] = WeakSet()
_waiting: dict[int, tuple[WaitingParameters, int]] = {}
"""By ``id`` of a parameter: who knows when it is final, and its bucket. An entry lives as long as the class does."""


class WaitingParameters:
    """The parameters of one model; ``wait`` waits for buckets by number, and raises what went wrong with them."""

    def __init__(self, buckets: Sequence[Bucket], wait: Callable[[tuple[int, ...]], None]) -> None:
        self._members = [[(tensor, bucket.index) for tensor in bucket.tensors] for bucket in buckets]
        self._buckets = tuple(buckets)
        self._num_holders = self._count_holders()
        self._wait = wait
        self._unarrived: dict[int, torch.Tensor] = {}
        self._data: dict[int, torch.Tensor] = {}
        _owners.add(self)
        self.is_compiled = False
        """Whether something was compiled while parameters were waiting: that may read them, and would be again."""

    def buckets_of(self, module: nn.Module) -> tuple[int, ...]:
        """Return the buckets of a module's own parameters, and of containers in it, which nobody calls."""
        own = set(map(id, _own_parameters(module)))
        members = chain.from_iterable(self._members)
        return tuple(sorted({bucket for tensor, bucket in members if id(tensor) in own}))

    @property
    def is_held(self) -> bool:
        """Whether a view, an array or a graph holds the parameters' memory, which nobody hears of when it is read."""
        return any(now > at_first for now, at_first in zip(self._count_holders(), self._num_holders, strict=True))

    def _count_holders(self) -> list[int]:
        return [num_storage_users(bucket.parameters) for bucket in self._buckets]

    def name_of(self, alias: torch.Tensor) -> str | None:
        """Return the name of the parameter of which this is an alias without memory; None if it is none of these."""
        number = storage_number(alias)
        for _, slot, tensor in placed(self._buckets):
            if id(tensor) in self._unarrived and storage_number(self._unarrived[id(tensor)]) == number:
                return slot.name
        return None

    def begin(self) -> None:
        """From now on nobody gets at the parameters before they are final."""
        before_compiling(_on_compile)
        with _lock:
            _register()
            new = [member for member in chain.from_iterable(self._members) if id(member[0]) not in _waiting]
            for tensor, _ in new:
                self._data[id(tensor)] = tensor.data
                if id(tensor) not in self._unarrived:
                    self._unarrived[id(tensor)] = unarrived_data(tensor)
            _waiting.update((id(tensor), (self, bucket)) for tensor, bucket in new)
            replace_data((tensor, self._unarrived[id(tensor)]) for tensor, _ in new)
            for tensor, _ in new:
                _set_class(tensor, _waiting_class(type(tensor)))

    def finish(self, buckets: Iterable[int] | None = None) -> None:
        """Wait for some buckets, or all; their parameters are plain ones again."""
        wanted = tuple(range(len(self._members)) if buckets is None else buckets)
        if wanted and any(id(tensor) in _waiting for bucket in wanted for tensor, _ in self._members[bucket]):
            self._wait(wanted)
            self.release(wanted)

    def release(self, buckets: Iterable[int] | None = None) -> None:
        """Give parameters their own class back, without a wait; again where it was interrupted."""
        wanted = range(len(self._members)) if buckets is None else buckets
        with _lock:
            tensors = [tensor for index in wanted for tensor, _ in self._members[index] if id(tensor) in _waiting]
            if not tensors:
                return
            thread = threading.Thread(target=self._give_back, args=(tensors,))  # what is set in this one is not there
            thread.start()
            thread.join()
            for tensor in tensors:
                if issubclass(type(tensor), _Waiting):
                    _set_class(tensor, type(tensor).__mro__[2])
                del _waiting[id(tensor)]

    def _give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        kept = ((tensor, self._data.pop(id(tensor), None)) for tensor in tensors)
        replace_data((tensor, data) for tensor, data in kept if data is not None)


_set_class: Callable[[Any, type], None] = object.__dict__["__class__"].__set__


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

    @property
    def __class__(self) -> type:
        """The parameter's own class, so that nobody who exchanges classes (``swap_tensors``) passes this one on."""
        return type(self).__mro__[2]

    @__class__.setter
    def __class__(self, other: type) -> None:
        _finish((self,))
        _set_class(self, other)

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
        if not isinstance(child, torch.jit.ScriptModule) and type(child).forward is nn.Module.forward:
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


def _on_read(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wait for what an operation gets that is called where ``__torch_function__`` is not: in C++, or switched off."""
    _finish((*args, *kwargs.values()))
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and is_unarrived(value):
            names = filter(None, (owner.name_of(value) for owner in tuple(_owners)))
            raise UpdateError(
                f"{operation} reads an alias of parameter {next(names, 'of a model that is gone')!r}, taken while its "
                "new value was under way; call syncline.synchronize() after step(), or take "
                "Sharded(overlap_forward=False)"
            )
    return operation(*args, **kwargs)


def _on_compile(_: Any) -> None:
    """Let what is compiled see plain parameters, from now on after each step."""
    for owner, _ in tuple(_waiting.values()):
        owner.is_compiled = True
    _finish_all()


@cache
def _register() -> None:
    """Hear of reads, once in a process and not before it is needed; with the lock held."""
    on_unarrived_read(_on_read)


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
    "size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "ndimension",
    "is_floating_point", "is_complex", "get_device", "register_hook", "register_post_accumulate_grad_hook",
    "requires_grad_", "__len__", "__hash__",
)  # fmt: skip
_WITHOUT_VALUES = frozenset(
    {getattr(getattr(torch.Tensor, name), access) for name in _PROPERTIES for access in ("__get__", "__set__")}
    | {getattr(torch.Tensor.grad, "__delete__")}  # noqa: B009 - which types do not know
    | {getattr(torch.Tensor, name) for name in _METHODS}
    | {torch.is_floating_point, torch.is_complex, torch.numel}
)
