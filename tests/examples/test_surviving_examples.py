"""The examples that go on when ranks are killed: one kill, one newcomer, and the bits of one process at the end."""

import subprocess
import sys
from pathlib import Path

import pytest

from rank_scripts import forked_python

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import kills  # noqa: E402 - as a program beside its examples
import kills_task  # noqa: E402

LOST_IN_COMMIT = """
import os, signal, sys
from pathlib import Path
import syncline
commit, rank, calls = syncline.commit, int(os.environ["RANK"]), []
def lose():
    told = commit()
    calls.append(told)
    if len(calls) == 5 and "SYNCLINE_JOIN" not in os.environ:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 3:
            raise syncline.PeerLostError("rank 1 is lost", rank=1, host="h1")
    return told
syncline.commit = lose
sys.path.append(sys.argv[2])
import kills_hsdp
kills_hsdp.main(Path(sys.argv[1]))
"""
"""What rank 3 has not heard any more, ranks 0 and 2 have: all have the gradients of that step."""


@pytest.mark.parametrize("program", ["kills_ddp.py", "kills_hsdp.py", "kills_sharded.py"])
def test_a_killed_rank_comes_back_and_the_bits_are_those_of_a_replay(program, tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "STEPS_TO_THE_END", 20)
    launcher = [forked_python(forks=True), "-m", "syncline"]
    options = ["--ranks", "4", "--every", "0.5", "--kills", "1", "--output", str(tmp_path)]
    result = kills.main([str(ROOT / "benchmarks" / program), *options], launcher)
    log = (tmp_path / "job.log").read_text()
    assert result["status"] == 0, log
    assert (result["kills"], result["epochs"]) == (1, 2), log
    assert result["digests"] == result["digests_of_replay"]


def test_who_holds_a_shard_alone_makes_the_step_that_others_have_made(tmp_path):
    (tmp_path / "program.py").write_text(LOST_IN_COMMIT)
    (tmp_path / "stop").write_text("12")
    command = [forked_python(forks=True), "-m", "syncline", "run", "--ranks", "4", "--elastic"]
    command += ["--restarts", "1", str(tmp_path / "program.py"), str(tmp_path), str(ROOT / "benchmarks")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    watched = kills.Watched(folder=tmp_path)
    watched.read()
    history = watched.history()
    assert len(history) == 12
    assert len({len(line["counted"]) for line in history}) == 2  # four ranks, and then a pair
    assert set(history[-1]["digests"]) == {0, 1}
    kills.replay(kills_task.load(ROOT / "benchmarks" / "kills_hsdp.py"), history)  # compares the bits of both shards
