"""Ranks as processes that ``init`` places by the names of their hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rank_scripts import run_script
from syncline import ConfigurationError
from syncline.pytorch.connecting import tell_once

SCRIPT = Path(__file__).with_name("host_process.py")
NET = """
switch: core
children:
  - {host: a, uplink: 1 Gbit/s, ranks: 2}
  - {host: b, uplink: 1 Gbit/s}
"""


def run(topology: str, names: list[str]) -> list[dict[str, Any]]:
    results = run_script(SCRIPT, len(names), topology, ",".join(names))
    assert [status for status, _ in results] == [0] * len(names), results
    return [json.loads(text.splitlines()[-1]) for _, text in results]


def test_ranks_are_where_their_hosts_are_whatever_their_order(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    file.write_text(NET)
    names = ["a.example", "b.example", "a.example"]
    on_a = {"host": "a", "ranks": [0, 2]}
    assert run(str(file), names) == [on_a, {"host": "b", "ranks": [1]}, on_a]


def test_hosts_that_the_topology_does_not_have_are_an_error_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    file.write_text(NET)
    for result in run(str(file), ["a", "c", "a"]):
        assert "'c' is no host of the topology" in result["error"]
        assert (
            "The topology has a (ranks 0 and 1), b (rank 2). The job has a (ranks 0 and 2), c (rank 1)"
            in (result["error"])
        )


def test_without_a_topology_ranks_of_one_host_are_together() -> None:
    on_n0 = {"host": "n0", "ranks": [0, 2]}
    assert run("-", ["n0", "n1", "n0"]) == [on_n0, {"host": "n1", "ranks": [1]}, on_n0]


def test_what_ends_all_ranks_alike_is_told_once_on_each_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {}
    for rank, local_rank in ((0, "0"), (1, "1"), (2, "0"), (3, "1")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        error = ConfigurationError("there is no shared secret")
        tell_once(error, rank=rank)
        sys.excepthook(ConfigurationError, error, None)
        told[rank] = capsys.readouterr().err
    line = "ConfigurationError: there is no shared secret\n"
    assert told == {0: line, 1: "", 2: line, 3: ""}
