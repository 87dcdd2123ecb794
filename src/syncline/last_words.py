"""What a rank leaves for its launcher: whom its last error names, that it has met the others, its number, and more."""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from syncline.errors import SynclineError, escape_text
from syncline.variables import process_variables

LAST_WORDS = "SYNCLINE_LAST_WORDS"
"""Names the file, which the launcher sets for each rank."""


class LastWords(NamedTuple):
    """Whom a rank's error names, the likeliest to be at fault first, and what it says."""

    ranks: tuple[int, ...]
    text: str

    @classmethod
    def read(cls, path: Path) -> LastWords | None:
        """Return what a rank has left; None if it left nothing that can be used."""
        try:
            told = json.loads(path.read_text())
            return cls(ranks=tuple(int(rank) for rank in told["ranks"]), text=escape_text(str(told["text"])))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def tell_number(number: int) -> None:
    """Let the launcher know what the job calls this rank, which has come into it."""
    if path := process_variables().get(LAST_WORDS):
        with contextlib.suppress(OSError):  # its lines then carry the rank that it was started as
            number_file(Path(path)).write_text(str(number))
    tell_met()


def tell_met() -> None:
    """Let the launcher know that this rank and all others of its job are connected."""
    _leave_file(met_file)  # else, if it dies, it is waited for where the ranks meet


def tell_goes_on() -> None:
    """Let the launcher know that this rank goes on without others that are lost."""
    _leave_file(goes_on_file)  # else nobody is told that there are options for that


def met_file(last_words: Path) -> Path:
    """Return the file that is there once a rank has met the others."""
    return last_words.with_suffix(".met")


def goes_on_file(last_words: Path) -> Path:
    """Return the file that is there once a rank would go on without others."""
    return last_words.with_suffix(".goes-on")


def number_file(last_words: Path) -> Path:
    """Return where a rank that comes into a job leaves its number."""
    return last_words.with_suffix(".number")


def read_number(last_words: Path) -> int | None:
    """Return the number that the rank has in the job that it has come into; None as long as it has not."""
    try:
        return int(number_file(last_words).read_text())
    except (OSError, ValueError):
        return None


def note(error: SynclineError) -> None:
    """Remember what a communicator ended with: foreign code may raise an error that has no more of it than its text."""
    if error.ranks_at_fault:
        _noted.append(error)


_noted: deque[SynclineError] = deque(maxlen=8)


def leave_at_exit() -> None:
    """Leave last words when the interpreter ends with an error of ours; a second call does nothing more."""
    if LAST_WORDS in process_variables():
        atexit.unregister(_leave)
        atexit.register(_leave)


def _leave_file(file_of: Callable[[Path], Path]) -> None:
    if path := process_variables().get(LAST_WORDS):
        with contextlib.suppress(OSError):
            file_of(Path(path)).touch()


def _leave() -> None:
    for error in _chain(getattr(sys, "last_value", None)):
        known = _known(error)
        if known is not None:
            words = {"ranks": known.ranks_at_fault, "text": str(known)}
            with contextlib.suppress(OSError):  # the launcher then reads what stands on standard error
                Path(process_variables()[LAST_WORDS]).write_text(json.dumps(words))
            return


def _known(error: BaseException) -> SynclineError | None:
    """Return the error of ours that names ranks at fault, which ``error`` is, or tells of as a future's callback."""
    if isinstance(error, SynclineError) and error.ranks_at_fault:
        return error
    told = str(error)
    return next((each for each in _noted if str(each).partition(";")[0] in told), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
