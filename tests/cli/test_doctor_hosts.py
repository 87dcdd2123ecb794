"""`syncline doctor --hosts`: what it says of which hosts can dial which."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rank_scripts import reserved_port
from syncline.cli.doctor import app
from syncline.cli.port_diagnosis import Outcome, PortProbes, judge
from syncline.errors import ConfigurationError

NAMES = ["a0", "a1", "b0"]
ADDRESSES = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def found(closed: set[tuple[int, int]], addresses: list[str] = ADDRESSES, ports: int = 1) -> PortProbes:
    """Return what the first host knows where these cannot dial the last of the ports of those."""
    probes = PortProbes(addresses=addresses, own=0, ports=range(1, ports + 1))
    for one in range(3):
        for other in range(3):
            if one != other:
                ended = dict.fromkeys(range(1, ports + 1), Outcome.OPEN)
                if (one, other) in closed:
                    ended[ports] = Outcome.SILENT
                probes.found.setdefault(one, {})[other] = ended
    return probes


def test_where_all_is_open_it_says_so() -> None:
    assert judge(found(set()), NAMES) == (["Every host can dial every other on these ports."], True)


def test_who_cannot_be_dialled_is_to_dial() -> None:
    lines, can_meet = judge(found({(0, 2)}, ports=2), NAMES)
    assert can_meet
    assert lines == [
        "b0 cannot be dialled from a0 on 2 (silent): let these ports through to it, or start its ranks with "
        "SYNCLINE_ADVERTISE=none, and they dial."
    ]


def test_two_that_cannot_be_dialled_meet_at_a_third() -> None:
    lines, can_meet = judge(found({(0, 1), (0, 2), (1, 2), (2, 1)}), NAMES)
    assert can_meet
    assert lines[-1] == "a1 and b0 would meet at a0, which passes all on."


@pytest.mark.parametrize(
    ("closed", "why"),
    [
        ({(0, 2), (2, 0), (0, 1)}, "a0 and b0 could not meet: there is no host that both can dial."),
        ({(0, 1), (1, 2), (2, 1), (2, 0), (0, 2)}, "a1 and b0 could not meet: there is no host that both can dial."),
    ],
)
def test_two_that_nothing_connects_are_named(closed: set[tuple[int, int]], why: str) -> None:
    lines, can_meet = judge(found(closed), NAMES)
    assert not can_meet
    assert why in lines


def test_hosts_that_were_not_heard_are_named_and_public_addresses_warned_of() -> None:
    probes = found(set(), addresses=["10.0.0.1", "10.0.0.2", "8.8.8.8"])
    del probes.found[2]
    lines, can_meet = judge(probes, NAMES)
    assert not can_meet
    assert lines[0].startswith("Nothing, or not all, was heard of what b0 found: run this command on all hosts")
    assert lines[-1].startswith("b0: a public address. What ranks send is not encrypted")


def test_it_prints_what_it_found_for_programs() -> None:
    with reserved_port() as port:
        given = ["--hosts", "127.0.0.1,127.0.0.2", "--ports", str(port), "--for", "0.5", "--json"]
        ended = CliRunner().invoke(app, given)
    assert ended.exit_code == 1
    told = json.loads(ended.stdout)
    assert not told["can_meet"]
    assert told["found"]["127.0.0.1"] == {"127.0.0.2": {}}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--hosts", "127.0.0.1"], "--hosts names 2 to 256 hosts"),
        (["--hosts", "127.0.0.1,127.0.0.2", "--ports", "1-2000"], "at most 1024 ports, not 2 and 2000"),
        (["--hosts", "203.0.113.1,203.0.113.2"], "none of 203.0.113.1, 203.0.113.2 is an address of this machine"),
        (["--hosts", "localhost,203.0.113.2"], "none of localhost, 203.0.113.2 is an address of this machine that"),
        (["--hosts", "127.0.0.1,no..host"], "'no..host' cannot be resolved"),
        (["--hosts", "127.0.0.1,127.0.0.2", "--listen"], "give one of them"),
        (["--ports", "1-2"], "--ports says which ports of --hosts are tried"),
        (["--secret-file", "secret"], "--secret-file is the secret of --path, --listen and --hosts"),
    ],
)
def test_what_it_cannot_do_it_says(given: list[str], error: str) -> None:
    ended = CliRunner().invoke(app, given)
    assert isinstance(ended.exception, ConfigurationError)
    assert error in str(ended.exception)
