"""``syncline top``: a running job's ranks, links and waits, at the port where rank 0 serves its metrics."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Annotated

import typer

from syncline.cli.asking import Endpoint, SecretFile, ask
from syncline.cli.commands import new_app
from syncline.runtime.live import render, summary

app = new_app()
EVERY_S = 2.0


@app.command()
def top(
    endpoint: Endpoint,
    *,
    secret_file: SecretFile = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once.")] = False,
) -> None:
    """Show a running job: ranks, steps, waits, links by fullness, and what rank 0 said; lines in a pipe.

    It was started with --metrics PORT (or SYNCLINE_METRICS), and this asks rank 0's port.
    """
    is_screen = sys.stdout.isatty() and not once
    while True:
        view = ask(endpoint, "/view", secret_file)
        if is_screen:
            size = shutil.get_terminal_size()
            lines = (line[: size.columns] for line in render(view, height=size.lines))
            print("\x1b[H\x1b[J" + "\n".join(lines), flush=True)
        else:
            print("\n".join(render(view)) if once else summary(view), flush=True)
        if once:
            return
        time.sleep(EVERY_S)
