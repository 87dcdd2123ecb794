"""How long ``init()`` and collectives may take: arguments, else variables, else defaults; checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from syncline.errors import ConfigurationError
from syncline.runtime.communicator import DEFAULT_TIMEOUT_S
from syncline.variables import process_variables

DEFAULT_CONNECT_TIMEOUT_S = 60.0
DEFAULT_SILENCE_S = 10.0
MIN_SILENCE_S = 1.0
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds; every rank of a job is given the same."""

    connect_timeout_s: float
    """From ``init()`` until all ranks are connected."""
    silence_s: float
    """From when on a rank of which nothing is heard, not even a heartbeat, is lost."""
    timeout_s: float
    """How long a collective may take."""
    stall_s: float
    """From when on a rank that lives, and for which others wait, has hung."""

    @property
    def heartbeat_s(self) -> float:
        """How often a rank says that it lives."""
        return min(HEARTBEAT_S, self.silence_s / 10)


def choose_limits(
    *,
    connect_timeout_s: float | None = None,
    silence_s: float | None = None,
    timeout_s: float | None = None,
    stall_s: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> Limits:
    """Take each limit from its argument, else from its variable (``SYNCLINE_CONNECT_TIMEOUT`` ...), else its default.

    The default of ``stall_s`` is ``timeout_s``.
    """
    values = process_variables() if variables is None else variables
    chosen_s = _choose(values, "timeout_s", timeout_s, DEFAULT_TIMEOUT_S)
    chosen_silence_s = _choose(values, "silence_s", silence_s, DEFAULT_SILENCE_S)
    if chosen_silence_s < MIN_SILENCE_S:
        raise ConfigurationError(
            f"silence_s must be at least {MIN_SILENCE_S:g} s, not {chosen_silence_s:g} s: a busy machine is silent for "
            "as long"
        )
    return Limits(
        connect_timeout_s=_choose(values, "connect_timeout_s", connect_timeout_s, DEFAULT_CONNECT_TIMEOUT_S),
        silence_s=chosen_silence_s,
        timeout_s=chosen_s,
        stall_s=_choose(values, "stall_s", stall_s, chosen_s),
    )


def _choose(values: Mapping[str, str], name: str, given: float | None, default: float) -> float:
    variable = f"SYNCLINE_{name.removesuffix('_s').upper()}"
    text = values.get(variable)
    if given is None and not text:
        return default
    who, value = (name, given) if given is not None else (variable, text)
    try:
        seconds = float(value)  # type: ignore[arg-type]  # None was dealt with
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"{who} must be a positive number of seconds, not {value!r}")
    return seconds
