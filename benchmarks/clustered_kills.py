"""Kill the temporary server in each state of the protocol, on real processes, and write a record.

    python benchmarks/clustered_kills.py --times 20 --output benchmarks/records/DATE_clustered-kills

Each run brings a server into its state by holding back what it waits for, and kills it there; before a levelling or a
fetching server another one is killed. In a run that counts as good all have ended, survivors of a cluster hold the
same parameters to the bit, all of them name the same servers, and nobody was without a step for 5 s. The ranks and the
checks are those of the tests. The table is of all runs in the folder, which may come from several calls.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.extend([str(Path(__file__).parents[1] / "tests" / folder) for folder in ("", "updates/clustered")])

from clustered_play import SECOND_STATES
from clustered_process import DETECTION_S, Assignment, check, run_all

from syncline.updates.clustered.server import ServerState

LONGEST_WITHOUT_A_STEP_S = 5.0


def main() -> None:
    """Kill as often as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--states", nargs="*", default=[state.value for state in ServerState])
    parser.add_argument("--fate", choices=["kill", "freeze"], default="kill", help="freeze: cut off, and back too late")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "kills.jsonl").open("a") as record:
        for state in options.states:
            if options.fate == "freeze" and ServerState(state) in SECOND_STATES:
                continue  # those need two deaths, and one frozen rank at a time is enough
            for seed in range(options.times):
                record.write(json.dumps(kill_in(state, seed, options.fate)) + "\n")
                record.flush()
    runs = [json.loads(line) for line in (options.output / "kills.jsonl").read_text().splitlines()]
    (options.output / "README.md").write_text(report(runs))


def kill_in(state: str, seed: int, fate: str) -> dict[str, Any]:
    """Kill in one state; return what came of it, or what was wrong."""
    try:
        found: dict[str, Any] = check(run_all(Assignment(state=state, seed=seed, is_literal=seed % 3 == 2, fate=fate)))
    except AssertionError as error:
        return {"state": state, "seed": seed, "fate": fate, "wrong": str(error)}
    limit_s = LONGEST_WITHOUT_A_STEP_S + (DETECTION_S if fate == "freeze" else 0)
    if found["longest_gap_s"] >= limit_s:
        return {"state": state, "seed": seed, "fate": fate, "wrong": f"{found['longest_gap_s']:.1f} s without a step"}
    return found


def report(runs: Sequence[dict[str, Any]]) -> str:
    """Return the table."""
    lines = ["# The temporary server is killed in each state of the protocol", ""]
    lines += [
        "| state | fate | runs | good | longest time without a step, median and worst run |",
        "|---|---|---|---|---|",
    ]
    for fate in ("kill", "freeze"):
        for state in ServerState:
            of_state = [run for run in runs if (run["state"], run["fate"]) == (state.value, fate)]
            waits_s = [run["longest_gap_s"] for run in of_state if "wrong" not in run]
            if of_state:
                waits = f"{median(waits_s):.2f} s, {max(waits_s):.2f} s" if waits_s else "-"
                lines.append(f"| {state.value} | {fate} | {len(of_state)} | {len(waits_s)} | {waits} |")
    lines += [
        "",
        "Command: `python benchmarks/clustered_kills.py --times 20 --states ...`, five ranks as processes, two",
    ]
    lines += ["clusters, period 2, terms of two periods, a third of the runs with `cosine`.", ""]
    lines += [f"{platform.platform()}, {os.cpu_count()} CPUs for all ranks; Python {platform.python_version()}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
