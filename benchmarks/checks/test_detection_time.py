"""How soon the others know that a rank was killed or stopped, and how long they go without a step.

The ranks are those of the tests, which check what is known and by whom; here it is how soon. A killed process closes
its connections, which takes some 20 ms; a stopped one falls silent, for 3 s here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from clustered_job import lose_a_cluster_and_a_server
from clustered_process import Assignment, check, run_all

from rank_scripts import run_struck
from syncline.updates.clustered.server import ServerState

RUNTIME = Path(__file__).parents[2] / "tests" / "runtime"
VICTIM = 2
LONGEST_WITHOUT_A_STEP_S = 5.0
Say = Callable[[str], None]
FATES = pytest.mark.parametrize(("signal_name", "limit_s"), [("SIGKILL", 1.0), ("SIGSTOP", 4.5)])


def slowest_s(program: str, folder: Path, *arguments: str) -> float:
    """Let the victim be struck; return after how long the last of the others knew."""
    lines, struck = run_struck(RUNTIME / program, folder, 4, VICTIM, *arguments)
    assert len(lines) == 3
    return max(float(line["at_s"]) for line in lines) - float(struck["struck_s"])


@FATES
def test_a_struck_process_is_known_soon(tmp_path: Path, signal_name: str, limit_s: float, say: Say) -> None:
    taken_s = slowest_s("rank_process.py", tmp_path, signal_name)
    say(f"{taken_s:.3f} s (less than {limit_s:g})")
    assert taken_s < limit_s


@FATES
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_struck_in_shared_memory_is_known_soon(
    tmp_path: Path, signal_name: str, limit_s: float, moment: str, say: Say
) -> None:
    taken_s = slowest_s("shared_memory_rank_process.py", tmp_path, signal_name, moment)
    say(f"{taken_s:.3f} s (less than {limit_s:g})")
    assert taken_s < limit_s


@pytest.mark.parametrize("state", list(ServerState))
def test_nobody_is_long_without_a_step_when_a_server_dies(state: ServerState, say: Say) -> None:
    gap_s = check(run_all(Assignment(state=state.value, seed=0)))["longest_gap_s"]
    say(f"{gap_s:.2f} s without a step (less than {LONGEST_WITHOUT_A_STEP_S:g})")
    assert gap_s < LONGEST_WITHOUT_A_STEP_S


def test_nobody_is_long_without_a_step_when_a_cluster_and_a_server_die(tmp_path: Path, say: Say) -> None:
    gap_s = max(found["longest_gap_s"] for found in lose_a_cluster_and_a_server(tmp_path))
    say(f"{gap_s:.2f} s without a step (less than {LONGEST_WITHOUT_A_STEP_S:g})")
    assert gap_s < LONGEST_WITHOUT_A_STEP_S
