"""How commands ask a running job: at the port of its metrics, with its secret where that is on another machine.

``syncline top`` shows ranks, links and waits; ``syncline dump`` lets ranks write their last calls.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli.commands import new_app
from syncline.endpoints import format_endpoint, parse_endpoint
from syncline.errors import ConfigurationError
from syncline.pytorch.secret import read_secret, read_secret_file
from syncline.pytorch.serving import CODE, make_code
from syncline.runtime.live import render, summary
from syncline.variables import process_variables

TIMEOUT_S = 10.0
EVERY_S = 2.0

app = new_app()

Endpoint = Annotated[
    str,
    typer.Argument(metavar="HOST:PORT", help="Where rank 0 serves its metrics; or a port here.", show_default=False),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="The job's secret, if it is elsewhere; or SYNCLINE_SECRET_FILE.", show_default=False
    ),
]


def ask(endpoint: str, path: str, secret_file: Path | None, *, answer_s: float = 0.0) -> Any:
    """Return what a job answers; :class:`ConfigurationError` where it does not, with what it says.

    ``answer_s`` is how long the answer takes by itself.
    """
    where = f"127.0.0.1:{endpoint}" if endpoint.isdecimal() else endpoint
    host, port = parse_endpoint(where, default_port=0, what="HOST:PORT")
    secret = read_secret_file(secret_file, who="--secret-file") if secret_file else read_secret(process_variables())
    headers = {CODE: make_code(secret, path.partition("?")[0])} if secret else {}
    request = urllib.request.Request(f"http://{format_endpoint(host, port)}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S + answer_s) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ConfigurationError(f"the job at {where} says: {error.read().decode(errors='replace').strip()}") from error
    except TimeoutError as error:
        raise ConfigurationError(
            f"somebody listens at {where}, but did not answer within {TIMEOUT_S + answer_s:g} s: that process is "
            "stopped, or one call holds its Python interpreter (py-spy dump shows which)"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"no job answers at {where} ({getattr(error, 'reason', error)}); start it with --metrics PORT, and name "
            "the port of rank 0"
        ) from error


@app.command()
def dump(endpoint: Endpoint, *, secret_file: SecretFile = None) -> None:
    """Let all ranks of a running job write their last calls, each to its folder for them (--log-dir).

    It was started with --metrics PORT too, and this asks rank 0's port.
    """
    told = ask(endpoint, "/dump", secret_file)
    print(
        f"{told['ranks']} ranks write to {told['folder']}, each on its machine; torchfrtrace {told['folder']} reads it"
    )


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
