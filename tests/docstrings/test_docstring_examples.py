"""The examples in docstrings of public names: each name has one, and each runs, in the order of its lines.

They run in one process, each with names prepared: ``syncline``, ``torch``, what its own module exports, and where it
speaks of them a ``fleet`` of one rank, a ``model`` of 4 inputs and 2 outputs, its ``optimizer`` and a batch ``x``.
Those that launch ranks run in a process whose Python programs are forked, as this file with the name of one.
"""

from __future__ import annotations

import asyncio
import doctest
import inspect
import io
import re
import sys
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline
from rank_scripts import run_python
from reference_names import REFERENCE, members_of

PUBLIC = (
    "syncline",
    "syncline.updates",
    "syncline.topology",
    "syncline.schedule",
    "syncline.observe",
    "syncline.runtime",
    "syncline.fabric",
    "syncline.lab",
    "syncline.report",
    "syncline.errors",
    "syncline.testing",
)
WITHOUT_EXAMPLE = {
    "syncline.fabric.TcpFabric": "connect_tcp makes it, and has the example",
    "syncline.fabric.Rendezvous": "connect_tcp uses it, and has the example",
    "syncline.fabric.MemoryFabric": "memory_fabrics makes it, and Transport has the example",
    "syncline.fabric.ConnectionStatistics": "read from FabricStatistics, which has the example",
    "syncline.fabric.ClassStatistics": "read from FabricStatistics, which has the example",
    "syncline.runtime.Engine": "Communicator makes it, and has the example",
}
"""Those that nobody makes by themselves."""
NEEDS_FLEET = re.compile(r"\b(fleet|distribute|current_fleet|sampler)\b")
OPENS_ITS_OWN = re.compile(r"\b(init|launch)\(")
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "OMPI_", "PMI", "SYNCLINE_", "TORCHELASTIC_")


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield every public name with what it stands for, once for each object."""
    seen: set[int] = set()
    for module_name in PUBLIC:
        for name, value in exported(module_name).items():
            if id(value) not in seen:
                seen.add(id(value))
                yield f"{module_name}.{name}", value


def exported(module_name: str) -> dict[str, Any]:
    """Return what a module exports, or defines if it does not say."""
    module = import_module(module_name)
    names = getattr(module, "__all__", None) or [name.rpartition(".")[2] for name in members_of(module_name, module)]
    return {name: getattr(module, name) for name in names}


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
def test_example(name: str, names: dict[str, Any], tmp_path: Path) -> None:
    if "launch(" in EXAMPLES[name].__doc__:
        done = run_python(__file__, name, folder=tmp_path)
        assert done.returncode == 0, done.stdout
    else:
        check_example(name, names)


def check_example(name: str, names: dict[str, Any]) -> None:
    text = inspect.cleandoc(EXAMPLES[name].__doc__)
    room = next(module for module in reversed(PUBLIC) if name.startswith(f"{module}."))
    shown = exported(room) if room != "syncline" else {}
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


@pytest.mark.parametrize("module_name", PUBLIC)
def test_each_public_name_has_an_example(module_name: str) -> None:
    wanting = {f"{module_name}.{name}": value for name, value in exported(module_name).items() if wants_example(value)}
    assert wanting
    without = {name for name, value in wanting.items() if not has_examples(value.__doc__)}
    assert without == {name for name in WITHOUT_EXAMPLE if name.rpartition(".")[0] == module_name}


def test_each_example_of_the_reference_runs() -> None:
    run_here = {id(value) for value in EXAMPLES.values()}
    assert not [name for name, value in REFERENCE.items() if has_examples(value.__doc__) and id(value) not in run_here]


@pytest.mark.parametrize("kind", [syncline.Fleet, syncline.DistributedOptimizer, syncline.Topology])
def test_each_public_method_says_more_than_its_name(kind: type) -> None:
    """Those of the classes that users hold in their hands."""
    members = {name: member for name, member in vars(kind).items() if not name.startswith("_")}
    assert not [name for name, member in members.items() if callable(member) and len(member.__doc__ or "") < 30]


if __name__ == "__main__":
    check_example(sys.argv[1], {"syncline": syncline, "torch": torch})
