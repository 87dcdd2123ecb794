"""Sockets of a network that a rank does not have, from a rank of its host that has it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rank_scripts import reserved_port, script_environment
from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions, lending
from syncline.fabric.lending import borrow, find_network, open_meeting_place
from syncline.fabric.shared_port import SharedListener, lending as lending_for, prefix_of
from syncline.fabric.sockets import listen_at, open_socket
from syncline.user_folder import served_paths, user_folder

LOOPBACK = "127.0.0.1"
HOST = "a0"
SECRET, OTHER = b"s" * 32, b"t" * 32
LENDS = """
import sys
from syncline.fabric import FabricOptions
from syncline.fabric.shared_port import lending
port = int(sys.argv[1])
with lending(FabricOptions(ports=(port, port), secret=b"s" * 32), "a0"):
    print("lends", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(name="options")
def of_one_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FabricOptions]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # as processes that a test starts have other temporary files
    with reserved_port() as port:
        yield FabricOptions(ports=(port, port), secret=SECRET, connect_s=0.2)


def with_network(options: FabricOptions, host: str = HOST) -> FabricOptions:
    return find_network(host, replace(options, connect_s=20.0))


@contextlib.contextmanager
def another_lender(options: FabricOptions) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", LENDS, str(options.shared_port)],
        env=script_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "lends\n"
        try:
            yield process
        finally:
            process.kill()


def left_in_folder(options: FabricOptions) -> list[str]:
    assert options.shared_port is not None
    return [path.name for path in user_folder(os.environ).glob(f"{prefix_of(LOOPBACK, options.shared_port)}*")]


def test_what_is_lent_listens_and_dials_and_outlives_who_lent(options: FabricOptions) -> None:
    with lending_for(options, HOST):
        lent = with_network(options)
        assert lent.address == LOOPBACK
        listening = listen_at(LOOPBACK, lent, 0)
        dialling = open_socket(LOOPBACK, lent)
    assert left_in_folder(options) == []
    for sock in (listening, dialling):
        assert sock.gettimeout() == 0.0
        sock.settimeout(20.0)
    with listening, dialling:
        dialling.connect(listening.getsockname())
        accepted, _ = listening.accept()
        with accepted:
            accepted.sendall(b"x")
            assert dialling.recv(1) == b"x"


def test_who_lends_shares_its_port_with_who_borrows(options: FabricOptions) -> None:
    """What one accepts it hands on to the other, as they meet under the names of one network."""
    assert options.shared_port is not None
    with lending_for(options, HOST):
        listener = SharedListener(LOOPBACK, options.shared_port, options)
        borrowing = SharedListener("127.0.0.2", options.shared_port, with_network(options))  # else the two are one
        own, lent = (each._port.path_of("name").name for each in (listener, borrowing))
        assert own == lent
        listener.close()
        borrowing.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_socket_is_of_the_family_that_was_asked_for(options: FabricOptions, family: int) -> None:
    with lending_for(options, HOST), borrow(family, with_network(options)) as sock:
        assert sock.family == family


def test_only_who_knows_the_secret_is_lent_to(options: FabricOptions) -> None:
    with lending_for(replace(options, secret=OTHER), HOST):
        with pytest.raises(ConfigurationError, match=r"no rank of host a0 has lent .*secret"):
            find_network(HOST, options)
        with lending_for(replace(options, secret=OTHER), "b0"):
            assert with_network(replace(options, secret=OTHER), "b0").network


def test_only_a_rank_of_the_host_lends(options: FabricOptions) -> None:
    with lending_for(options, "b0"), pytest.raises(ConfigurationError, match=r"no rank of host a0 .* SYNCLINE_HOST"):
        find_network(HOST, options)


def test_a_rank_without_a_network_shares_one_port(options: FabricOptions) -> None:
    with pytest.raises(ConfigurationError, match=r"one number, as SYNCLINE_PORTS=29600"):
        find_network(HOST, replace(options, ports=None))


def test_of_those_that_lend_a_stopped_one_is_passed_over(
    options: FabricOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "ANSWER_S", 0.1)
    with another_lender(options) as process:
        lent = with_network(options)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # a signal takes its time
        with pytest.raises(OSError, match=r"no rank of this host lends it a network any more"):
            borrow(socket.AF_INET, lent)
        with lending_for(options, HOST), borrow(socket.AF_INET, lent) as sock:
            assert sock.fileno() >= 0


def test_once_nobody_lends_any_more_an_error_says_so(options: FabricOptions) -> None:
    with another_lender(options) as process:
        lent = with_network(options)
        process.kill()
        process.wait()
        with pytest.raises(ConfigurationError, match=r"cannot listen on .*no rank of this host lends"):
            listen_at(LOOPBACK, lent, 0)
    with pytest.raises(OSError, match=r"no rank of this host lends"):
        open_socket(LOOPBACK, lent)
    assert left_in_folder(options) == []


def test_what_is_no_question_is_closed_and_the_next_is_answered(options: FabricOptions) -> None:
    with lending_for(options, HOST):
        lent = with_network(options)
        folder = open_meeting_place()
        (path,) = served_paths(folder, f"{lent.network}*")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, Path(os.devnull).open() as file:
            sender.connect(str(path))
            socket.send_fds(sender, [b"4" + bytes(32)], [file.fileno()])  # no socket to answer to
            sender.send(b"?")
        os.close(folder)
        with borrow(socket.AF_INET, lent) as sock:
            assert sock.family == socket.AF_INET
