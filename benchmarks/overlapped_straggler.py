"""One rank four times slower: a quorum of N - 1 against an all-reduce, in steps per second and loss.

    python benchmarks/overlapped_straggler.py --ranks 4 --compute-ms 40 --record benchmarks/records/DATE_straggler

The slow rank is stopped and continued (SIGSTOP, SIGCONT) for three quarters of the time; with ``--sleep`` it sleeps
four times as long in each step instead. What is not an option here goes to ``overlapped_rank.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from overlapped_record import Place, curve, environment, plot, rate, run, write_readme


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; the rest is for the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lab", help="topology of an emulated network (Linux, root)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="for one run")
    return parser.parse_known_args()


def main() -> None:
    """Run all-reduce and quorum, with and without the slow rank."""
    options, rest = parse()
    place = Place(num_ranks=options.ranks, lab=options.lab)
    slow = [
        "--slow-rank",
        str(options.ranks - 1),
        *(["--slow-factor", "4"] if options.sleep else ["--stop-duty", "0.75"]),
    ]
    quorum = ["--quorum", str(options.ranks - 1)]
    cases = {
        "all-reduce, all ranks alike": ["--mode", "synchronous"],
        "all-reduce, one slow": ["--mode", "synchronous", *slow],
        "swap, M = N - 1, one slow": ["--mode", "swap", *quorum, *slow],
        "rebase, M = N - 1, one slow": ["--mode", "rebase", *quorum, *slow],
    }
    runs: dict[str, list[list[dict[str, Any]]]] = {}
    for seed in options.seeds:
        for number, (name, arguments) in enumerate(cases.items()):
            out = options.record / "runs" / f"{number}-{seed}"
            found = run(place, out, [*arguments, "--seed", str(seed), *rest], deadline_s=options.deadline_s)
            if found:
                runs.setdefault(name, []).append(found)
    curves = {name: [curve(ranks) for ranks in seeds] for name, seeds in runs.items()}
    facts = environment(place, ["python", *sys.argv])
    summary = {"facts": facts, "curves": curves, "rates": {name: [rate(one) for one in runs[name]] for name in runs}}
    (options.record / "results.json").write_text(json.dumps(summary, indent=1))
    write_readme(options.record, "Overlapped update: one slow rank", facts, table(runs), TEXT)
    plot(options.record, curves, title=f"one of {place.num_ranks} ranks is four times slower")


TEXT = (
    "Steps per second of the fastest rank, and of the slow one; how many times as many as the all-reduce makes with "
    "the same slow rank; the loss at the end, and where all-reduce was after as many samples."
)


def table(runs: dict[str, list[list[dict[str, Any]]]]) -> list[list[str]]:
    """Return a row for each case."""
    reference = "all-reduce, one slow"
    base = statistics.mean(rate(one) for one in runs[reference])
    rows = [["case", "steps/s", "slow rank", "times all-reduce", "samples", "loss", "all-reduce at these samples"]]
    for name, seeds in runs.items():
        speed = statistics.mean(rate(ranks) for ranks in seeds)
        slowest = statistics.mean(min(one["num_steps"] / one["seconds"] for one in ranks) for ranks in seeds)
        ends = [curve(ranks)[-1] for ranks in seeds]
        samples = statistics.mean(end["samples"] for end in ends)
        loss = statistics.mean(end["loss"] for end in ends)
        there = statistics.mean(loss_at(curve(ranks), samples) for ranks in runs[reference])
        rows.append(
            [
                name,
                f"{speed:.1f}",
                f"{slowest:.1f}",
                f"{speed / base:.2f}",
                f"{samples:.0f}",
                f"{loss:.3f}",
                f"{there:.3f}",
            ]
        )
    return rows


def loss_at(rows: list[dict[str, float]], samples: float) -> float:
    """Return the loss after so many samples, between two snapshots by proportion."""
    for before, after in itertools.pairwise(rows):
        if before["samples"] <= samples <= after["samples"]:
            share = (samples - before["samples"]) / max(1.0, after["samples"] - before["samples"])
            return before["loss"] + share * (after["loss"] - before["loss"])
    return rows[-1]["loss"]


if __name__ == "__main__":
    main()
