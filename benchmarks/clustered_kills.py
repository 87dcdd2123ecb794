"""Kill the temporary server in each state of the protocol, on real processes; print one line of JSON for each kill.

    python benchmarks/clustered_kills.py --times 20 > kills.jsonl

A run counts only if somebody died in the state that was asked for. Every run must end, survivors of a cluster must hold
the same parameters to the bit, and nobody may wait 5 s. The ranks and the checks are those of the tests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "updates" / "clustered"))

from clustered_process import SECOND_STATES, Assignment, check, run_all

from syncline.updates.clustered.server import ServerState


def main() -> None:
    """Kill as often as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--states", nargs="*", default=[state.value for state in ServerState])
    parser.add_argument("--fate", choices=["kill", "freeze"], default="kill", help="freeze: cut off, and back too late")
    options = parser.parse_args()
    for state in options.states:
        if options.fate == "freeze" and ServerState(state) in SECOND_STATES:
            continue  # those need two deaths, and one frozen rank at a time is enough
        kill_in(ServerState(state), options.times, options.fate)


def kill_in(state: ServerState, times: int, fate: str) -> None:
    """Kill in one state; seeds that do not lead there do not count."""
    wanted = 2 if state in SECOND_STATES else 1
    num_kills = num_runs = 0
    longest_s = 0.0
    while num_kills < times:
        contribution = "cosine" if num_runs % 2 and state is not ServerState.FETCHING else "uniform"
        assignment = Assignment(
            state=state.value, nth=2 + num_runs % 9, seed=num_runs, contribution=contribution, fate=fate
        )
        num_runs += 1
        with tempfile.TemporaryDirectory() as folder:
            found = check(run_all(assignment, Path(folder)), assignment)
        if len(found["dead"]) == wanted:
            num_kills += 1
            longest_s = max(longest_s, found["longest_gap_s"])
            print(json.dumps(found), flush=True)
        assert num_runs < 50 * times, f"no server comes to be {state.value}"
    print(json.dumps({"state": state.value, "kills": num_kills, "runs": num_runs, "longest_s": longest_s}), flush=True)


if __name__ == "__main__":
    main()
