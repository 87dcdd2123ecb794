"""`syncline topology`: draws, and finds what was measured last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from syncline.cli.topology import app
from syncline.errors import ConfigurationError
from syncline.topology import Topology


def shown(*args: str, **variables: str) -> str:
    result = CliRunner().invoke(app, list(args), env=variables, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_topology_is_drawn_or_written() -> None:
    racks = Topology.load("two-racks-5-3")
    assert shown("show", "two-racks-5-3") == racks.render() + "\n"
    assert Topology.parse(shown("show", "two-racks-5-3", "--yaml")) == racks


def test_without_a_name_it_is_what_was_measured_last(tmp_path: Path) -> None:
    folder = tmp_path / "syncline" / "networks"
    folder.mkdir(parents=True)
    for age, name in enumerate(["flat-8", "two-racks-5-3", "two-sites"]):
        file = folder / f"{name}.yaml"
        file.write_text(Topology.load(name).to_yaml())
        os.utime(file, (100 - age, 100 - age))
    assert shown("show", XDG_CACHE_HOME=str(tmp_path)) == Topology.load("flat-8").render() + "\n"


def test_where_nothing_was_measured_it_says_how() -> None:
    with pytest.raises(ConfigurationError, match=r"no network was measured .*; name a topology, or measure"):
        CliRunner().invoke(app, ["show"], env={"XDG_CACHE_HOME": "/nowhere"}, catch_exceptions=False)


def test_a_job_of_one_host_has_nothing_to_measure(tmp_path: Path) -> None:
    target = tmp_path / "net.yaml"
    drawn = shown("measure", "--output", str(target))
    assert Topology.parse(target.read_text()).num_ranks == 1
    assert "1 rank" in drawn
