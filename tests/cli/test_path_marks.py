"""Probes that tell what a path makes of DSCP marks, and the responder that answers them."""

import socket
import threading

import pytest

from syncline.cli import path_diagnosis
from syncline.cli.path_diagnosis import (
    ANSWER,
    PACKET_BYTES,
    PROBE,
    PathMark,
    open_mark_socket,
    probe_path,
    respond,
    seal,
    unseal,
)
from syncline.errors import ConfigurationError

MARKS = (46, 34, 18, 8, 0)
NONCE = bytes(16)


@pytest.fixture
def responder():
    """Start responders; all have ended when the test has."""
    is_over = threading.Event()
    threads = []

    def start(address, **settings):
        sock = open_mark_socket(socket.AF_INET6 if ":" in address else socket.AF_INET, (address, 0))
        port = sock.getsockname()[1]
        told = []

        def run():
            with sock:
                told.append(respond(sock, for_s=30.0, is_over=is_over.is_set, **settings))

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return port, told, threads[-1]

    yield start
    is_over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("listens", "asks"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("::", "::1")]
)
def test_marks_survive_on_loopback(responder, listens, asks):
    port, _, _ = responder(listens)
    found = probe_path(asks, port, MARKS)
    assert found == tuple(PathMark(sent=mark, arrived=mark, returned=mark) for mark in MARKS)
    assert all(one.survived for one in found)


def test_a_path_that_clears_marks_is_seen_in_each_direction(responder, monkeypatch):
    really_set = path_diagnosis._set_mark

    def bleached(sock, mark, peer):
        is_responder = sock.getsockname()[1] == port
        really_set(sock, mark if is_responder or mark == 8 else 0, peer)

    port, _, _ = responder("127.0.0.1")
    monkeypatch.setattr(path_diagnosis, "_set_mark", bleached)
    assert probe_path("127.0.0.1", port, (46, 8)) == (
        PathMark(sent=46, arrived=0, returned=46),
        PathMark(sent=8, arrived=8, returned=8),
    )


def test_only_those_who_share_the_secret_are_answered(responder):
    port, _, _ = responder("127.0.0.1", key=b"secret")
    assert probe_path("127.0.0.1", port, (46,), key=b"secret")[0].survived
    assert probe_path("127.0.0.1", port, (46,), key=b"other", wait_s=0.05) == (
        PathMark(sent=46, arrived=None, returned=None),
    )


def test_a_responder_answers_a_bounded_number_of_times(responder):
    port, told, thread = responder("127.0.0.1", max_answers=2)
    assert [one.survived for one in probe_path("127.0.0.1", port, (1, 2, 3), wait_s=0.1)] == [True, True, False]
    thread.join(60)
    assert told == [2]


def test_nobody_there():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    assert probe_path("127.0.0.1", port, (46,), wait_s=0.05)[0] == PathMark(sent=46, arrived=None, returned=None)


def test_an_answer_is_no_longer_than_its_probe_and_is_of_its_kind_and_key():
    probe, answer = seal(PROBE, b"k", NONCE, 46), seal(ANSWER, b"k", NONCE, 46, 10)
    assert len(answer) == len(probe) == PACKET_BYTES
    assert unseal(ANSWER, b"k", answer) == (NONCE, 46, 10)
    assert unseal(ANSWER, b"j", answer) is None
    assert unseal(PROBE, b"k", answer) is None, "two responders cannot keep each other busy"


@pytest.mark.parametrize("packet", [b"", b"x" * PACKET_BYTES, seal(PROBE, b"k", NONCE, 46)[:-1] + b"x"])
def test_whatever_is_no_probe_is_ignored(packet):
    assert unseal(PROBE, b"k", packet) is None


def test_a_mark_beyond_six_bits_is_not_answered(responder):
    port, _, _ = responder("127.0.0.1", max_answers=1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", port))
        for mark in (64, 46):
            sock.send(seal(PROBE, b"", NONCE, mark))
        assert unseal(ANSWER, b"", sock.recv(PACKET_BYTES))[1] == 46


@pytest.mark.parametrize("name", ["no such host!", "no..host"])
def test_a_name_that_leads_nowhere(name):
    with pytest.raises(ConfigurationError, match="cannot be resolved"):
        probe_path(name, 1, (46,))


def test_a_port_that_is_taken():
    with (
        open_mark_socket(socket.AF_INET, ("127.0.0.1", 0)) as sock,
        pytest.raises(ConfigurationError, match="give another port"),
    ):
        open_mark_socket(socket.AF_INET, sock.getsockname())
