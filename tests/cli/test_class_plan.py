"""``syncline plan --model``: a model's buckets, their classes, and the forward pass under each division."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from syncline.cli.plan import app
from syncline.errors import ConfigurationError

MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(24))), torch.ones(4, 512)

def broken():
    return 3
"""


@pytest.fixture(name="model_file")
def _model_file(tmp_path: Path) -> Path:
    path = tmp_path / "planned_model.py"
    path.write_text(MODEL)
    return path


def test_the_figures_of_a_plan_belong_together(model_file: Path) -> None:
    result = CliRunner().invoke(app, ["two-racks-5-3", "--model", f"{model_file}:make", "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    profile = plan["profile"]
    assert sum(profile["num_bytes"]) == 24 * (512 * 512 + 512) * 4
    assert len(plan["names"]) == len(profile["forward_s"]) == len(plan["chosen"]["classes"]) > 4
    assert all(seconds > 0 for seconds in profile["forward_s"])
    assert plan["times_s"]["searched"] == plan["chosen"]["time_s"] == min(plan["times_s"].values())
    assert set(plan["times_s"]) == {"one class", "equal", "geometric", "searched"}


def test_the_table_names_each_bucket(model_file: Path) -> None:
    result = CliRunner().invoke(app, ["two-racks-5-3", "--model", f"{model_file}:make"])
    assert result.exit_code == 0, result.output
    assert "0.weight" in result.output
    assert "searched" in result.output


@pytest.mark.parametrize("name", ["broken", "missing"])
def test_what_makes_no_model_is_refused(model_file: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["flat-8", "--model", f"{model_file}:{name}"])
    assert isinstance(result.exception, ConfigurationError)
    assert "returns (model, batch)" in str(result.exception)
