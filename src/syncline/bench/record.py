"""The record folder of a benchmark: the figures, and what a reader needs to judge and to repeat them.

Bars are drawn as a picture (PNG), where there is matplotlib, the extra ``report``.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

from syncline.bench.rows import Group, Row, group_rows
from syncline.topology import Topology

RECORDS = Path("benchmarks") / "records"
_PACKAGES = ("syncline", "torch", "numpy")
_WIDTH_INCHES = 7.5
_BAR_INCHES = 0.32
_MARGIN_INCHES = 1.0


def default_folder(theme: str) -> Path:
    """Name the folder of a run that nobody named; none that is there already."""
    first = RECORDS / f"{datetime.now(tz=UTC):%Y-%m-%d}_{theme}"
    numbered = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return next(folder for folder in chain([first], numbered) if not folder.exists())


def collect_facts(command: Sequence[str], topologies: Sequence[Topology], *, network: str) -> dict[str, Any]:
    """Return what was run, on what, and with what; the machine's load is that before the run."""
    return {
        "command": shlex.join(command),
        "time": f"{datetime.now(tz=UTC):%Y-%m-%d %H:%M} UTC",
        "network": network,
        "topology": ", ".join(topology.name for topology in topologies),
        "ranks": ", ".join(str(topology.num_ranks) for topology in topologies),
        "threads_per_rank": 1,
        "processor": _processor(),
        "num_processors": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
        **_commit(),
    }


def write_record(folder: Path, rows: Sequence[Row], facts: dict[str, Any], table: str) -> tuple[str, ...]:
    """Write results.json, table.txt and plot.png; return what was left out, in sentences for the user."""
    write_results(folder, [row.to_dict() for row in rows], facts, table)
    if not has_matplotlib():
        return ("no plot.png: matplotlib is not installed; it comes with pip install 'syncline[report]'",)
    title = f"{facts['topology']}, {facts['ranks']} ranks, {facts['network']}"
    _draw_bars(folder / "plot.png", group_rows(rows), title=title)
    return ()


def write_results(folder: Path, rows: Sequence[dict[str, Any]], facts: dict[str, Any], table: str) -> None:
    """Write results.json and table.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    lines = [f"{name}: {value}" for name, value in facts.items()]
    (folder / "table.txt").write_text("\n".join([*lines, "", table.rstrip(), ""]))


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _commit() -> dict[str, str]:
    """Name the commit, where Syncline runs from a checkout of its own."""
    checkout = Path(__file__).parents[3]
    if not (checkout / ".git").exists():
        return {}
    argv = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {"commit": found} if found else {}


def has_matplotlib() -> bool:
    """Whether pictures can be drawn here."""
    return find_spec("matplotlib") is not None


def _draw_bars(path: Path, groups: Sequence[Group], *, title: str) -> None:
    """Draw the groups one below the other and save the picture; no display is needed.

    Each has a bar for each method, a whisker from the fastest to the slowest round, and a line at the bound if any.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_MARGIN_INCHES + _BAR_INCHES * len(group.rows) for group in groups]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)
    for axis, group in zip(axes[:, 0], groups, strict=True):
        rows, places = group.rows, range(len(group.rows))
        spread = [row.median_s - row.least_s for row in rows], [row.most_s - row.median_s for row in rows]
        colours = ["#2a9d8f" if row.method.startswith("Syncline") else "#8d99ae" for row in rows]
        axis.barh(places, [row.median_s for row in rows], xerr=spread, color=colours, capsize=2)
        axis_label = "seconds of the slowest rank, median (whiskers: min, max)"
        if bound_s := group.reference.bound_s:
            axis.axvline(bound_s, color="#d62828", linewidth=1)
            axis_label += f"; red: the wire's bound, {bound_s:.3g} s"  # a legend would cover a bar's whiskers
        axis.set_yticks(places, [row.method for row in rows])
        axis.invert_yaxis()
        axis.set_xlim(left=0)
        axis.set_xlabel(axis_label, fontsize="small")
        axis.set_title(group.title, fontsize="medium", loc="left")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=130)
