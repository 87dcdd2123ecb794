"""Hooks that a copy of the model leaves behind: ``copy.deepcopy`` and pickling give a plain model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar


def _no_hook(*_: Any) -> None:
    """Do nothing: what a hook becomes in a copy of the model."""


class Hook:
    """Calls ``function`` with ``bound`` before the hook's own arguments. Copies of it do nothing."""

    __slots__ = ("bound", "function")
    plain: ClassVar[Callable[..., Any]] = staticmethod(_no_hook)

    def __init__(self, function: Callable[..., Any], *bound: Any) -> None:
        self.function = function
        self.bound = bound

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(*self.bound, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self.plain

    def __reduce__(self) -> tuple[Any, tuple[Callable[..., Any]]]:
        return partial, (self.plain,)


class ContextMethod(Hook):
    """A method that returns a context manager; in a copy of the model the context does nothing."""

    __slots__ = ()
    plain = nullcontext
