"""Real processes over loopback: the temporary server dies in each state of the protocol (more often: benchmarks)."""

import pytest
from clustered_process import Assignment, check, run_all

from syncline.updates.clustered.server import ServerState


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("state", list(ServerState))
def test_the_others_go_on(state: ServerState, seed: int) -> None:
    check(run_all(Assignment(state=state.value, seed=seed)))
