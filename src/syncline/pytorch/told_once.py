"""An error that every rank of a job has alike is printed by one rank, in one line, rather than with N tracebacks."""

from __future__ import annotations

import sys
from types import TracebackType

from syncline.errors import SynclineError


def tell_once(error: SynclineError, *, rank: int) -> None:
    """Let the interpreter, if it ends with ``error``, print the error's message on rank 0 alone; the status stays 1.

    Whoever catches the error sees it as ever.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is not error:
            before(kind, value, traceback)
        elif rank == 0:
            print(f"{kind.__name__}: {value}", file=sys.stderr)

    sys.excepthook = hook
