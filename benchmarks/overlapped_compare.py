r"""Loss against samples and against time: synchronous, swap, additive, periodic and local, several seeds.

    python benchmarks/overlapped_compare.py --lab two-sites --ranks 8 --task digits --compute-ms 20 \
        --max-staleness -1 --record benchmarks/records/2026-11-21_overlapped-digits

Without ``--lab`` the ranks run on loopback. What is not an option here goes to ``overlapped_rank.py``. Iterations per
second are compared with those of ``local``, which is compute alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from overlapped_record import Place, curve, environment, plot, rate, run, write_readme

DEFAULT_MODES = ("synchronous", "ddp", "swap", "at-once", "rebase", "additive", "periodic", "local")


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; the rest is for the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lab", help="topology of an emulated network (Linux, root)")
    parser.add_argument("--modes", nargs="+", default=DEFAULT_MODES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", default="digits")
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="for one run")
    return parser.parse_known_args()


def main() -> None:
    """Run everything, one after another, and write the record."""
    options, rest = parse()
    place = Place(num_ranks=options.ranks, lab=options.lab)
    runs: dict[str, list[list[dict[str, Any]]]] = {}
    for seed in options.seeds:
        for mode in options.modes:
            arguments = ["--mode", mode, "--task", options.task, "--seed", str(seed), *rest]
            out = options.record / "runs" / f"{mode}-{seed}"
            found = run(place, out, arguments, deadline_s=options.deadline_s)
            if found:
                runs.setdefault(mode, []).append(found)
    curves = {mode: [curve(ranks) for ranks in seeds] for mode, seeds in runs.items()}
    facts = environment(place, ["python", *sys.argv])
    summary = {"facts": facts, "curves": curves, "rates": {mode: [rate(one) for one in runs[mode]] for mode in runs}}
    (options.record / "results.json").write_text(json.dumps(summary, indent=1))
    write_readme(options.record, f"Overlapped update: {options.task}", facts, table(runs), TEXT)
    plot(options.record, curves, title=f"{options.task}, {place.num_ranks} ranks, {place.lab or 'loopback'}")


TEXT = (
    "Loss at the end (mean over ranks and seeds; lowest and highest seed), steps per second of the fastest rank, and "
    "the share of compute alone (`local`). Staleness is in own iterations; `with global` is the share of steps in "
    "which a global gradient was used. Curves: `loss.svg`."
)


def table(runs: dict[str, list[list[dict[str, Any]]]]) -> list[list[str]]:
    """Return a row for each mode."""
    alone = statistics.mean(rate(one) for one in runs["local"]) if "local" in runs else float("nan")
    rows = [["mode", "loss", "seeds", "steps/s", "of compute alone", "staleness mean / max", "with global", "dropped"]]
    for mode, seeds in runs.items():
        losses = [curve(ranks)[-1]["loss"] for ranks in seeds]
        speed = statistics.mean(rate(ranks) for ranks in seeds)
        counted = [one["counted"] for ranks in seeds for one in ranks if one["counted"]]
        rows.append(
            [
                mode,
                f"{statistics.mean(losses):.3f}",
                f"{min(losses):.3f} to {max(losses):.3f}",
                f"{speed:.2f}",
                f"{speed / alone:.1%}",
                *described(counted),
            ]
        )
    return rows


def described(counted: list[dict[str, Any]]) -> list[str]:
    """Staleness, share with a global gradient, and drops, over all ranks."""
    if not counted:
        return ["", "", ""]
    mean = statistics.mean(one["mean_staleness"] for one in counted)
    share = statistics.mean(one["share_with_global"] for one in counted)
    highest = max(one["max_staleness"] for one in counted)
    return [f"{mean:.1f} / {highest}", f"{share:.0%}", str(max(sum(one["dropped"]) for one in counted))]


if __name__ == "__main__":
    main()
