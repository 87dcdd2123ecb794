"""The examples in docstrings of public names: each name has one, and each runs, in the order of its lines.

They run in one process, each with names prepared: ``syncline``, ``torch``, what its own module exports, and where it
speaks of them a ``fleet`` of one rank, a ``model`` of 4 inputs and 2 outputs, its ``optimizer`` and a batch ``x``.
"""

from __future__ import annotations

import asyncio
import doctest
import inspect
import io
import re
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from typing import Any

import pytest
import torch

import syncline

PUBLIC = (
    "syncline",
    "syncline.updates",
    "syncline.topology",
    "syncline.schedule",
    "syncline.observe",
    "syncline.runtime",
    "syncline.fabric",
)
COMPLETE = PUBLIC[:-2]
"""The fabric and the runtime are for those who build on them: what they export has examples where one line shows it."""
NEEDS_FLEET = re.compile(r"\b(fleet|distribute|current_fleet|sampler)\b")
OPENS_ITS_OWN = re.compile(r"\b(init|launch)\(")
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "OMPI_", "PMI", "SYNCLINE_", "TORCHELASTIC_")


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield every public name with what it stands for, once for each object."""
    seen: set[int] = set()
    for module_name in PUBLIC:
        module = import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) not in seen:
                seen.add(id(value))
                yield f"{module_name}.{name}", value


def has_examples(text: str | None) -> bool:
    return bool(text) and ">>>" in text


def documented() -> Iterator[tuple[str, Any]]:
    """Yield every public name, and every public method of one, whose docstring has an example."""
    for name, value in public_objects():
        if inspect.ismodule(value):
            members = [(key, getattr(value, key)) for key in value.__all__]
            yield from ((f"{name}.{key}", member) for key, member in members if has_examples(member.__doc__))
            continue
        if has_examples(getattr(value, "__doc__", None)):
            yield name, value
        if inspect.isclass(value):
            members = [(key, inspect.unwrap(getattr(value, key))) for key in vars(value) if not key.startswith("_")]
            yield from ((f"{name}.{key}", member) for key, member in members if has_examples(member.__doc__))


EXAMPLES = dict(documented())


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, Any]:
    import os

    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"syncline": syncline, "torch": torch, "model": model, "optimizer": optimizer, "x": torch.ones(8, 4)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, names: dict[str, Any]) -> None:
    value = EXAMPLES[name]
    text = inspect.cleandoc(value.__doc__)
    room = next(import_module(module) for module in reversed(PUBLIC) if name.startswith(f"{module}."))
    shown = {key: getattr(room, key) for key in room.__all__} if room is not syncline else {}
    globs = {"asyncio": asyncio, "Topology": syncline.Topology, "__name__": "__main__"} | shown | names
    test = doctest.DocTestParser().get_doctest(text, globs, name, None, None)
    said = io.StringIO()
    if NEEDS_FLEET.search(text[text.index(">>>") :]) and not OPENS_ITS_OWN.search(text[text.index(">>>") :]):
        with syncline.init() as fleet:
            test.globs["fleet"] = fleet
            results = run(test, said)
    else:
        results = run(test, said)
    assert results.attempted > 0
    assert not results.failed, said.getvalue()


def run(test: doctest.DocTest, said: io.StringIO) -> doctest.TestResults:
    return doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.write, clear_globs=False)


def wants_example(value: Any) -> bool:
    """Errors and enumerations are raised and compared, not called; aliases and constants have no docstring."""
    if inspect.isclass(value):
        return not issubclass(value, BaseException | Enum)
    return inspect.isroutine(value)


@pytest.mark.parametrize("module_name", COMPLETE)
def test_each_public_name_has_an_example(module_name: str) -> None:
    module = import_module(module_name)
    without = [
        name
        for name in module.__all__
        if wants_example(value := getattr(module, name)) and not has_examples(value.__doc__)
    ]
    assert not without


@pytest.mark.parametrize("kind", [syncline.Fleet, syncline.DistributedOptimizer, syncline.Topology])
def test_each_public_method_says_more_than_its_name(kind: type) -> None:
    """Those of the classes that users hold in their hands."""
    members = {name: member for name, member in vars(kind).items() if not name.startswith("_")}
    assert not [name for name, member in members.items() if callable(member) and len(member.__doc__ or "") < 30]
