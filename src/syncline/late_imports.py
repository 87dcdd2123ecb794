"""Names of a package that are loaded from their homes when they are first used (PEP 562).

Every rank of a job loads what it imports, and dozens of ranks may share two cores: a start that loads what only another
update rule, a planner or a newcomer needs is many times as long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package that has each name from the module that is its home.

    >>> load = late_names("syncline.topology", {"Topology": "syncline.topology.topology"})
    >>> load("Topology").flat(2).num_ranks
    2
    """

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
