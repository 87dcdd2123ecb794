r"""Loss against samples and against time: synchronous, swap, additive, rebase and local, several seeds.

    python benchmarks/overlapped_compare.py --lab two-sites --task digits --batch-size 64 --alone-steps 48 \
        --record benchmarks/records/DATE_overlapped-digits

Without ``--lab`` the ranks run on loopback. What is not an option here goes to ``overlapped_rank.py``. A record is made
of all seeds that were run into its folder, so that each may have a quiet hour of its own (``--seeds 0``, then
``--seeds 1``); ``runs/`` in it can go when it is complete. All modes of a seed run in the same processes, one after
another, and each is compared with what these processes computed alone just before and just after it. ``seconds`` of a
curve are each mode's own.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from overlapped_record import Place, Ranks, curve, loss_at, plot, rate, read_all, run, write_record

DEFAULT_MODES = ("local", "swap", "rebase", "additive", "synchronous", "ddp")


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; the rest is for the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks on loopback; a lab has its own")
    parser.add_argument("--lab", help="topology of an emulated network (Linux, root)")
    parser.add_argument("--modes", nargs="+", default=DEFAULT_MODES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", choices=("digits", "gpt"), default="digits")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="for one seed")
    return parser.parse_known_args()


def main() -> None:
    """Run everything, one seed after another, and write the record."""
    options, rest = parse()
    place = Place(num_ranks=options.ranks, lab=options.lab)
    runs: dict[str, list[Ranks]] = {}
    shares: dict[str, list[float]] = {}
    for seed in options.seeds:
        arguments = ["--modes", *options.modes, "--task", options.task, "--seed", str(seed), *rest]
        run(place, options.record, f"seed-{seed}", arguments, deadline_s=options.deadline_s)
    for found in read_all(options.record):
        for mode, share in compute_shares(found).items():
            runs.setdefault(mode, []).append(found[mode])
            shares.setdefault(mode, []).append(share)
    curves = {mode: [curve(ranks) for ranks in seeds] for mode, seeds in runs.items()}
    results = {"curves": curves, "of_compute_alone": shares}
    title = f"Overlapped update: {options.task}"
    write_record(options.record, title, place, table(runs, shares), TEXT + verdicts(curves), results)
    plot(options.record, curves, title=f"{options.task}, {place}")


def compute_shares(found: dict[str, Ranks]) -> dict[str, float]:
    """Return each mode's speed over that of compute alone, which was measured before every mode.

    Both are those of the fleet, which has made its steps when the last rank has: where ranks share processors, one that
    is fast has taken the time of another.
    """
    alone = [min(one["alone_rate"] for one in ranks) for ranks in found.values()]
    after = [*alone[1:], alone[-1]]
    return {
        mode: min(one["num_steps"] / one["seconds"] for one in ranks) / statistics.mean(pair)
        for (mode, ranks), pair in zip(found.items(), zip(alone, after, strict=True), strict=True)
    }


TEXT = (
    "Loss at the end on all data (mean over ranks and seeds; lowest and highest seed); steps per second of a rank; "
    "those of the last rank over what the last made alone just before and after, without any exchange (lowest and "
    "highest seed), with the ends of periods and without the time waited in them. Staleness is in own iterations; "
    "`global` is the share of steps in which a global gradient was used. Curves: `loss.png`. `ddp` makes fewer steps "
    "than the others, for its speed alone: it learns as `synchronous` does, which may make fewer too. `local` is "
    "judged on each rank's own parameters: it has no common model at all."
)


def table(runs: dict[str, list[Ranks]], shares: dict[str, list[float]]) -> list[list[str]]:
    """Return a row for each mode."""
    rows = [["mode", "loss", "seeds", "steps/s", "of compute alone", "between period ends", "staleness", "global"]]
    for mode, seeds in runs.items():
        losses = [curve(ranks)[-1]["loss"] for ranks in seeds]
        inside = [share * one_without_ends(ranks) for share, ranks in zip(shares[mode], seeds, strict=True)]
        rows.append(
            [
                mode,
                f"{statistics.mean(losses):.3f}",
                f"{min(losses):.3f} to {max(losses):.3f}",
                f"{statistics.mean(rate(ranks) for ranks in seeds):.2f}",
                spread_of(shares[mode]),
                spread_of(inside),
                *described([one["counted"] for ranks in seeds for one in ranks if one["counted"]]),
            ]
        )
    return rows


def verdicts(curves: dict[str, list[list[dict[str, float]]]]) -> str:
    """Say for each mode whether it wins or loses against synchronous training, by samples and by time."""
    if "synchronous" not in curves:
        return ""
    said = ["", "", "Each mode against synchronous training, after as many samples and after as long:", ""]
    for mode, seeds in curves.items():
        if mode in ("synchronous", "ddp"):
            continue
        outcomes = [verdict(seeds, curves["synchronous"], key) for key in ("samples", "seconds")]
        said.append(f"- `{mode}`: {', '.join(outcomes)}.")
    return "\n".join(said)


def verdict(mine: list[list[dict[str, float]]], others: list[list[dict[str, float]]], key: str) -> str:
    """Compare two modes, seed by seed, where the one that ended first had ended."""
    ends = [min(one[-1][key], other[-1][key]) for one, other in zip(mine, others, strict=True)]
    loss, other = (
        statistics.mean(loss_at(rows, key, end) for rows, end in zip(runs, ends, strict=True))
        for runs in (mine, others)
    )
    outcome = "wins" if loss < other else "loses"
    return f"at {statistics.mean(ends):.0f} {key} it {outcome} ({loss:.3f} against {other:.3f})"


def one_without_ends(ranks: Ranks) -> float:
    """Return by how much the fleet would be faster if ends of periods took no time: by the rank that came last to them.

    It waits for the average alone, the others for it too.
    """
    return min(one["seconds"] / (one["seconds"] - one["counted"].get("waited_period_s", 0.0)) for one in ranks)


def spread_of(values: list[float]) -> str:
    """``"97 % (96 to 98)"``."""
    low, high = min(values), max(values)
    return f"{100 * statistics.mean(values):.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def described(counted: list[dict[str, Any]]) -> list[str]:
    """Staleness, and share with a global gradient, over all ranks."""
    if not counted:
        return ["", ""]
    mean = statistics.mean(one["mean_staleness"] for one in counted)
    share = statistics.mean(one["share_with_global"] for one in counted)
    return [f"{mean:.1f}, at most {max(one['max_staleness'] for one in counted)}", f"{share:.0%}"]


if __name__ == "__main__":
    main()
