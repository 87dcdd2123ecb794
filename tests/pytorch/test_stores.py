"""The store through which ranks meet: where it listens, and that nobody waits for one beyond the deadline."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rank_scripts import reserved_port, run_script
from syncline.errors import ConfigurationError, RendezvousError
from syncline.fabric import FabricOptions
from syncline.pytorch.environment import Environment, read_environment
from syncline.pytorch.stores import TorchStore, _listen, open_store

SCRIPT = Path(__file__).with_name("fleet_process.py")
ELSEWHERE = "192.0.2.7"
"""An address that no machine has (RFC 5737)."""


@pytest.fixture
def silent() -> Iterator[int]:
    """Give the port of a program that lets the kernel accept, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def environment(rank: int, port: int, **options) -> Environment:
    read = read_environment(
        {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    )
    return read._replace(fabric=replace(read.fabric, address="127.0.0.1", **options))


@pytest.fixture
def port() -> Iterator[int]:
    """Give a port that nobody listens on, and that no other program gets meanwhile."""
    with reserved_port() as port:
        yield port


def test_one_rank_needs_no_store() -> None:
    assert isinstance(open_store(read_environment({})), TorchStore)


def test_who_never_answers_is_waited_for_until_the_deadline(silent: int) -> None:
    with pytest.raises(RendezvousError, match=r"something accepts connections there, but did not answer as a store"):
        open_store(environment(1, silent, connect_s=0.5))


def test_who_waits_for_the_store_says_so(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("syncline.pytorch.stores.FIRST_S", 0.1)
    for rank, is_told in ((1, True), (2, False)):
        with pytest.raises(RendezvousError):
            open_store(environment(1, port, connect_s=0.5)._replace(rank=rank))
        assert (f"waiting for the store of rank 0 at 127.0.0.1:{port}; check" in capsys.readouterr().err) == is_told


def test_nobody_there_is_told_at_the_deadline(port: int) -> None:
    with pytest.raises(RendezvousError, match=r"MASTER_ADDR:MASTER_PORT .* cannot be opened"):
        open_store(environment(1, port, connect_s=0.5))


def test_rank_0_says_at_once_that_its_port_is_taken(silent: int) -> None:
    with pytest.raises(RendezvousError, match=r"rank 0 cannot serve the store at .*: Address already in use"):
        open_store(environment(0, silent))


def test_the_store_is_served_on_one_address_alone(port: int) -> None:
    store = open_store(environment(0, port))
    store.set("key", b"value")
    other = open_store(environment(1, port))
    assert other.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=60)


def test_a_name_of_another_machine_leads_to_the_address_of_the_fabric() -> None:
    """Behind the virtual address of a service, rank 0 has another one."""
    with _listen(ELSEWHERE, 0, FabricOptions(insecure=True), address="127.0.0.1") as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(("rank", "says"), [(0, "rank 0 cannot serve the store"), (1, "The store")])
def test_a_loopback_name_does_not_hide_rank_0_from_the_others(port: int, rank: int, says: str) -> None:
    """Where the master's name means that on its own host, those of the host go to the address that others reach."""
    told = environment(rank, port, connect_s=0.5)
    with pytest.raises(RendezvousError, match=f"{says} at MASTER_ADDR:MASTER_PORT {ELSEWHERE}"):
        open_store(told._replace(fabric=replace(told.fabric, address=ELSEWHERE, secret=b"s" * 32)))


def test_rank_0_without_a_network_serves_the_store_at_the_shared_port_alone(port: int) -> None:
    told = environment(0, port, ports=(29600, 29600), network="port-0.lends-0.")
    with pytest.raises(ConfigurationError, match=r"set MASTER_PORT=29600, or give rank 0 to a process that has"):
        open_store(told)


def test_without_a_secret_the_store_is_not_shown_to_other_machines() -> None:
    with pytest.raises(ConfigurationError, match=f"address {ELSEWHERE} can be reached from other machines"):
        _listen(ELSEWHERE, 0, FabricOptions(), address="127.0.0.1")


def test_all_ranks_end_when_the_port_is_a_silent_programs(silent: int) -> None:
    extra = {"MASTER_PORT": str(silent), "SYNCLINE_CONNECT_TIMEOUT": "1"}
    for status, output in run_script(SCRIPT, 3, "addresses", extra=extra):
        assert status == 1
        assert "RendezvousError" in output.splitlines()[-1], output


def test_a_missing_secret_is_one_line_of_whoever_may_have_a_terminal_of_its_own() -> None:
    """Which ranks share one, if any, is not known where no launcher says which is the first of its host."""
    for status, told in run_script(SCRIPT, 3, "addresses", extra={"SYNCLINE_INTERFACE": ELSEWHERE}):
        assert status == 1
        assert len(told.splitlines()) == 1
        assert "SYNCLINE_SECRET_FILE" in told
