"""Time to a fixed loss in the lab: the clustered update against DDP (gloo) and `Sharded`, several seeds, one record.

    sudo python benchmarks/clustered_compare.py --topology two-sites --task gpt --output benchmarks/records/DATE_theme

Every method trains on the same batches from the same start, for the steps that are written in ``METHODS``; the target
is the loss that the slowest of DDP's seeds ended with, rounded up. Methods take turns, seed by seed, so that what else
happens on the machine hits all of them.
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
METHODS: dict[str, list[str]] = {
    "ddp": ["--method", "ddp"],
    "sharded": ["--method", "sharded"],
    "clustered": ["--method", "clustered"],
    "clustered, period 8": ["--method", "clustered", "--period", "8"],
    "clustered, term of 4": ["--method", "clustered", "--period", "8", "--reelect-every", "4"],
    "clustered, cosine": ["--method", "clustered", "--contribution", "cosine"],
    "clustered, last": ["--method", "clustered", "--exchange", "last"],
}
EXTRA_STEPS = 3.0
"""The clustered update sees other clusters' data later, so it may need more steps to the same loss."""


def main() -> None:
    """Run all, and write the record."""
    options = _options()
    options.output.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in range(options.seeds):
        for method in options.methods:
            runs.append(run(options, method, seed))
            (options.output / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in runs))
    (options.output / "README.md").write_text(report(options, runs))
    print((options.output / "README.md").read_text())


def run(options: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """Train once in a lab of its own; return what rank 0 told."""
    steps = options.steps if method in {"ddp", "sharded"} else round(options.steps * EXTRA_STEPS)
    program = [sys.executable, "-m", "syncline.cli.main"]
    training = [str(WORKER), "--task", options.task, "--seed", str(seed), "--steps", str(steps)]
    training += ["--evaluate-every", str(options.evaluate_every), *METHODS[method]]
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
    """Write the table of median times to the target, and what it was measured on."""
    ends = [one["curve"][-1][2] for one in runs if one["name"] == "ddp"]
    target = math.ceil(max(ends) * 100) / 100
    lines = [f"# Clustered update: {options.task} on {options.topology}, to a validation loss of {target:.2f}", ""]
    lines += ["| method | time to target, each seed | median | against DDP | time of a step |", "|---|---|---|---|---|"]
    reference = median(time_to(one["curve"], target) for one in runs if one["name"] == "ddp")
    for method in options.methods:
        curves = [one["curve"] for one in runs if one["name"] == method]
        times = [time_to(curve, target) for curve in curves]
        step_s = median(curve[-1][1] / curve[-1][0] for curve in curves)
        ratio = reference / median(times)
        cells = ", ".join(f"{seconds:.1f} s" for seconds in times)
        lines.append(f"| {method} | {cells} | {median(times):.1f} s | {ratio:.2f}x | {step_s * 1000:.0f} ms |")
    import torch

    lines += ["", f"Command: `{' '.join(['python', *sys.argv])}`", ""]
    lines += [f"{platform.platform()}, {os.cpu_count()} CPUs for all ranks, load {os.getloadavg()[0]:.1f} at the end; "]
    lines += [f"Python {platform.python_version()}, torch {torch.__version__}; all runs are in `runs.jsonl`.", ""]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="two-sites")
    parser.add_argument("--task", default="gpt")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160, help="of DDP and Sharded")
    parser.add_argument("--evaluate-every", type=int, default=16, help="a multiple of period and term")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
