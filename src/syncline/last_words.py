"""What a rank leaves for its launcher: whom its last error names, that it has met the others, its number, and more."""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from syncline.errors import SynclineError
from syncline.variables import process_variables

LAST_WORDS = "SYNCLINE_LAST_WORDS"
"""Names the file, which the launcher sets for each rank: a line of JSON for all that :func:`tell` was called with."""


class LastWords(NamedTuple):
    """Whom a rank's error names, the likeliest to be at fault first, and what it says."""

    ranks: tuple[int, ...]
    text: str


def tell(**words: Any) -> None:
    """Let the launcher know, if there is one.

    ``met=True``: this rank and all others of its job are connected; else, if it dies, it is waited for where ranks
    meet. ``number=``: what the job calls this rank, which has come into it; else its lines carry the rank that it
    was started as. ``doors=``: where it lets newcomers in, as its own machine reaches it, then where one member of
    each other machine does. ``goes_on=True``: it goes on without others that are lost; else nobody is told that
    there are options for that. ``ranks=`` and ``text=``: whom its error names, and what it says; else that is read
    on standard error.
    """
    if path := process_variables().get(LAST_WORDS):
        with contextlib.suppress(OSError), Path(path).open("a") as file:
            file.write(f"{json.dumps(words)}\n")


def read_words(path: Path) -> dict[str, Any]:
    """Return all that a rank has told, the last of each kind; what it was killed in the middle of is left out."""
    words: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                words |= json.loads(line)
    return words


def note(error: SynclineError) -> None:
    """Remember what a communicator ended with: foreign code may raise an error that has no more of it than its text."""
    if error.ranks_at_fault:
        _noted.append(error)


_noted: deque[SynclineError] = deque(maxlen=8)


def tell_end(error: BaseException | None) -> str:
    """Say with what this rank ends, for those who lose it; nothing if that is not known."""
    if error is None:
        return ""
    return f"it ended with {type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")


def leave_at_exit() -> None:
    """Leave last words when the interpreter ends with an error of ours; a second call does nothing more."""
    if LAST_WORDS in process_variables():
        atexit.unregister(_leave)
        atexit.register(_leave)


def _leave() -> None:
    for error in _chain(getattr(sys, "last_value", None)):
        known = _known(error)
        if known is not None:
            tell(ranks=known.ranks_at_fault, text=str(known))
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
