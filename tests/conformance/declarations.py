"""What a conformance program is: a training script written once, and what it must give under each update rule."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neutral_run import Run

RULES = ("all_reduce", "sharded", "sharded_overlapped")
"""Rules that are compared with the reference: ``AllReduce()``, ``Sharded()``, ``Sharded(overlap_forward=True)``."""
WHOLE = "sharded_whole"
"""``Sharded(align="parameter")``, for programs that are told to use it."""
_WHOLE_REMEDY = 'align="parameter"'
REFERENCE = "ddp"
ALONE = "alone"
"""One process over the union of all ranks' batches."""

Values = Mapping[str, Any]
Script = Callable[["Run"], Values]


@dataclass(frozen=True, slots=True)
class Refused:
    """The program ends with a ``SynclineError`` whose text contains ``remedy``."""

    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script and its expectations; None means: equal to the reference, to rounding, on every rank."""

    name: str
    group: str
    what: str
    script: Script
    all_reduce: Refused | None = None
    sharded: Refused | None = None
    sharded_overlapped: Refused | None = None
    has_ddp: bool = True
    """Whether DDP can run it; else the reference is one process over the union of the batches."""
    has_union: bool = True
    """Whether one process over the union of the batches gives the same."""
    worlds: tuple[int, ...] = (2,)
    tolerance: float = 1e-9
    warns: str | None = None
    """Words of the warning that the library gives on rank 0; None: it gives none at all."""

    def expected(self, rule: str) -> Refused | None:
        """Return how the program is refused under ``rule``, None if it is equal."""
        refused: Refused | None = getattr(self, rule, None)
        return refused

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that it is run under: also the one that it is told to use."""
        return (*RULES, WHOLE) if self.sharded == Refused(_WHOLE_REMEDY) else RULES

    @property
    def reference(self) -> str:
        """What the others are compared with."""
        return REFERENCE if self.has_ddp else ALONE


_REGISTERED: dict[str, Program] = {}


def program(what: str, **options: Any) -> Callable[[Script], Script]:
    """Register a script under its function's name.

    ``refused`` stands for all rules, and ``refused_by_sharded`` for both ways of ``Sharded``.
    """
    for name, rules in (("refused", RULES), ("refused_by_sharded", RULES[1:])):
        remedy = options.pop(name, None)
        if remedy is not None:
            options |= dict.fromkeys(rules, Refused(remedy))

    def register(script: Script) -> Script:
        name = script.__name__
        assert name not in _REGISTERED, f"two programs are called {name}"
        group = script.__module__.rpartition(".")[2]
        _REGISTERED[name] = Program(name=name, group=group, what=what, script=script, **options)
        return script

    return register


def all_programs() -> Mapping[str, Program]:
    """Import every module of programs; return them by name, in the order of modules and lines."""
    package = importlib.import_module("programs")
    for module in sorted(found.name for found in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"programs.{module}")
    return _REGISTERED
