"""What a rank that ends with an error leaves for its launcher: whom the error names, so that no text need be parsed."""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import SynclineError, escape_text
from syncline.variables import process_variables

LAST_WORDS = "SYNCLINE_LAST_WORDS"
"""Names the file, which the launcher sets for each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
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


def leave_at_exit() -> None:
    """Leave last words when the interpreter ends with an error of ours; a second call does nothing more."""
    if LAST_WORDS in process_variables():
        atexit.unregister(_leave)
        atexit.register(_leave)


def _leave() -> None:
    for error in _chain(getattr(sys, "last_value", None)):
        if isinstance(error, SynclineError) and error.ranks_at_fault:
            words = {"ranks": error.ranks_at_fault, "text": str(error)}
            with contextlib.suppress(OSError):  # the launcher then reads what stands on standard error
                Path(process_variables()[LAST_WORDS]).write_text(json.dumps(words))
            return


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
