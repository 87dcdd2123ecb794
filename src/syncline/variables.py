"""The one place that reads the environment, so that it is known what is read there: a test looks for other readers.

An argument that is given always wins, its variable comes next, then the default; tests try each variable against its
argument. ``docs/reference/variables.md`` explains those of users, and :mod:`syncline.pytorch.launchers` reads those of
launchers. Beside them ``SYNCLINE_LAB`` tells what the lab starts that it runs there, ``SYNCLINE_LAST_WORDS`` where a
rank leaves what its launcher is to know, and ``CUDA_VISIBLE_DEVICES`` says, with ``LOCAL_RANK``, which GPU is measured,
where nobody names one; ``XDG_RUNTIME_DIR`` where the secret of a job lies that was given none, and ``XDG_CACHE_HOME``
(or ``HOME``) where networks are kept that were measured. What a launcher passes on to the ranks is the whole
environment, from here too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TextIO

from syncline.errors import ConfigurationError

BEHIND, FLIGHT, METRICS = "SYNCLINE_BEHIND", "SYNCLINE_FLIGHT_RECORD", "SYNCLINE_METRICS"
LIVE, REPORT, TRACE = "SYNCLINE_LIVE", "SYNCLINE_REPORT", "SYNCLINE_TRACE"


def behind_limit_s(values: Mapping[str, str] | None = None, *, who: str = BEHIND) -> float:
    """Return for how many seconds no step may be finished before it is said who is behind; infinite: for ever.

    ``values``: the variables, by default those of this process; ``who`` names what the user wrote, in an error.
    """
    text = (process_variables() if values is None else values).get(BEHIND) or "60"
    try:
        limit_s = math.inf if text == "off" else float(text)
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise ConfigurationError(f"{who} must be a positive number of seconds, or off, not {text!r}")
    return limit_s


def live_place(values: Mapping[str, str] | None = None) -> str:
    """Return where rank 0 shows the job as it runs: a file, ``"on"`` for standard error, or nothing."""
    text = (process_variables() if values is None else values).get(LIVE) or "off"
    if text not in ("on", "off") and not {".", os.sep} & set(text):
        raise ConfigurationError(f"{LIVE} must be on, off, or a file such as view.json, not {text!r}")
    return "" if text == "off" else text


def switch(name: str, text: str) -> bool:
    """Return whether the variable ``name``, which is ``text``, says on."""
    if text not in ("on", "off"):
        raise ConfigurationError(f"{name} must be on or off, not {text!r}")
    return text == "on"


def whole_number(values: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in a variable, ``default`` if it is absent."""
    number = optional_number(values, name)
    return default if number is None else number


def optional_number(values: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable, None if it is absent."""
    text = values.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a whole number, not {text!r}") from None


def process_variables() -> Mapping[str, str]:
    """Return the variables of this process, live; who starts another process passes them on."""
    return os.environ


def choose_colour(*, is_wanted: bool) -> None:
    """Let this process, and what it starts, print with colour or without, whatever its variables said."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        os.environ.pop(name, None)
    os.environ["FORCE_COLOR" if is_wanted else "NO_COLOR"] = "1"


def is_coloured(stream: TextIO) -> bool:
    """Whether ``stream`` is written to with colour: as was chosen, else where a person reads it."""
    return "NO_COLOR" not in os.environ and ("FORCE_COLOR" in os.environ or stream.isatty())
