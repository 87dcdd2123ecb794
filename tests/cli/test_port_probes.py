"""Which ports of which hosts can be dialled from which, found by all of them at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from rank_scripts import reserved_port
from syncline.cli import port_diagnosis
from syncline.cli.port_diagnosis import Outcome, PortProbes
from syncline.errors import ConfigurationError

HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
LONG_S, SHORT_S = 60.0, 1.0


def probes_of(port, hosts=HOSTS, keys=None, num_ports=1):
    ports = range(port, port + num_ports)
    keys = keys or [b""] * len(hosts)
    return [PortProbes(addresses=hosts, own=own, ports=ports, key=key) for own, key in enumerate(keys)]


def run(probes, for_s=LONG_S):
    async def run_all():
        await asyncio.gather(*(each.run(for_s) for each in probes))

    asyncio.run(run_all())


def test_all_hosts_learn_what_each_has_found() -> None:
    with reserved_port() as port:
        probes = probes_of(port)
        run(probes)
    for each in probes:
        found = {(one, other): each.opens(one, other) for one in range(3) for other in range(3) if one != other}
        assert found == dict.fromkeys(found, True)


def test_who_cannot_be_dialled_is_known_to_all_and_hears_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last host listens nowhere, as behind a router, and dials the others."""
    with reserved_port() as port:
        probes = probes_of(port)

        listen = PortProbes._listen

        async def listen_but_on_the_last(self: PortProbes, number: int) -> asyncio.Server | None:
            return None if self.own == 2 else await listen(self, number)

        monkeypatch.setattr(PortProbes, "_listen", listen_but_on_the_last)
        run(probes)
    for each in probes:
        assert [each.opens(other, 2) for other in (0, 1)] == [False, False]
        assert [each.opens(2, other) for other in (0, 1)] == [True, True]
        assert each.found[0][2] == {port: Outcome.REFUSED}


def test_of_two_of_which_one_cannot_be_dialled_both_hear_in_the_end_that_all_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the one hears, it hears of the other's dials alone; run() ends long before its time."""
    monkeypatch.setattr(port_diagnosis, "PAUSE_S", 0.01)
    with reserved_port() as port:
        probes = probes_of(port, hosts=HOSTS[:2])
        listen = PortProbes._listen

        async def listen_on_the_first(self: PortProbes, number: int) -> asyncio.Server | None:
            return await listen(self, number) if self.own == 0 else None

        monkeypatch.setattr(PortProbes, "_listen", listen_on_the_first)
        began_s = time.monotonic()
        run(probes)
        assert time.monotonic() - began_s < LONG_S / 2
    assert [(each.opens(0, 1), each.opens(1, 0)) for each in probes] == [(False, True)] * 2


def test_a_port_that_another_program_has_is_named() -> None:
    with reserved_port() as port, socket.create_server((HOSTS[1], port)):
        probes = probes_of(port, num_ports=2)
        run(probes)
        assert probes[1].taken == [port]
        assert probes[0].found[0][1] == {port: Outcome.OTHER, port + 1: Outcome.OPEN}
        with pytest.raises(ConfigurationError, match=rf"cannot listen on 127.0.0.2:{port}: Address already in use"):
            run(probes_of(port)[1:2])


def test_who_has_another_secret_is_not_heard() -> None:
    with reserved_port() as port:
        probes = probes_of(port, HOSTS[:2], keys=[b"one", b"other"])
        run(probes, SHORT_S)
    assert [each.opens(0, 1) for each in probes] == [None, None]


@pytest.mark.parametrize(
    "change",
    [
        {"hosts": ["127.0.0.9"]},
        {"own": 0},
        {"own": None},
        {"done": 5},
        {"found": {"1": {"0": {"1": "no outcome"}}}},
        {"found": [1]},
    ],
    ids=str,
)
def test_what_is_no_probe_of_this_kind_changes_nothing(change: dict[str, object]) -> None:
    probes = probes_of(5)[0]
    told = {"hosts": HOSTS, "ports": [5], "own": 1, "done": [], "found": {}}
    probes._hear(json.dumps(told).encode())
    with pytest.raises(ValueError, match=r"."):
        probes._hear(json.dumps(told | change).encode())
    assert probes.found == {}
