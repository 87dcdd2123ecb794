"""What the pages under docs/reference show: each ``::: name`` with the object that it stands for."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

PAGES = sorted((Path(__file__).parents[1] / "docs" / "reference").glob("*.md"))
SHOWN = re.compile(r"^::: (\S+)", re.MULTILINE)


def names_of(page: str) -> dict[str, Any]:
    """Return what one page shows; of a module its public classes and functions, as mkdocstrings does."""
    found: dict[str, Any] = {}
    for name in SHOWN.findall(page):
        value = value_of(name)
        found |= members_of(name, value) if inspect.ismodule(value) else {name: value}
    return found


def value_of(name: str) -> Any:
    """Return the object or the module of that name."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        parent, _, last = name.rpartition(".")
        return getattr(value_of(parent), last)


def members_of(name: str, module: Any) -> dict[str, Any]:
    """Return the public classes and functions that a module defines."""
    return {
        f"{name}.{key}": value
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == name and callable(value)
    }


REFERENCE = {name: value for page in PAGES for name, value in names_of(page.read_text()).items()}
