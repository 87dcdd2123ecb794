"""Ranks as processes that ``init`` places by the names of their hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rank_scripts import run_script

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
