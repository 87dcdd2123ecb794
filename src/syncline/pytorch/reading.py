"""Finds out which buckets each module reads, and waits for just those before the module runs.

Modules read parameters that are not theirs: ``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling
``out_proj``, a head uses the embedding's. So the first time that a module is called (in training mode, and out of
it), it waits for everything, and a ``TorchFunctionMode`` sees which parameters the functions within it get. What is
read counts for the innermost module that is being called. From then on a call waits for what was read, and always for
the module's own parameters. The outermost module also waits for every parameter that nothing was seen to read.

Without gradients everything is waited for, each time: there PyTorch may take fused paths through whole layers, which
it does not take while it is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from syncline.pytorch.detachable import Hook
from syncline.updates.bucket import Bucket


@dataclass(slots=True)
class _Reads:
    """What is known of one module."""

    own: frozenset[int]
    by_mode: dict[bool, tuple[int, ...]] = field(default_factory=dict)
    """What a call waits for, in training mode and out of it."""
    is_opaque: bool = False
    """Compiled: ``own`` covers everything inside, and nobody looks further."""


@dataclass(slots=True)
class _Call:
    """A module that is being called while something is being found out."""

    reads: _Reads
    mode: bool
    buckets: set[int]


class Reading:
    """The hooks before and after the modules of one model; ``wait`` waits for buckets by number."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], wait: Callable[[tuple[int, ...]], None]) -> None:
        self._wait = wait
        self._bucket_of = {id(tensor): bucket.index for bucket in buckets for tensor in bucket.tensors}
        self._all = tuple(bucket.index for bucket in buckets)
        self._calls: list[_Call] = []
        self._seen: set[int] = set()
        self._watch = _Watch(self._note)
        self._handles: list[Any] = []
        self._root = self._register(model)
        for module in _visible_modules(model):
            if module is not model:
                self._register(module)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _register(self, module: nn.Module) -> _Reads:
        opaque = _is_opaque(module)
        owners = [module, *(child for child in module.children() if _is_scripted(child))]
        parameters = [
            parameter for owner in owners for parameter in owner.parameters(recurse=opaque or owner is not module)
        ]
        reads = _Reads(own=self._buckets_of(parameters), is_opaque=opaque)
        self._handles += [
            module.register_forward_pre_hook(Hook(self._before, reads)),
            module.register_forward_hook(Hook(self._after, reads), always_call=True),
        ]
        return reads

    def _buckets_of(self, tensors: Iterable[Any]) -> frozenset[int]:
        return frozenset(self._bucket_of[id(tensor)] for tensor in tensors if id(tensor) in self._bucket_of)

    def _before(self, reads: _Reads, module: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():
            self._wait(self._all)
            return
        known = tuple(sorted(reads.own)) if reads.is_opaque else reads.by_mode.get(module.training)
        self._wait(self._all if known is None or (reads.is_opaque and reads is self._root) else known)
        if known is None or self._calls:
            self._enter(_Call(reads, module.training, set(reads.own)))

    def _enter(self, call: _Call) -> None:
        if not self._calls:
            self._seen = set()
            self._watch.__enter__()  # type: ignore[no-untyped-call]
        self._calls.append(call)

    def _after(self, reads: _Reads, _: nn.Module, __: Any, output: Any) -> None:
        if not self._calls or self._calls[-1].reads is not reads:
            return
        call = self._calls.pop()
        self._seen |= call.buckets
        if not self._calls:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if reads is self._root:
                call.buckets |= set(self._all) - self._seen
        if output is not None:  # a call that failed has not read all that it reads
            call.reads.by_mode.setdefault(call.mode, tuple(sorted(call.buckets)))

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                index = self._bucket_of.get(id(value))
                if index is not None and self._calls:
                    self._calls[-1].buckets.add(index)
            elif isinstance(value, (list, tuple)):
                self._note(value)
            elif isinstance(value, dict):
                self._note(value.values())


class _Watch(TorchFunctionMode):
    """Shows the arguments of every torch function to ``note``."""

    def __init__(self, note: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the arguments and call the function."""
        self._note(args)
        if kwargs:
            self._note(kwargs.values())
        return func(*args, **(kwargs or {}))


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_opaque(module: nn.Module) -> bool:
    """Whether the module's inside is compiled, so that hooks there would become part of the program."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _visible_modules(module: nn.Module) -> Iterable[nn.Module]:
    """Yield modules, parents first, but nothing inside compiled or scripted ones; each once."""
    seen: set[int] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if id(current) in seen or _is_scripted(current):
            continue
        seen.add(id(current))
        yield current
        if not _is_opaque(current):
            stack.extend(current.children())
