"""``syncline report``: one HTML file of what a trace tells."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import new_app
from syncline.report.writing import write_report

app = new_app()


@app.command()
def report(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A trace, or a folder with those of ranks.", show_default=False)
    ],
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The report (default: TRACE with .html).", show_default=False)
    ] = None,
) -> None:
    """Write one HTML file of what a trace tells: the network, a step, waits, plans, faults, and what to change."""
    target = out or trace.with_suffix(".html")
    write_report(trace, target, title=trace.stem)
    print(f"report: {target}")
