"""On which ports a rank listens, and what it tells the others of that."""

from __future__ import annotations

import contextlib
import socket

import pytest

from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions
from syncline.fabric.mesh import what_passes_firewalls
from syncline.fabric.sockets import advertised_endpoint, open_listening_socket

LOOPBACK = "127.0.0.1"


def free_range(number: int) -> tuple[int, int]:
    """Return so many ports that are free, one after another."""
    for first in range(21000, 29000, number):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + number):
                    stack.enter_context(contextlib.closing(socket.create_server((LOOPBACK, port))))
            except OSError:
                continue
            return first, first + number - 1
    raise AssertionError("some ports are free")


def test_ranks_of_a_host_take_the_next_port_of_their_range() -> None:
    first, last = free_range(2)
    options = FabricOptions(ports=(first, last))
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(open_listening_socket(LOOPBACK, options)) for _ in range(2)]
        assert [sock.getsockname()[1] for sock in taken] == [first, last]
        with pytest.raises(ConfigurationError, match=rf"no port from {first} to {last} is free on 127.0.0.1"):
            open_listening_socket(LOOPBACK, options)
        with open_listening_socket(LOOPBACK, FabricOptions()) as free:
            assert free.getsockname()[1] not in (0, first, last)


def test_an_address_that_is_not_of_this_machine_is_no_port_in_use() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192.0.2.1:21000"):
        open_listening_socket("192.0.2.1", FabricOptions(ports=(21000, 21001)))


@pytest.mark.parametrize(
    ("advertised", "told"),
    [(None, (LOOPBACK, 5)), (("10.1.1.1", 0), ("10.1.1.1", 5)), (("10.1.1.1", 29700), ("10.1.1.1", 29700))],
)
def test_others_are_told_where_they_reach_a_rank(advertised: tuple[str, int] | None, told: tuple[str, int]) -> None:
    assert advertised_endpoint(LOOPBACK, 5, FabricOptions(advertised=advertised)) == told


@pytest.mark.parametrize(
    ("ports", "named"), [(None, "on any port"), ((21000, 21003), "on ports 21000 to 21003"), ((5, 5), "on port 5")]
)
def test_a_firewall_has_to_let_through_what_ranks_listen_on(ports: tuple[int, int] | None, named: str) -> None:
    assert what_passes_firewalls(FabricOptions(ports=ports)).endswith(named)
