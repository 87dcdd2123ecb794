"""How commands are declared: one manner for all of them, and options that several have, written once."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from syncline.errors import ConfigurationError
from syncline.units import parse_duration

HELP_NAMES = {"help_option_names": ["-h", "--help"]}


def new_app(*, about: str | None = None) -> typer.Typer:
    """Make the app of one command, or of several where ``about`` says what they have in common.

    Its help is plain text: it is answered faster than a decorated one, and its paragraphs are fitted to the terminal.
    """
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=about is not None,
        context_settings=HELP_NAMES,
        help=about,
    )


def options_of(record: type[Any], options: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return what makes a dict of options for these fields of ``record``, whose types and defaults they have."""
    hints, known = get_type_hints(record), inspect.signature(record).parameters

    def gather(**given: Any) -> dict[str, Any]:
        return given

    gather.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [known[name].replace(annotation=Annotated[hints[name], option]) for name, option in options.items()]
    )
    return gather


def spread(options: Callable[..., Any], *, into: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each argument of ``options``; it gets what that makes of them as ``into``.

    Typer reads a command's options off its signature, so the command that it sees has one with all of them.
    """
    fields = dict(inspect.signature(options, eval_str=True).parameters)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(command, eval_str=True).parameters)
        del own[into]

        @functools.wraps(command)
        def call(**given: Any) -> None:
            shared = options(**{name: given.pop(name) for name in fields})
            command(**given, **{into: shared})

        parameters = own | fields
        call.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        call.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return call

    return decorate


@contextmanager
def writing(target: Path, option: str) -> Iterator[None]:
    """Say which option names a file or folder that cannot be written, where the system refuses it in here."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ConfigurationError(f"'{target}' cannot be written: {why}; give another {option}") from error


def make_folder(folder: Path, option: str) -> None:
    """Make an output folder before the work whose outcome it is for, so that this is not lost."""
    with writing(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"'{folder}' cannot be written to; give another {option}")


def parse_compute(text: str) -> float:
    """Return the seconds that ``--compute`` says."""
    seconds = parse_duration(text)
    if seconds <= 0:
        raise ConfigurationError(
            f"--compute is what a rank computes in a step, more than 0, not {text!r}; write for instance 100ms"
        )
    return seconds
