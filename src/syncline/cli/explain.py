"""``syncline explain``: where the time of a step goes, what one change would give, and where ranks are that hang.

``syncline report`` writes that of a trace, and more, to an HTML file. Of a running job ``syncline top`` shows ranks,
links and waits, and ``syncline dump`` lets ranks write their last calls. A running job is asked at the port of its
metrics, with its secret where that is on another machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from syncline.cli.commands import new_app
from syncline.endpoints import format_endpoint, parse_endpoint
from syncline.errors import ConfigurationError
from syncline.pytorch.secret import choose_secret
from syncline.pytorch.serving import CODE, make_code
from syncline.report.explanation import MEANING, Explanation, explain
from syncline.report.job_trace import Examination, RankAnswer, read_examination, read_job_trace
from syncline.report.page import write_report
from syncline.report.terminal import new_table
from syncline.runtime.live import render, summary
from syncline.runtime.whereabouts import process_namespace, process_state
from syncline.units import format_duration

app = new_app()
TIMEOUT_S = 10.0
EVERY_S = 2.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the environment reaches no loopback of this machine, nor hosts of a cluster."""

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
    secret = choose_secret(secret_file)
    headers = {CODE: make_code(secret, path.partition("?")[0])} if secret else {}
    request = urllib.request.Request(f"http://{format_endpoint(host, port)}{path}", headers=headers)
    try:
        with _DIRECT.open(request, timeout=TIMEOUT_S + answer_s) as answer:
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
            f"no job answers at {where} ({getattr(error, 'reason', error)}); start it with --metrics PORT, or "
            "0.0.0.0:PORT to be asked from other machines, and name the port of rank 0"
        ) from error


@app.command()
def dump(endpoint: Endpoint, *, secret_file: SecretFile = None) -> None:
    """Let all ranks of a running job write their last calls, each to its folder for them (--log-dir).

    It was started with --metrics PORT too, and this asks rank 0's port.
    """
    told = ask(endpoint, "/dump", secret_file)
    late = f"; no word lately from {', '.join(told['silent'])}" if told["silent"] else ""
    print(
        f"{told['ranks']} ranks write to {told['folder']}, each on its machine{late}; torchfrtrace {told['folder']} "
        "reads it"
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


SECONDS = 5.0
PY_SPY_S = 20.0
MOST_LINES = 16
"""Of a stack, the innermost calls; --stacks shows all."""


@app.command(name="explain")
def explain_job(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TRACE | HOST:PORT",
            help="A trace, a folder with those of ranks, or where rank 0 of a running job serves its metrics.",
            show_default=False,
        ),
    ],
    *,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=60.0, metavar="S", help="How long a running job is recorded.")
    ] = SECONDS,
    stacks: Annotated[bool, typer.Option("--stacks", help="Show the stacks of all threads of a running job.")] = False,
    secret_file: SecretFile = None,
) -> None:
    """Say where the time of a step goes, by its critical path, and what one change would give.

    Of a running job also: which rank is in which call, who is behind, and the Python stacks of those that others wait
    for. It was started with --metrics PORT (or SYNCLINE_METRICS).
    """
    console = Console(highlight=False, soft_wrap=True)
    if Path(what).exists() or not (what.isdecimal() or ":" in what):
        _show_steps(explain(read_job_trace(what)), console)
        return
    told = ask(what, f"/explain?seconds={seconds:g}", secret_file, answer_s=seconds)
    examination = read_examination(told)
    held = examination.held()
    for line in (*held, *map(_describe_absent, examination.absent)):
        console.print(f"- {line}", markup=False)
    explanation = explain(examination.job)
    if explanation.steps or not held:
        _show_steps(explanation, console)
    _show_ranks(examination, console)
    awaited = frozenset[int]().union(*held.values())
    for one in examination.ranks:
        if stacks or one.rank in awaited or not (explanation.steps or held or one.is_waiting):
            _show_stacks(one, console, is_whole=stacks)
    for absent in examination.absent:
        is_here = absent.get("pid") and told.get("namespace") == process_namespace()
        for line in _look_from_outside(absent["name"], absent["pid"]) if is_here else ():
            console.print(line, markup=False)


def _show_steps(explanation: Explanation, console: Console) -> None:
    for sentence in explanation.sentences():
        console.print(f"- {sentence}", markup=False)
    if not explanation.steps:
        return
    table = new_table("critical path of a step", "mean", "part")
    for kind, meaning in MEANING.items():
        if seconds := explanation.parts_s.get(kind, 0.0):
            table.add_row(meaning, format_duration(seconds), f"{seconds / explanation.step_s:.0%}")
    for gain in explanation.gains:
        table.add_row(gain.change, f"-{format_duration(gain.seconds)}", f"-{gain.seconds / explanation.step_s:.0%}")
    console.print(table)
    ranks = ", ".join(f"{rank}: {format_duration(own_s)}" for rank, own_s in explanation.own_s.items())
    console.print(f"own time of each rank in a step, without waits: {ranks}")


def _describe_absent(one: Mapping[str, Any]) -> str:
    silent_s = one.get("silent_s")
    heard = f", and has told nothing for {silent_s:.0f} s" if silent_s is not None else ""
    return f"{one['name']} gives no answer{heard}: {one['why']}."


def _show_ranks(examination: Examination, console: Console) -> None:
    table = new_table("rank", "step")
    for heading in ("where", "open calls"):
        table.add_column(heading)
    for one in examination.ranks:
        calls = [f"{call['what']}, {call['seconds']:.1f} s" for call in one.calls if not call["is_over"]]
        more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        table.add_row(one.name, str(one.steps), one.where, calls[0] + more if calls else "-")
    console.print(table)


def _show_stacks(one: RankAnswer, console: Console, *, is_whole: bool) -> None:
    for thread, stack in one.stacks.items():
        if is_whole or thread == one.thread:
            label = "training thread" if thread == one.thread else f"thread {thread}"
            console.print(f"{one.name}, process {one.pid}, {label}, innermost call first:", markup=False)
            for call in stack if is_whole else stack[:MOST_LINES]:
                console.print(f"    {call}", markup=False)


def _look_from_outside(name: str, pid: int) -> Iterator[str]:
    """Yield the stacks of a process of this machine that does not tell them, or how to come by them."""
    state = process_state(pid)
    program = shutil.which("py-spy")
    if program is None:
        yield f"{name} is process {pid}{state and f' ({state})'}; py-spy, if it were installed here, shows its stacks"
        return
    command: Sequence[str] = (program, "dump", "--pid", str(pid), *(["--nonblocking"] if state else []))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        told, is_seen = str(error), False
    else:
        is_seen = done.returncode == 0 and "Thread " in done.stdout
        told = done.stdout if is_seen else done.stderr or done.stdout
    sees = "as py-spy sees it:" if is_seen else f"process {pid}: py-spy cannot look at it, often for want of rights:"
    yield f"{name}, {sees}"
    yield from (f"    {line}" for line in told.splitlines())


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
    named = trace.resolve()  # "." has no name of its own
    target = out or (trace if trace.name else named).with_suffix(".html")
    traces = trace.glob("*.json") if trace.is_dir() else [trace]
    if target.exists() and any(target.samefile(each) for each in traces if each.exists()):
        raise ConfigurationError(f"the report would replace the trace '{target}'; give another file (--out)")
    write_report(trace, target, title=named.stem)
    print(f"report: {target}")
