"""One port of a host for all that listens there: who accepts a connection hands it to whom it is for."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rank_scripts import reserved_port, run_script
from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions
from syncline.fabric.dialling import ADDRESSED_BYTES, CALL_MAGIC
from syncline.fabric.handshake import MAGIC, Dialer, Terms
from syncline.fabric.shared_port import SharedListener, name_of, prefix_of, share_store
from syncline.user_folder import user_folder

LOOPBACK = "127.0.0.1"
DEADLINE_S = 20.0
EPOCH = 7
SCRIPT = Path(__file__).with_name("shared_port_process.py")


def terms(rank: int) -> Terms:
    return Terms(rank=rank, world_size=9, job_id="job", epoch=EPOCH, key=bytes(32), num_classes=1)


def hello(peer: int) -> bytes:
    return Dialer(terms(8), peer=peer, connection_class=0).hello


def name(rank: int) -> str:
    return name_of(terms(rank).job, EPOCH, rank)


@pytest.fixture(name="port")
def one_port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@contextlib.contextmanager
def listening(port: int, *ranks: int) -> Iterator[list[SharedListener]]:
    with contextlib.ExitStack() as stack:
        listeners = [SharedListener(LOOPBACK, port, FabricOptions(ports=(port, port))) for _ in ranks]
        for rank, listener in zip(ranks, listeners, strict=True):
            stack.callback(listener.close)
            listener.serve(name(rank))
        yield listeners


def dial(port: int, first: bytes) -> socket.socket:
    sock = socket.create_connection((LOOPBACK, port), timeout=DEADLINE_S)
    sock.sendall(first)
    return sock


def accepted(listener: SharedListener) -> socket.socket:
    assert select.select([listener], [], [], DEADLINE_S)[0], "nothing came"
    sock, _ = listener.accept()
    sock.settimeout(DEADLINE_S)
    return sock


def is_closed(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


def left_in_folder(port: int, address: str = LOOPBACK) -> list[str]:
    return [path.name for path in user_folder(os.environ).glob(f"{prefix_of(address, port)}*")]


def read(sock: socket.socket, num_bytes: int) -> bytes:
    return sock.recv(num_bytes, socket.MSG_WAITALL)


def test_each_is_handed_what_is_for_it_and_nothing_is_taken(port: int) -> None:
    with listening(port, 1, 2) as listeners:
        for rank, listener in ((2, listeners[1]), (1, listeners[0])):
            with dial(port, hello(rank)) as sock, accepted(listener) as other:
                assert read(other, len(hello(rank)))[:ADDRESSED_BYTES] == hello(rank)[:ADDRESSED_BYTES]
                assert (other.getsockname(), other.getpeername()) == ((LOOPBACK, port), sock.getsockname())
                other.sendall(b"x")
                assert read(sock, 1) == b"x"
    assert left_in_folder(port) == []


def test_who_is_called_is_handed_the_call_not_whom_it_is_about(port: int) -> None:
    call = struct.pack("<8s32sQIII", CALL_MAGIC, terms(3).job, EPOCH, 3, 1, 2)
    with listening(port, 1, 2) as (called, _), dial(port, call + bytes(20)), accepted(called) as other:
        assert read(other, len(call)) == call


def test_what_comes_byte_by_byte_is_waited_for(port: int) -> None:
    with listening(port, 1) as (listener,), dial(port, b"") as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(ADDRESSED_BYTES):
            sock.sendall(hello(1)[place : place + 1])
        with accepted(listener) as other:
            assert read(other, ADDRESSED_BYTES) == hello(1)[:ADDRESSED_BYTES]
            other.setblocking(False)
            sock.sendall(b"y")  # one byte is enough for it to be readable from now on
            assert select.select([other], [], [], DEADLINE_S)[0]


@pytest.mark.parametrize(
    "first", [hello(5), MAGIC, b"GET / HTTP/1.1", b"x", b""], ids=["absent", "part", "web", "x", "end"]
)
def test_what_is_for_nobody_is_closed(port: int, first: bytes) -> None:
    with listening(port, 1), dial(port, first) as sock:
        with contextlib.suppress(OSError):  # it may be closed by now
            sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)


def test_all_else_is_for_the_store_and_one_port_has_one(port: int) -> None:
    options = FabricOptions(ports=(port, port))
    store, splices = share_store(LOOPBACK, port, options)
    with listening(port, 1) as (listener,), store, dial(port, b"\0store") as sock:
        store.settimeout(DEADLINE_S)
        other, _ = store.accept()
        with other, dial(port, hello(1)), accepted(listener):
            other.settimeout(DEADLINE_S)
            assert read(other, 6) == b"\0store"
            other.sendall(b"answer")
            assert read(sock, 6) == b"answer"
        with pytest.raises(ConfigurationError, match=r"shared by another job's store; give this job another port"):
            share_store(LOOPBACK, port, options)
        splices.close()
    assert left_in_folder(port) == []


def test_what_a_killed_process_left_is_removed(port: int) -> None:
    with listening(port, 1) as (listener,):
        left = listener._port.path_of(f"{name(2)}.1.0")
        dead = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        dead.bind(str(left))
        dead.close()
        with dial(port, hello(2)) as sock:
            assert is_closed(sock)
        assert not left.is_socket()


def test_a_port_of_another_program_is_refused(port: int) -> None:
    with socket.create_server((LOOPBACK, port)), pytest.raises(ConfigurationError, match=rf"cannot listen on .*{port}"):
        SharedListener(LOOPBACK, port, FabricOptions(ports=(port, port)))


@pytest.mark.parametrize("address", [LOOPBACK, "::1"])
def test_a_whole_job_goes_through_one_port(port: int, address: str) -> None:
    where = {"SYNCLINE_PORTS": str(port), "MASTER_PORT": str(port), "MASTER_ADDR": address}
    ended = run_script(SCRIPT, 4, "fleet", extra=where)
    assert [status for status, _ in ended] == [0] * 4, ended
    assert all(f"listens on [{port}]" in text for _, text in ended), ended
    assert left_in_folder(port, address) == []


def test_process_groups_share_it_too(port: int) -> None:
    """Their store is torch's own, on another port."""
    ended = run_script(SCRIPT, 4, "groups", extra={"SYNCLINE_PORTS": str(port)})
    assert [status for status, _ in ended] == [0] * 4, ended
    assert all(f"listens on [{port}]" in text for _, text in ended[1:]), ended


def test_a_forked_child_has_no_part_in_it(port: int) -> None:
    """As a loader's worker, which may drop what it was copied with."""
    store, splices = share_store(LOOPBACK, port, FabricOptions(ports=(port, port)))
    with store:
        with listening(port, 1) as (listener,):
            process = os.fork()
            if process == 0:
                try:
                    listener.close()
                    splices.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
            with dial(port, hello(1)), accepted(listener):
                pass
        splices.close()
