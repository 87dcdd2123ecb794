"""Runs ``overlapped_rank.py`` in many modes, reads what the ranks wrote, and writes a record folder."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import syncline

Ranks = list[dict[str, Any]]
"""What each rank measured in one mode."""

LEAVE_S = 30.0
"""How long a run that is over its time may take to end."""
RANK_SCRIPT = Path(__file__).with_name("overlapped_rank.py")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the ranks run: on loopback, or on the hosts of an emulated network."""

    num_ranks: int
    lab: str | None

    def __str__(self) -> str:
        """``"8 ranks, two-sites"``."""
        return f"{self.num_ranks} ranks, {self.lab or 'loopback'}"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that starts all ranks."""
        program = [str(Path(sys.executable).with_name("syncline"))]
        script = ["run", str(RANK_SCRIPT), *arguments]
        if self.lab is not None:
            return [*program, "lab", "run", self.lab, "--", *program, *script]
        return [*program, "run", "--ranks", str(self.num_ranks), str(RANK_SCRIPT), *arguments]


def run(place: Place, record: Path, name: str, arguments: Sequence[str], *, deadline_s: float) -> dict[str, Ranks]:
    """Run all ranks; return for each mode what they wrote, or nothing if they did not end well (output is kept)."""
    out = record / "runs" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    command = place.command([*arguments, "--out", str(out)])
    with (out / "output.txt").open("w") as output:
        print(shlex.join(command), file=output, flush=True)
        names = os.environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=names, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                status = process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                process.terminate()  # it removes its lab
                status = process.wait(LEAVE_S)
    print(f"{name}: status {status}", flush=True)
    return read(out) if status == 0 else {}


def read(folder: Path) -> dict[str, Ranks]:
    """Return for each mode what all ranks wrote to ``folder``, also where they were stopped later."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]
    modes = [mode for mode in ranks[0] if all(mode in one for one in ranks)] if ranks else []
    return {mode: [one[mode] for one in ranks] for mode in modes}


def read_all(record: Path) -> list[dict[str, Ranks]]:
    """Return what all runs of a record found, in the order of their names."""
    return [read(folder) for folder in sorted((record / "runs").iterdir())]


def rate(ranks: Ranks, *, fastest: bool = False) -> float:
    """Return the steps per second of a rank: the mean, or those of the fastest."""
    rates = [one["num_steps"] / one["seconds"] for one in ranks]
    return max(rates) if fastest else sum(rates) / len(rates)


def curve(ranks: Ranks) -> list[dict[str, float]]:
    """Return the mean over ranks of what they measured at each snapshot."""
    num_rows = min(len(one["rows"]) for one in ranks)
    keys = ("iteration", "samples", "seconds", "loss")
    rows = []
    for number in range(num_rows):
        row = {key: sum(one["rows"][number][key] for one in ranks) / len(ranks) for key in keys}
        row["samples"] *= len(ranks)
        rows.append(row)
    rows[-1] = {key: sum(one["rows"][-1][key] for one in ranks) / len(ranks) for key in keys} | {
        "samples": sum(one["rows"][-1]["samples"] for one in ranks)
    }
    return rows


def loss_at(rows: list[dict[str, float]], key: str, value: float) -> float:
    """Return the loss after so many samples, or seconds, between two snapshots by proportion; the last one beyond."""
    for before, after in itertools.pairwise(rows):
        if before[key] <= value <= after[key]:
            share = (value - before[key]) / max(1e-9, after[key] - before[key])
            return before["loss"] + share * (after["loss"] - before["loss"])
    return rows[-1]["loss"]


def environment(place: Place) -> dict[str, Any]:
    """Return what was measured on, and with what."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "ranks": str(place),
        "processor": model,
        "num_processors": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "syncline": syncline.__name__ + " at " + commit,
    }


def write_record(
    folder: Path, title: str, place: Place, table: Sequence[Sequence[str]], text: str, results: dict[str, Any]
) -> None:
    """Write all figures, and what a reader needs: the question, the answer, and how it was got."""
    facts = environment(place)
    (folder / "results.json").write_text(json.dumps({"facts": facts, **results}, indent=1))
    head, *rows = table
    lines = [f"# {title}", "", text, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", "![loss](loss.png)", "", "## How", "", *(f"- {name}: `{value}`" for name, value in facts.items()), ""]
    (folder / "README.md").write_text("\n".join(lines))
    print("\n".join(lines))


def plot(folder: Path, curves: dict[str, list[list[dict[str, float]]]], *, title: str) -> None:
    """Loss against samples and against time, a line for each mode and a thin one for each seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    longest_s = max((rows[-1]["seconds"] for runs in curves.values() for rows in runs), default=1.0)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, key, label in zip(axes, ("samples", "seconds"), ("samples", "seconds"), strict=True):
        for number, (mode, runs) in enumerate(curves.items()):
            for position, rows in enumerate(runs):
                name = mode if position == 0 else None
                values = [row["loss"] for row in rows]
                axis.plot([row[key] for row in rows], values, color=f"C{number}", alpha=0.75, lw=1.2, label=name)
        axis.set_xlabel(label)
        if key == "seconds":
            axis.set_xlim(0, longest_s)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss, mean over ranks")
    axes[0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(folder / "loss.png", dpi=120)
    plt.close(figure)
