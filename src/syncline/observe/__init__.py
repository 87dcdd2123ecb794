"""What happened: trace events, and lines about what takes long. This room knows no other but the errors."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from syncline.observe.trace import Trace, align_events, gather_events, merge_traces

__all__ = ["Trace", "align_events", "gather_events", "merge_traces", "say", "tell_if_long"]

FIRST_S, EVERY_S = 2.0, 10.0


def say(line: str) -> None:
    """Write a line of the library's own to standard error, at once.

    >>> say("the network is measured")
    """
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        print(f"syncline: {line}", file=sys.stderr, flush=True)


@contextmanager
def tell_if_long(
    what: str | Callable[[], str], *, is_told: bool = True, first_s: float | None = None
) -> Iterator[None]:
    """Say what is under way when it has taken two seconds, and every ten from then on; nothing unless ``is_told``.

    So nobody takes it for a hang. ``what`` may be a function of what changes meanwhile; ``first_s``: after how many
    seconds it is first said. A thread says it, on standard error, which has ended when this is left.

    >>> with tell_if_long("reading the topology"):
    ...     pass
    """
    if not is_told:
        yield
        return
    is_over, start_s = threading.Event(), time.monotonic()

    def tell() -> None:
        pause_s = FIRST_S if first_s is None else first_s
        while not is_over.wait(pause_s):
            text = what if isinstance(what, str) else what()
            say(f"{text} ({time.monotonic() - start_s:.0f} s)")
            pause_s = EVERY_S

    thread = threading.Thread(target=tell, name="syncline-long-work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
