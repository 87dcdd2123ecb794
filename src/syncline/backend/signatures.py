"""How torch calls a group's methods, by the names of its own bindings, and what profilers and traces show of that.

Signatures are read from the bindings, so keyword names are those of whichever torch it is. They overload: settings come
as options, or one by one. ``torch.profiler`` is shown what it is shown of gloo's calls, by the same names, with shapes:
PyTorch records the calls of its own backends where C++ dispatches them; those of a group in Python never pass there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from syncline.backend import NAME
from syncline.backend.call_work import CallWork
from syncline.fabric.progress import BACKWARD, Progress
from syncline.updates.private_torch import (
    at_end_of_backward,
    is_in_node,
    is_profiled,
    recorded_range,
    taken_comm_name,
    tree_leaves,
)

_SETTINGS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""How options name what the bindings take by itself."""
_OPTIONS = {"opts"}
_BARRIER_TENSOR = torch.empty(1)
"""Barriers of PyTorch take one, by whose device they find their backend."""


@cache
def overloads_of(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the parameters of each overload of a method of torch's ``ProcessGroup``; none if there is no such method.

    They stand in what pybind11 writes into docstrings alone; the bindings have no other signature.
    """
    text: str = getattr(getattr(dist.ProcessGroup, name, None), "__doc__", None) or ""
    heads = re.findall(rf"^(?:\d+\. )?{re.escape(name)}\(self: [\w.]+(.*)\) -> ", text, re.MULTILINE)
    return tuple(tuple(re.findall(r", (\w+): ", head)) for head in heads)


def takes_torch_names(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``method`` be called as each overload of ``name``."""
    overloads = overloads_of(name)
    num_data = len(inspect.signature(method).parameters.keys() - {"self", *_OPTIONS})
    shown = CALLS.get(name)
    traced = method if shown is None else _traces(shown, method)
    recorded = method if shown is None else _records(shown, traced)

    @wraps(method)
    def call(self: Any, *values: Any, **named: Any) -> Any:
        communicator = self.state.communicator
        if communicator.progress.phase != BACKWARD and is_in_node():
            _note_pass(communicator.progress)
        run = recorded if is_profiled() else traced if communicator.trace.enabled else method
        if not named and len(values) <= num_data + 1:
            return run(self, *values)
        if len(values) == num_data and named.keys() == _OPTIONS:  # as torch calls a barrier
            return run(self, *values, named["opts"])
        for names in overloads:
            rest = names[len(values) :]
            if len(values) <= len(names) and named.keys() <= set(rest):
                given = dict(zip(names, values, strict=False)) | named
                data, settings = names[:num_data], names[num_data:]
                if all(one in given for one in data):
                    return run(self, *(given[one] for one in data), *_settings_of(given, settings))
        return method(self, *values, **named)

    names = dict.fromkeys(one for names in overloads for one in names)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", kind), *(inspect.Parameter(one, kind, default=None) for one in names)]
    if overloads:
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _settings_of(given: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    if not names:
        return []
    if "opts" in names:
        return [given.get("opts")]
    return [{_SETTINGS[one]: given[one] for one in names if given.get(one) is not None}]


class _Shown(NamedTuple):
    """How a call is shown: as the operator of C++ that it would be, and in it the work."""

    operator: str
    num_inputs: int
    work: str
    source: int | None = 0
    """Which value holds the tensors of the work, if it has any."""
    num_single: int = 0
    """How many of the first values are tensors; shapes within lists are not shown."""


_GATHER = _Shown("_allgather_base_", 5, "all_gather", 1, 2)
_GATHER_COALESCED = _Shown("allgather_into_tensor_coalesced_", 4, "all_gather", 1)
_SCATTER = _Shown("_reduce_scatter_base_", 6, "reduce_scatter", 1, 2)
_SCATTER_COALESCED = _Shown("reduce_scatter_tensor_coalesced_", 6, "reduce_scatter", 1)
_EXCHANGE = _Shown("alltoall_base_", 7, "all_to_all", 1, 2)


CALLS = {
    "allreduce": _Shown("allreduce_", 6, "all_reduce"),
    "allreduce_coalesced": _Shown("allreduce_coalesced_", 5, "all_reduce"),
    "broadcast": _Shown("broadcast_", 6, "broadcast"),
    "reduce": _Shown("reduce_", 7, "reduce"),
    "allgather": _Shown("allgather_", 5, "all_gather", 1),
    "allgather_coalesced": _Shown("allgather_coalesced_", 4, "all_gather", 1),
    "all_gather_single": _GATHER,
    "_allgather_base": _GATHER,
    "all_gather_single_coalesced": _GATHER_COALESCED,
    "allgather_into_tensor_coalesced": _GATHER_COALESCED,
    "gather": _Shown("gather_", 6, "gather", 1),
    "scatter": _Shown("scatter_", 6, "scatter", 1),
    "reduce_scatter": _Shown("reduce_scatter_", 6, "reduce_scatter", 1),
    "reduce_scatter_single": _SCATTER,
    "_reduce_scatter_base": _SCATTER,
    "reduce_scatter_single_coalesced": _SCATTER_COALESCED,
    "reduce_scatter_tensor_coalesced": _SCATTER_COALESCED,
    "alltoall": _Shown("alltoall_", 5, "all_to_all", 1),
    "all_to_all_single": _EXCHANGE,
    "alltoall_base": _EXCHANGE,
    "barrier": _Shown("barrier", 5, "barrier", None),
    "send": _Shown("send", 4, "send"),
    "recv": _Shown("recv_", 4, "recv"),
    "recv_anysource": _Shown("recv_any_source_", 3, "recvAnySource"),
}
"""Of a group, and how they are shown."""


def _records(shown: _Shown, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what does ``method`` while a profiler looks on.

    A call that its caller waits for at once is over in its range; of others that shows the beginning.
    """

    @wraps(method)
    def record(self: Any, *values: Any) -> Any:
        if self.is_dispatched:
            return work(self, values)
        singles = (_BARRIER_TENSOR,) if shown.source is None else values[: shown.num_single]
        inputs = [*singles, *[None] * (shown.num_inputs - len(singles))]
        with recorded_range(f"c10d::{shown.operator}", inputs):
            return work(self, values)

    def work(self: Any, values: tuple[Any, ...]) -> Any:
        tensors = [] if shown.source is None else _tensors(values[shown.source])
        kind = "sparse_" if any(tensor.layout is not torch.strided for tensor in tensors) else ""
        with ExitStack() as ranges:
            ranges.enter_context(recorded_range(f"{NAME}:{kind}{shown.work}", tensors))
            if (given := ranges.enter_context(taken_comm_name())) and not self.is_dispatched:
                ranges.enter_context(recorded_range(given, tensors))
            begun = method(self, *values)
            if not getattr(values[-1] if values else None, "asyncOp", True) and self.state.coalesced is None:
                begun.wait()
            return begun

    return record


def _note_pass(progress: Progress) -> None:
    """Say that the training thread is in a backward pass: a group hears of none but by the calls in it."""
    progress.enter(BACKWARD)
    at_end_of_backward(progress.leave)


def _traces(shown: _Shown, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what does ``method``, and writes a span into the trace when it is over."""

    @wraps(method)
    def trace(self: Any, *values: Any) -> Any:
        span, now_ns = self.state.communicator.trace.span, self.state.communicator.trace.now_ns
        tensors = [] if shown.source is None else _tensors(values[shown.source])
        label = " ".join([shown.work, *map(_about, tensors)])
        start_ns = now_ns()
        begun = method(self, *values)
        if isinstance(begun, CallWork):
            begun.when_over(lambda: span(label, "call", start_ns, now_ns()))
        return begun

    return trace


def _about(tensor: torch.Tensor) -> str:
    """``"[1024,1024] float32"``."""
    return f"[{','.join(map(str, tensor.shape))}] {str(tensor.dtype).removeprefix('torch.')}"


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
