"""The command line's front door: finds the command, imports it then, and turns errors into one clear message."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from syncline.cli.commands import HELP_NAMES
from syncline.errors import SynclineError
from syncline.variables import choose_colour, is_coloured

USAGE_ERROR = 2

# name -> (module with the `app` of it, or of several, what `syncline --help` says); imported when it is called
COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("syncline.cli.run", "Start this host's ranks of a training script."),
    "demo": ("syncline.cli.demo", "Train a small GPT across 4 ranks, and show what it does."),
    "plan": ("syncline.cli.plan", "Show bytes and time on each link, and which planner wins."),
    "advise": ("syncline.cli.advise", "Say which update rule is fastest for a model, and what would help."),
    "topology": ("syncline.cli.topology", "Measure the network of a job's hosts, or show one as a tree."),
    "cluster": ("syncline.cli.cluster", "Show which machines would form a cluster, and why."),
    "lab": ("syncline.cli.lab", "Try it on an emulated network of this machine (Linux, root)."),
    "bench": ("syncline.cli.bench", "Measure this library and its peers on the same network."),
    "top": ("syncline.cli.explain", "Show a running job's ranks, links and waits."),
    "dump": ("syncline.cli.explain", "Let all ranks of a running job write their last calls."),
    "explain": ("syncline.cli.explain", "Say where the time of a step goes, and what one change would give."),
    "report": ("syncline.cli.explain", "Write one HTML file of what a trace tells."),
    "doctor": ("syncline.cli.doctor", "Say what this machine lacks, and what to do about it."),
}


def load_command(name: str) -> Any:
    """Import a command: its module's app, or that app's command of this name, where several share the module."""
    found: Any = typer.main.get_command(import_module(COMMANDS[name][0]).app)
    return getattr(found, "commands", {}).get(name, found)


class _Commands(typer.core.TyperGroup):
    """Knows its commands by name and one line; the rest is imported when one of them is called."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  (the base class has it)
        """List the names, in the order in which they are learnt."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a stand-in that carries the name and the help line."""
        if cmd_name not in COMMANDS:
            return None
        return typer.core.TyperCommand(name=cmd_name, help=COMMANDS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that ``args`` begin with, and import it."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in COMMANDS:
            command = load_command(name)
        return name, command, rest


app = typer.Typer(
    name="syncline",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        print(f"syncline {version('syncline')}")
        raise typer.Exit


@app.callback()
def _front(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    color: Annotated[
        bool | None, typer.Option("--color/--no-color", help="Print with colour, or without; or NO_COLOR.")
    ] = None,
) -> None:
    """Fast data-parallel PyTorch training on networks that are not uniform."""
    if color is not None:
        choose_colour(is_wanted=color)


def main() -> None:
    """Run the command line; an error that Syncline raised on purpose is printed without a traceback."""
    _print_in_any_encoding()
    try:
        app()
    except SynclineError as error:
        _fail(str(error))
    finally:
        _end_output()


def _fail(message: str) -> NoReturn:
    red, plain = ("\x1b[1;31m", "\x1b[0m") if is_coloured(sys.stderr) else ("", "")
    print(f"{red}error:{plain} {message}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


def _print_in_any_encoding() -> None:
    """Let standard output replace what its encoding has not, as the lines of a tree in latin-1."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def _end_output() -> None:
    """Write out what was printed while an error of that can be told; it would be a traceback at exit."""
    try:
        print(end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor is it tried again at exit
        if isinstance(error, BrokenPipeError):  # who reads it has seen enough
            sys.exit(1)
        _fail(f"standard output cannot be written: {error.strerror}; write to another file")
