"""How long things may take: what beats what, and what is refused."""

from __future__ import annotations

import pytest

from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions
from syncline.pytorch.environment import Arguments, choose_settings, choose_times, with_times

DEFAULTS_S = {"connect_timeout_s": 60.0, "silence_s": 10.0, "timeout_s": 300.0, "stall_s": 300.0}


def times(variables, **given):
    return choose_times(choose_settings(variables, Arguments(**given)))


def test_defaults() -> None:
    assert times({}) == DEFAULTS_S
    assert with_times(FabricOptions(), **DEFAULTS_S) == FabricOptions(), "a fabric alone has the same"


def test_an_argument_beats_its_variable() -> None:
    variables = {
        "SYNCLINE_CONNECT_TIMEOUT": "5",
        "SYNCLINE_SILENCE": "2.5",
        "SYNCLINE_TIMEOUT": "1800",
        "SYNCLINE_STALL": "40",
    }
    read = {"connect_timeout_s": 5.0, "silence_s": 2.5, "timeout_s": 1800.0, "stall_s": 40.0}
    assert times(variables) == read
    given = {"connect_timeout_s": 6, "silence_s": 3, "timeout_s": 7, "stall_s": 8}
    assert times(variables, **given) == given


def test_a_rank_has_hung_when_the_timeout_is_over_unless_said_otherwise() -> None:
    assert times({}, timeout_s=1800)["stall_s"] == 1800.0


def test_a_short_limit_shortens_what_has_to_come_within_it() -> None:
    options = with_times(FabricOptions(), **DEFAULTS_S | {"silence_s": 1.0, "connect_timeout_s": 2.0})
    assert (options.heartbeat_s, options.suspect_s, options.handshake_s) == (0.1, 0.3, 2.0)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["connect_timeout_s", "silence_s", "timeout_s", "stall_s"])
def test_an_argument_that_is_no_duration_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be a positive number of seconds"):
        choose_times(dict.fromkeys(DEFAULTS_S) | {name: value})


def test_a_variable_that_is_no_duration_is_named() -> None:
    with pytest.raises(ConfigurationError, match="SYNCLINE_STALL must be a positive number of seconds, not 'a minute'"):
        times({"SYNCLINE_STALL": "a minute"})
    with pytest.raises(ConfigurationError, match=r"silence_s must be at least 1 s, not 0.5 s"):
        times({"SYNCLINE_SILENCE": "0.5"})
