r"""One rank four times slower: a quorum of N - 1 against an all-reduce, in steps per second and loss.

    python benchmarks/overlapped_straggler.py --ranks 3 --task gpt --batch-size 16 --iterations 384 --period 96 \
        --record benchmarks/records/DATE_overlapped-straggler

The slow rank is stopped and continued (SIGSTOP, SIGCONT) for three quarters of the time. What is not an option here
goes to ``overlapped_rank.py``. Use as many ranks as leave each a processor but the slow one: with more, the fast ranks
get slower when they stop waiting, because they then compute at the same time.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from overlapped_record import Place, Ranks, curve, loss_at, plot, rate, run, write_record

REFERENCE = "all-reduce, one slow"


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; the rest is for the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--lab", help="topology of an emulated network (Linux, root)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--deadline-s", type=float, default=300.0, help="for one run")
    return parser.parse_known_args()


def main() -> None:
    """Run all-reduce and quorum, with and without the slow rank."""
    options, rest = parse()
    place = Place(num_ranks=options.ranks, lab=options.lab)
    slow = ["--slow-rank", str(options.ranks - 1), "--stop-duty", "0.75"]
    quorum = ["--quorum", str(options.ranks - 1)]
    cases = {
        "all-reduce, all alike": ("synchronous", []),
        REFERENCE: ("synchronous", slow),
        "swap, M = N - 1, one slow": ("swap", [*quorum, *slow]),
        "rebase, M = N - 1, one slow": ("rebase", [*quorum, *slow]),
    }
    runs: dict[str, list[Ranks]] = {}
    for seed in options.seeds:
        for number, (name, (mode, arguments)) in enumerate(cases.items()):
            told = ["--modes", mode, *arguments, "--seed", str(seed), *rest]
            found = run(place, options.record, f"{number}-{seed}", told, deadline_s=options.deadline_s)
            if found:
                runs.setdefault(name, []).append(found[mode])
    curves = {name: [curve(ranks) for ranks in seeds] for name, seeds in runs.items()}
    results = {"curves": curves, "rates": {name: [rate(one, fastest=True) for one in runs[name]] for name in runs}}
    write_record(options.record, "Overlapped update: one slow rank", place, table(runs), TEXT, results)
    plot(options.record, curves, title=f"one of {place} is four times slower")


TEXT = (
    "Steps per second of the fastest rank (lowest and highest seed), and of the slow one; how many times as many as "
    "the all-reduce makes with the same slow rank; samples of all ranks and the loss at the end, and where all-reduce "
    "was after as many samples."
)


def table(runs: dict[str, list[Ranks]]) -> list[list[str]]:
    """Return a row for each case."""
    base = statistics.mean(rate(one, fastest=True) for one in runs[REFERENCE])
    rows = [["case", "steps/s", "slow rank", "times all-reduce", "samples", "loss", "all-reduce there", "difference"]]
    for name, seeds in runs.items():
        speeds = [rate(ranks, fastest=True) for ranks in seeds]
        slowest = statistics.mean(min(one["num_steps"] / one["seconds"] for one in ranks) for ranks in seeds)
        ends = [curve(ranks)[-1] for ranks in seeds]
        samples = statistics.mean(end["samples"] for end in ends)
        loss = statistics.mean(end["loss"] for end in ends)
        there = statistics.mean(
            loss_at(curve(ranks), "samples", end["samples"]) for ranks, end in zip(runs[REFERENCE], ends, strict=False)
        )
        rows.append(
            [
                name,
                f"{statistics.mean(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})",
                f"{slowest:.1f}",
                f"{statistics.mean(speeds) / base:.2f}",
                f"{samples:.0f}",
                f"{loss:.4f}",
                f"{there:.4f}",
                f"{(loss - there) / there:+.1%}",
            ]
        )
    return rows


if __name__ == "__main__":
    main()
