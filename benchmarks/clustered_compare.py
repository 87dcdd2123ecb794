"""Time to a fixed loss in the lab: the clustered update against DDP (gloo) and `Sharded`, several seeds, one record.

    sudo python benchmarks/clustered_compare.py --topology two-sites --task gpt --output benchmarks/records/DATE_theme

Every method trains on the same batches from the same start. The target is given, or it is the loss that the slowest of
DDP's seeds ended with, rounded up. DDP and ``Sharded`` are evaluated four times as often, lest their curves cross it
late. Methods take turns, seed by seed, so that what else happens on the machine hits all of them. ``--report-only``
writes the table anew from the runs of a record.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

WORKER = Path(__file__).with_name("clustered_training.py")
UNAVERAGED = ["--forecast", "1", "--no-averages"]
METHODS: dict[str, list[str]] = {
    "ddp": ["--method", "ddp"],
    "sharded": ["--method", "sharded"],
    "clustered": ["--method", "clustered"],
    "clustered, period 8": ["--method", "clustered", "--period", "8"],
    "clustered, period 4, forecast, no averages": ["--method", "clustered", "--period", "4", *UNAVERAGED],
    "clustered, term of 4": ["--method", "clustered", "--period", "8", "--reelect-every", "4"],
    "clustered, literal": ["--method", "clustered", "--literal"],
    "clustered, no averages": ["--method", "clustered", "--no-averages"],
    "clustered, forecast": ["--method", "clustered", "--forecast", "1"],
    "clustered, forecast, no averages": ["--method", "clustered", *UNAVERAGED],
}
SYNCHRONOUS = {"ddp", "sharded"}
FINER = 4


def main() -> None:
    """Run all, and write the record."""
    options = _options()
    options.output.mkdir(parents=True, exist_ok=True)
    record = options.output / "runs.jsonl"
    runs = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    for seed in () if options.report_only else options.seeds:
        for method in options.methods:
            runs.append(run(options, method, seed))
            record.write_text("".join(json.dumps(one) + "\n" for one in runs))
    (options.output / "README.md").write_text(report(options, runs))
    print((options.output / "README.md").read_text())


def run(options: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """Train once in a lab of its own; return what rank 0 told."""
    steps, every = options.steps, options.evaluate_every // FINER
    if method not in SYNCHRONOUS:
        steps, every = round(options.steps * options.extra_steps), options.evaluate_every
    program = [sys.executable, "-m", "syncline"]
    training = [str(WORKER), "--task", options.task, "--seed", str(seed), "--steps", str(steps)]
    training += ["--evaluate-every", str(every), *METHODS[method]]
    command = [*program, "lab", "run", options.topology, "--", *program, "run", *training]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=options.timeout)
    results = [line.split("RESULT ", 1)[1] for line in done.stdout.splitlines() if "RESULT " in line]
    assert len(results) == 1, f"{method}, seed {seed}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    print(f"{method}, seed {seed}: done", file=sys.stderr)
    return {**json.loads(results[0]), "name": method}


def time_to(curve: list[list[float]], target: float) -> float:
    """Return the seconds at which a loss curve first crosses ``target``; infinity if it never does."""
    before_s, before = 0.0, math.inf
    for _, now_s, loss in curve:
        if loss <= target:
            part = 1.0 if math.isinf(before) else (before - target) / (before - loss)
            return before_s + part * (now_s - before_s)
        before_s, before = now_s, loss
    return math.inf


def report(options: argparse.Namespace, runs: list[dict[str, Any]]) -> str:
    """Write the table of times to the target, and what it was measured on."""
    of_method = {name: [one["curve"] for one in runs if one["name"] == name] for name in METHODS}
    target = options.target or math.ceil(max(curve[-1][2] for curve in of_method["ddp"]) * 100) / 100
    lines = [f"# Clustered update: {options.task} on {options.topology}, to a validation loss of {target:.2f}", ""]
    lines += ["| method | time to target, each seed | median | against DDP, each seed | median | time of a step |"]
    lines += ["|---|---|---|---|---|---|"]
    reference = [time_to(curve, target) for curve in of_method["ddp"]]
    for method, curves in of_method.items():
        if curves:
            times = [time_to(curve, target) for curve in curves]
            step_s = median(curve[-1][1] / curve[-1][0] for curve in curves)
            ratios = [ddp_s / own_s for ddp_s, own_s in zip(reference, times, strict=False)]
            cells = [
                f"not in {curve[-1][1]:.1f} s" if math.isinf(own_s) else f"{own_s:.1f} s"
                for curve, own_s in zip(curves, times, strict=True)
            ]
            of_each = ", ".join(f"{ratio:.2f}" if ratio else "-" for ratio in ratios)
            of_medians = median(reference) / median(times)
            medians = f"{median(times):.1f} s | {of_each} | {of_medians:.2f}x" if of_medians else f"- | {of_each} | -"
            lines.append(f"| {method} | {', '.join(cells)} | {medians} | {step_s * 1000:.0f} ms |")
    import torch

    lines += ["", f"Command: `{' '.join(['python', *sys.argv])}`", ""]
    lines += [f"{platform.platform()}, {os.cpu_count()} CPUs for all ranks, load {os.getloadavg()[0]:.1f} at the end; "]
    lines += [f"Python {platform.python_version()}, torch {torch.__version__}; all runs are in `runs.jsonl`.", ""]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="two-sites")
    parser.add_argument("--task", default="gpt")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=160, help="of DDP and Sharded")
    parser.add_argument("--extra-steps", type=float, default=3.0, help="how many times as many others may need")
    parser.add_argument("--evaluate-every", type=int, default=16, help="a multiple of period and term")
    parser.add_argument("--target", type=float, help="a validation loss")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
