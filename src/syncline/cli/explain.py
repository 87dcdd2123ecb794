"""``syncline explain``: where the time of a step goes, and what one change would give."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from syncline.cli.commands import new_app
from syncline.report.explanation import MEANING, explain
from syncline.report.job_trace import read_job_trace
from syncline.units import format_duration

app = new_app()


@app.command(name="explain")
def explain_trace(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A trace, or a folder with those of ranks.", show_default=False)
    ],
) -> None:
    """Say where the time of a step goes, by its critical path, and what one change would give."""
    explanation = explain(read_job_trace(trace))
    console = Console(highlight=False)
    for sentence in explanation.sentences():
        console.print(f"- {sentence}", markup=False)
    if not explanation.steps:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("critical path of a step")
    for heading in ("mean", "part"):
        table.add_column(heading, justify="right")
    for kind, meaning in MEANING.items():
        if seconds := explanation.parts_s.get(kind, 0.0):
            table.add_row(meaning, format_duration(seconds), f"{seconds / explanation.step_s:.0%}")
    for gain in explanation.gains:
        table.add_row(gain.change, f"-{format_duration(gain.seconds)}", f"-{gain.seconds / explanation.step_s:.0%}")
    console.print(table)
    ranks = ", ".join(f"{rank}: {format_duration(own_s)}" for rank, own_s in explanation.own_s.items())
    console.print(f"own time of each rank in a step, without waits: {ranks}")
