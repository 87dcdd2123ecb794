"""Signatures of a group's methods, read from torch's own bindings: so keyword names are those of whichever torch it is.

The bindings overload: settings come as options, or one by one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch.distributed as dist

from syncline.backend.profiling import note_pass, records, traces
from syncline.updates.private_torch import is_profiled

_SETTINGS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""How options name what the bindings take by itself."""


@cache
def overloads_of(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the parameters of each overload of a method of torch's ``ProcessGroup``; none if there is no such method.

    They stand in what pybind11 writes into docstrings alone; the bindings have no other signature.
    """
    text: str = getattr(getattr(dist.ProcessGroup, name, None), "__doc__", None) or ""
    heads = re.findall(rf"^(?:\d+\. )?{re.escape(name)}\(self: [\w.]+(.*)\) -> ", text, re.MULTILINE)
    return tuple(tuple(re.findall(r", (\w+): ", head)) for head in heads)


def takes_torch_names(name: str, method: Callable[..., Any], num_data: int) -> Callable[..., Any]:
    """Let ``method`` be called as each overload of ``name``; its first ``num_data`` parameters are no settings."""
    overloads = overloads_of(name)
    traced = traces(name, method)
    recorded = records(name, traced)

    @wraps(method)
    def call(self: Any, *values: Any, **named: Any) -> Any:
        communicator = self.state.communicator
        note_pass(communicator.progress)
        run = recorded if is_profiled() else traced if communicator.trace.enabled else method
        if not named and len(values) <= num_data + 1:
            return run(self, *values)
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
