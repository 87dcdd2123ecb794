"""The examples that go on when ranks are killed: one kill, one newcomer, and the bits of one process at the end."""

import sys
from pathlib import Path

import pytest

from rank_scripts import forked_python

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import kills  # noqa: E402 - as a program beside its examples


@pytest.mark.parametrize("program", ["kills_ddp.py", "kills_hsdp.py", "kills_sharded.py"])
def test_a_killed_rank_comes_back_and_the_bits_are_those_of_a_replay(program, tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "STEPS_TO_THE_END", 20)
    launcher = [forked_python(forks=True), "-m", "syncline.cli.main"]
    options = ["--ranks", "4", "--every", "0.5", "--kills", "1", "--output", str(tmp_path)]
    result = kills.main([str(ROOT / "benchmarks" / program), *options], launcher)
    log = (tmp_path / "job.log").read_text()
    assert result["status"] == 0, log
    assert (result["kills"], result["epochs"]) == (1, 2), log
    assert result["digests"] == result["digests_of_replay"]
