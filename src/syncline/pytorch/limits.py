"""How long ``init()`` and collectives may take: arguments, else variables, else defaults; checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions
from syncline.runtime.communicator import DEFAULT_TIMEOUT_S

DEFAULTS_S = {"connect_timeout_s": 60.0, "silence_s": 10.0, "timeout_s": DEFAULT_TIMEOUT_S}
MIN_SILENCE_S = 1.0
HEARTBEAT_S = 1.0
HANDSHAKE_S = 5.0


def choose_times(variables: Mapping[str, str], **given: float | None) -> dict[str, float]:
    """Take each of the four of :func:`with_times` from ``given``, else from its variable, else its default.

    The variables are ``SYNCLINE_CONNECT_TIMEOUT`` and so on. The default of ``stall_s`` is ``timeout_s``.
    """
    chosen = {name: _choose(variables, name, given.get(name), default) for name, default in DEFAULTS_S.items()}
    if chosen["silence_s"] < MIN_SILENCE_S:
        raise ConfigurationError(
            f"silence_s must be at least {MIN_SILENCE_S:g} s, not {chosen['silence_s']:g} s: a busy machine is silent "
            "for as long"
        )
    return chosen | {"stall_s": _choose(variables, "stall_s", given.get("stall_s"), chosen["timeout_s"])}


def with_times(
    options: FabricOptions, *, connect_timeout_s: float, silence_s: float, timeout_s: float, stall_s: float
) -> FabricOptions:
    """Return ``options`` with all times that follow from those of a user; every rank of a job is given the same.

    ``connect_timeout_s``: from ``init()`` until all ranks are connected. ``silence_s``: from when on a rank of which
    nothing is heard, not even a heartbeat, is lost. ``timeout_s``: how long a collective may take. ``stall_s``: from
    when on a rank that lives, and for which others wait, has hung.
    """
    return replace(
        options,
        heartbeat_s=min(HEARTBEAT_S, silence_s / 10),
        suspect_s=0.3 * silence_s,
        dead_s=silence_s,
        stall_s=stall_s,
        held_s=timeout_s,
        handshake_s=min(HANDSHAKE_S, connect_timeout_s),
        connect_s=connect_timeout_s,
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
