"""Names of a package that are loaded from their homes when they are first used (PEP 562).

Every rank of a job loads what it imports, and dozens of ranks may share two cores: a start that loads what only another
update rule, a planner or a newcomer needs is many times as long. Nor is what PyTorch has loaded, some 170,000 objects
that stay, looked through for garbage while more is loaded or ranks connect, which takes a third of that time.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module

_lock = threading.Lock()
_was_collecting: list[bool] = []
"""Before each that is inside now; only the first finds that it was."""


def _forget_others() -> None:
    """Begin anew in a forked child, where nobody is inside any more."""
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.Lock()
    if any(_was_collecting):
        gc.enable()
    _was_collecting.clear()


os.register_at_fork(after_in_child=_forget_others)


@contextmanager
def without_collections() -> Iterator[None]:
    """Look for no garbage meanwhile, nor until all threads that asked for that are done."""
    with _lock:
        _was_collecting.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _was_collecting.pop():
                gc.enable()


@without_collections()
def load_name(home: str, name: str) -> object:
    """Return a name from the module that is its home, which is imported without a pause for garbage."""
    return getattr(import_module(home), name)


def late_names(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package; ``names`` are those that each of its modules is the home of.

    >>> load = late_names("syncline.topology", {"topology": "Topology", "tree": "Host Switch"})
    >>> load("Topology").flat(2).num_ranks
    2
    """
    homes = {name: f"{package}.{module}" for module, text in names.items() for name in text.split()}

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = load_name(homes[name], name)
        setattr(sys.modules[package], name, value)
        return value

    return load
