"""Real processes over loopback: the temporary server dies in each state of the protocol (more often: benchmarks)."""

from pathlib import Path

import pytest
from clustered_process import SECOND_STATES, Assignment, check, run_all

from syncline.updates.clustered.server import ServerState

# Whether a successor has anything to level is a matter of timing: test_protocol.py kills servers in that state instead.
BY_TIMING = {ServerState.LEVELLING}


@pytest.mark.parametrize("state", [state for state in ServerState if state not in BY_TIMING])
def test_the_others_go_on_within_5_s(state: ServerState, tmp_path: Path) -> None:
    wanted = 2 if state in SECOND_STATES else 1
    for seed in range(8):  # which rank is drawn decides whether a successor comes into the rarer states
        folder = tmp_path / str(seed)
        folder.mkdir()
        assignment = Assignment(state=state.value, nth=2 + seed, seed=seed)
        print(assignment)
        if len(check(run_all(assignment, folder), assignment)["dead"]) == wanted:
            return
    raise AssertionError(f"no server came to be {state.value}")
