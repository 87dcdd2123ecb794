"""Hosts and ports, with IPv6 in brackets; addresses that others can dial, all of one kind."""

import asyncio
import collections
import socket

import psutil
import pytest

from meeting_stores import DictStore
from syncline.endpoints import format_endpoint, is_ipv6, parse_endpoint, without_brackets
from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp
from syncline.fabric.sockets import resolve_address


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("a1", ("a1", 7)),
        ("a1:80", ("a1", 80)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("::1", ("::1", 7)),
        ("[::1]", ("::1", 7)),
        ("[::1]:80", ("::1", 80)),
        ("fe80::1%eth0", ("fe80::1%eth0", 7)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_an_endpoint_is_read_and_written_again(text, endpoint):
    assert parse_endpoint(text, default_port=7, what="x") == endpoint
    assert parse_endpoint(format_endpoint(*endpoint), default_port=9, what="x") == endpoint


@pytest.mark.parametrize("text", ["", ":80", "a:", "a:0", "a:65536", "a:b", "[::1]:", "a:b:80"])
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"--path must be HOST:PORT"):
        parse_endpoint(text, default_port=7, what="--path")


def test_brackets():
    assert without_brackets("[::1]") == "::1"
    assert without_brackets("a1") == "a1"
    assert is_ipv6("fe80::1%eth0")
    assert not is_ipv6("10.0.0.1")
    assert not is_ipv6("a1")


@pytest.mark.parametrize("text", ["0.0.0.0", "::", "[::]"])
def test_an_address_that_nobody_can_dial_is_refused(text):
    with pytest.raises(ConfigurationError, match="others cannot dial it; name one of"):
        resolve_address(text)


Entry = collections.namedtuple("Entry", "family address")


def test_an_interface_gives_the_address_that_others_reach_best(monkeypatch):
    link_local, wide, four = (
        Entry(socket.AF_INET6, "fe80::1%e0"),
        Entry(socket.AF_INET6, "fd00::2"),
        Entry(socket.AF_INET, "10.0.0.1"),
    )
    packet = Entry(socket.AF_PACKET, "02:00:00:00:00:01")
    interfaces = {"e0": [packet, link_local, wide, four], "e1": [link_local, wide], "e2": [link_local], "e3": [packet]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert resolve_address("e0") == "10.0.0.1"
    assert resolve_address("e1") == "fd00::2"
    assert resolve_address("e2") == "fe80::1%e0"
    assert resolve_address("[fd00::5]") == "fd00::5"


def test_ranks_of_different_address_families_are_told():
    async def main():
        store = DictStore()
        return await asyncio.gather(
            *(
                connect_tcp(
                    FabricOptions(address=address),
                    rank=rank,
                    world_size=2,
                    rendezvous=Rendezvous(store, job_id="syncline"),
                )
                for rank, address in enumerate(("127.0.0.1", "::1"))
            ),
            return_exceptions=True,
        )

    for outcome in asyncio.run(main()):
        assert isinstance(outcome, ConfigurationError)
        assert "rank 1 (host" in str(outcome)
        assert "has the address ::1 and rank 0" in str(outcome)
        assert "SYNCLINE_INTERFACE" in str(outcome)
