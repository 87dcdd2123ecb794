"""How long things may take: what beats what, and what is refused."""

from __future__ import annotations

import pytest

from syncline.errors import ConfigurationError
from syncline.pytorch.limits import Limits, choose_limits


def test_defaults() -> None:
    expected = Limits(connect_timeout_s=60.0, silence_s=10.0, timeout_s=300.0, stall_s=300.0)
    assert choose_limits(variables={}) == expected
    assert expected.heartbeat_s == 1.0


def test_an_argument_beats_its_variable() -> None:
    variables = {
        "SYNCLINE_CONNECT_TIMEOUT": "5",
        "SYNCLINE_SILENCE": "2.5",
        "SYNCLINE_TIMEOUT": "1800",
        "SYNCLINE_STALL": "40",
    }
    assert choose_limits(variables=variables) == Limits(
        connect_timeout_s=5.0, silence_s=2.5, timeout_s=1800.0, stall_s=40.0
    )
    given = choose_limits(connect_timeout_s=6, silence_s=3, timeout_s=7, stall_s=8, variables=variables)
    assert given == Limits(connect_timeout_s=6.0, silence_s=3.0, timeout_s=7.0, stall_s=8.0)


def test_a_rank_has_hung_when_the_timeout_is_over_unless_said_otherwise() -> None:
    assert choose_limits(timeout_s=1800, variables={}).stall_s == 1800.0


def test_heartbeats_come_often_enough_for_a_short_silence() -> None:
    assert choose_limits(silence_s=1.0, variables={}).heartbeat_s == 0.1


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["connect_timeout_s", "silence_s", "timeout_s", "stall_s"])
def test_an_argument_that_is_no_duration_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be a positive number of seconds"):
        choose_limits(variables={}, **{name: value})


def test_a_variable_that_is_no_duration_is_named() -> None:
    with pytest.raises(ConfigurationError, match="SYNCLINE_STALL must be a positive number of seconds, not 'a minute'"):
        choose_limits(variables={"SYNCLINE_STALL": "a minute"})
    with pytest.raises(ConfigurationError, match=r"silence_s must be at least 1 s, not 0.5 s"):
        choose_limits(variables={"SYNCLINE_SILENCE": "0.5"})
