"""What fails, dies or differs in one program is told of that program alone; the next ones run as if it had not been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import differences
from rank_worker import result_path

from rank_scripts import run_python

HERE = Path(__file__).parent
PROGRAMS = '''
"""Programs that end badly, and one that does not."""
import os
import torch
from declarations import program
from torch import nn

def train(run):
    model = nn.Linear(3, 2)
    model, optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(run.normal(4, 3)).square().mean().backward()
        if run.rank == 1:
            yield
        optimizer.step()
        optimizer.zero_grad()
    return {"weight": run.module(model).weight, "rank": run.rank}

def finish(steps):
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value

@program("ends well")
def good(run):
    return finish(train(run))

@program("one rank raises in the middle")
def raises(run):
    steps = train(run)
    if run.rank == 1:
        next(steps)
        raise KeyError("on purpose")
    return finish(steps)

@program("one rank dies")
def dies(run):
    if run.rank == 1:
        os._exit(3)
    return finish(train(run))

@program("ends well again")
def good_again(run):
    return finish(train(run))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    (folder / "programs").mkdir()
    (folder / "programs" / "__init__.py").write_text('"""Of this test alone."""')
    (folder / "programs" / "some.py").write_text(PROGRAMS)
    names = ["good", "raises", "dies", "good_again"]
    plan = [{"rule": "all_reduce", "world": 2, "programs": names}, {"rule": "alone", "world": 2, "programs": ["good"]}]
    (folder / "plan.json").write_text(json.dumps(plan))
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[1:];"
        "import supervisor; supervisor.main(Path(sys.argv[1]))"
    )
    done = run_python("-c", code, folder, HERE)
    assert done.returncode == 0, done.stdout
    return folder


def read(folder: Path, name: str, rank: int) -> Any:
    return torch.load(result_path(folder, name, "all_reduce", rank, 2))


@pytest.mark.parametrize("name", ["good", "good_again"])
def test_what_ends_well_is_not_spoilt(name: str, folder: Path) -> None:
    alone = torch.load(result_path(folder, "good", "alone", 0, 2))
    for rank in range(2):
        found = read(folder, name, rank)
        assert found["warnings"] == []
        assert found["values"]["rank"] == rank
        assert not list(differences(found["values"]["weight"], alone["values"]["weight"], 1e-12))


def test_what_a_rank_raises_is_told(folder: Path) -> None:
    error = read(folder, "raises", 1)
    assert error["error"] == "KeyError: 'on purpose'"
    assert not error["is_refusal"]
    assert "PeerLostError" in read(folder, "raises", 0)["error"]


def test_a_rank_that_died_leaves_no_result(folder: Path) -> None:
    assert not result_path(folder, "dies", "all_reduce", 1, 2).exists()


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        ({"a": 1.0}, {"b": 1.0}, "names differ"),
        ([1.0], [1.0, 2.0], "is not"),
        (torch.ones(2), torch.ones(3), "not torch.float32 of (3,)"),
        (torch.ones(2), torch.ones(2) + 1e-3, "differs by up to 0.001"),
        ("a", "b", "'a' is not 'b'"),
        ({"x": [torch.tensor(float("nan"))]}, {"x": [torch.tensor(0.0)]}, "x[0]"),
    ],
)
def test_differences_are_named(found: Any, expected: Any, words: str) -> None:
    (line,) = differences(found, expected, 1e-9)
    assert words in line


def test_rounding_is_no_difference() -> None:
    assert not list(differences({"x": [torch.ones(2), 1.0]}, {"x": [torch.ones(2) + 1e-7, 1.0]}, 1e-6))
