"""Kill the temporary server in each state of the protocol, on real processes; print one line of JSON for each kill.

    python benchmarks/clustered_kills.py --times 20 > kills.jsonl

Each run brings a server into its state by holding back what it waits for, and kills it there; before a levelling or a
fetching server another one is killed. Every run must end, survivors of a cluster must hold the same parameters to the
bit, and nobody may wait 5 s. The ranks and the checks are those of the tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "updates" / "clustered"))

from clustered_play import SECOND_STATES
from clustered_process import Assignment, check, run_all

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
        kill_in(state, options.times, options.fate)


def kill_in(state: str, times: int, fate: str) -> None:
    """Kill in one state, at as many moments."""
    longest_s = 0.0
    for seed in range(times):
        contribution = "cosine" if seed % 3 == 2 else "uniform"
        found = check(run_all(Assignment(state=state, seed=seed, contribution=contribution, fate=fate)))
        longest_s = max(longest_s, found["longest_gap_s"])
        print(json.dumps(found), flush=True)
    print(json.dumps({"state": state, "kills": times, "longest_s": longest_s}), flush=True)


if __name__ == "__main__":
    main()
