"""What `syncline run` refuses before it starts a rank, as each rank would end with it in a traceback."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from syncline.cli.launcher.environment import Elasticity
from syncline.cli.launcher.launch import Request, launch
from syncline.cli.launcher.supervisor import RestartLimits
from syncline.cli.launcher.terminal import Terminal
from syncline.errors import ConfigurationError


def start(**said: Any) -> int:
    """Launch programs that end well at once."""
    terminal = Terminal(stdout=io.StringIO(), stderr=io.StringIO())
    return launch(Request(**({"command": ("true",), "num_ranks": 2} | said)), terminal=terminal)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"behind": "foo"}, "--behind must be a positive number of seconds, or off, not 'foo'"),
        ({"behind": "-3"}, "--behind must be a positive number of seconds, or off, not '-3'"),
        ({"metrics": "99999"}, "--metrics must be HOST:PORT with a port from 1 to 65535"),
        ({"metrics": "a:b"}, "--metrics must be HOST:PORT with a port from 1 to 65535, got 'a:b'"),
        ({"metrics": "65535"}, "ports end at 65535; give a port of at most 65534"),
        ({"master": "no such host!"}, "--master 'no such host!' cannot be resolved"),
        ({"elastic": Elasticity(min_ranks=3)}, "--min-ranks must be at most the number of ranks, 2, not 3"),
    ],
)
def test_options_are_checked_before_any_rank_starts(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        start(**said)


def test_a_short_secret_is_refused_before_any_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    secret.chmod(0o600)
    with pytest.raises(ConfigurationError, match="the shared secret must have at least 32 bytes, not 5"):
        start(secret_file=secret)
    monkeypatch.setenv("SYNCLINE_SECRET", "shorter")
    with pytest.raises(ConfigurationError, match="the shared secret must have at least 32 bytes, not 7"):
        start()


def test_variables_of_the_launcher_are_checked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_LIVE", "foo")
    with pytest.raises(ConfigurationError, match="SYNCLINE_LIVE must be on, off, or a file"):
        start()
    monkeypatch.setenv("SYNCLINE_BEHIND", "foo")
    with pytest.raises(ConfigurationError, match="SYNCLINE_BEHIND must be a positive number of seconds"):
        start()
    monkeypatch.delenv("SYNCLINE_LIVE")
    assert start(behind="off") == 0


def test_what_the_ranks_take_is_taken(tmp_path: Path) -> None:
    assert start(behind="off", metrics=str(tmp_path / "folder"), elastic=Elasticity(min_ranks=2)) == 0
    assert start(behind="20", metrics="127.0.0.1:65534", master="127.0.0.1") == 0


def test_a_name_that_is_not_known_yet_is_left_to_ranks_that_start_again() -> None:
    assert start(master="no such host!", restarts=RestartLimits(count=1)) == 0


def test_newcomers_may_be_fewer_than_a_job_needs() -> None:
    assert start(elastic=Elasticity(min_ranks=3, join="127.0.0.1:4000")) == 0
