r"""Loss against samples and against time: synchronous, swap, rebase and local, several seeds.

    python benchmarks/overlapped_compare.py --lab two-sites --task digits --batch-size 64 --alone-steps 48 \
        --record benchmarks/records/DATE_overlapped-digits

Without ``--lab`` the ranks run on loopback. What is not an option here goes to ``overlapped_rank.py``. A record is made
of all seeds that were run into its folder, so that each may have a quiet hour of its own (``--seeds 0``, then
``--seeds 1``); ``runs/`` in it can go when it is complete. All modes of a seed run in the same processes, one after
another, and each is compared with what these processes computed alone just before and just after it (see
``overlapped_pace.py``). ``seconds`` of a curve are each mode's own.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overlapped_pace import rate, rate_between_ends
from overlapped_record import Place, Ranks, curve, loss_at, plot, rate as mean_rate, read_all, run, write_record

WITH_PERIODS = ("swap", "rebase", "periodic")
DEFAULT_MODES = ("local", "swap", "rebase", "synchronous", "ddp")


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How fast one mode was in one run, as shares of compute alone."""

    whole: float
    between_ends: float
    alone: tuple[float, ...]
    """Steps per second alone, before and after."""


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; the rest is for the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks on loopback; a lab has its own")
    parser.add_argument("--lab", help="topology of an emulated network (Linux, root)")
    parser.add_argument("--modes", nargs="+", default=DEFAULT_MODES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", choices=("digits", "gpt"), default="digits")
    parser.add_argument("--period", type=int, default=64)
    parser.add_argument("--deadline-s", type=float, default=600.0, help="for one seed")
    return parser.parse_known_args()


def main() -> None:
    """Run everything, one seed after another, and write the record."""
    options, rest = parse()
    place = Place(num_ranks=options.ranks, lab=options.lab)
    runs: dict[str, list[Ranks]] = {}
    shares: dict[str, list[Shares]] = {}
    for seed in options.seeds:
        told = ["--task", options.task, "--period", str(options.period), "--seed", str(seed)]
        arguments = ["--modes", *options.modes, *told, *rest]
        run(place, options.record, f"seed-{seed}", arguments, deadline_s=options.deadline_s)
    for found in read_all(options.record):
        share_of = compute_shares(found, options.period)
        for mode, ranks in found.items():
            runs.setdefault(mode, []).append(ranks)
            shares.setdefault(mode, []).extend([share_of[mode]] if mode in share_of else [])
    curves = {mode: [curve(ranks) for ranks in seeds] for mode, seeds in runs.items()}
    results = {"curves": curves, "speeds": {mode: [asdict(one) for one in shares[mode]] for mode in shares}}
    title = f"Overlapped update: {options.task}"
    write_record(options.record, title, place, table(runs, shares), TEXT + verdicts(curves), results)
    plot(options.record, curves, title=f"{options.task}, {place}")


def compute_shares(found: dict[str, Ranks], period: int) -> dict[str, Shares]:
    """Return each mode's speed over that of compute alone, just before and after it."""
    shares = {}
    for mode, ranks in found.items():
        blocks = [rate(list(block)) for block in zip(*(one["alone"] for one in ranks), strict=True)]
        if not blocks:
            continue
        alone = statistics.mean(blocks)
        moments = [one["moments"] for one in ranks]
        between = rate_between_ends(moments, period) if mode in WITH_PERIODS else rate(moments)
        last = min(one["num_steps"] / one["seconds"] for one in ranks)
        shares[mode] = Shares(whole=last / alone, between_ends=between / alone, alone=tuple(blocks))
    return shares


TEXT = (
    "Loss at the end on all data (mean over ranks and seeds; lowest and highest seed); steps per second of a rank. `of "
    "compute alone`: the steps of the rank that came last, over all the time that it took with the ends of periods, "
    "over what ranks make alone. `between period ends`: the steps of a rank while all were at work, without each "
    "period's last step, over the same. Alone, all ranks train a copy at once, without any exchange, just before and "
    "just after each mode (mean of the two; `alone` is the lowest and highest of all such blocks, steps per second); "
    "their speed, too, is taken while all are at work. Brackets: lowest and highest seed. Staleness is in own "
    "iterations; `global` is the share of steps in which a global gradient was used. Curves: `loss.png`. `ddp` makes "
    "fewer steps than the others, for its speed alone: it learns as `synchronous` does, which may make fewer too. "
    "`local` is judged on each rank's own parameters: it has no common model at all; its speed says how far the "
    "yardstick can be trusted."
)


def table(runs: dict[str, list[Ranks]], shares: dict[str, list[Shares]]) -> list[list[str]]:
    """Return a row for each mode."""
    head = ["mode", "loss", "seeds", "steps/s", "of compute alone", "between period ends", "alone"]
    rows = [[*head, "staleness", "global"]]
    for mode, seeds in runs.items():
        losses = [curve(ranks)[-1]["loss"] for ranks in seeds]
        blocks = [block for one in shares[mode] for block in one.alone]
        rows.append(
            [
                mode,
                f"{statistics.mean(losses):.3f}",
                f"{min(losses):.3f} to {max(losses):.3f}",
                f"{statistics.mean(mean_rate(ranks) for ranks in seeds):.2f}",
                spread_of([one.whole for one in shares[mode]]),
                spread_of([one.between_ends for one in shares[mode]]),
                f"{min(blocks):.2f} to {max(blocks):.2f}" if blocks else "",
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


def spread_of(values: list[float]) -> str:
    """``"97 % (96 to 98)"``; empty where nothing was measured alone."""
    if not values:
        return ""
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
