"""Ranks that nobody can dial: they call, or meet at a third rank, and then are connected as all others are."""

import asyncio
import contextlib
import itertools
import json
import random
import socket
import struct

import pytest
from fabric_scenarios import gather, random_traffic, run_over_tcp, sockets_of

from meeting_stores import DictStore
from syncline.errors import ConfigurationError
from syncline.fabric._native import Splices
from syncline.fabric.dialling import CALL_BYTES, CALL_MAGIC
from syncline.fabric.options import NOWHERE
from syncline.priorities.settings import Priorities
from syncline.topology import Topology

CLOSED_PORT = 1
MIB = 1 << 20


class RouterStore(DictStore):
    """A store that names a port where nobody listens for each rank that cannot be dialled, unless it is of ``host``."""

    def set(self, key, value):
        record = json.loads(value)
        if isinstance(record, dict) and record.get("is_reachable") is False:
            value = json.dumps({**record, "port": CLOSED_PORT}).encode()
        super().set(key, value)


def with_hidden(hidden, scenario, *, world_size=4, shares_memory=True, **settings):
    """Run ``scenario(fabrics, recorders, mail)`` on hosts of one rank each, of which those of ``hidden`` call."""
    run_over_tcp(
        world_size,
        scenario,
        store=RouterStore(),
        topology=Topology.flat(world_size),
        of_ranks={rank: {"advertised": NOWHERE} for rank in hidden},
        shares_memory=shares_memory,
        **settings,
    )


def passing(fabric):
    """Return how many connections pass through a rank, and how many bytes passed."""
    splices = fabric._mesh.reach._splices
    return (splices.num_open, splices.num_bytes) if splices else (0, 0)


async def exchange(mail, pairs, tags):
    """Move a message each way between the ranks of each pair."""
    payload = random.Random(1).randbytes(MIB)
    ways = [(source, target, tag) for tag in tags for pair in pairs for source, target in (pair, pair[::-1])]
    received = [mail.receive(target, source, tag, MIB) for source, target, tag in ways]
    sent = [mail.send(source, target, tag, payload) for source, target, tag in ways]
    await gather(*sent, *received)
    assert all(future.result() == payload for future in received)


@pytest.mark.parametrize(
    ("hidden", "num_met"), [({0}, 0), ({3}, 0), ({1, 2}, 1), ({0, 1, 3}, 3)], ids=["0", "3", "1 and 2", "all but 2"]
)
@pytest.mark.parametrize("secret", [None, b"s" * 32], ids=["plain", "keyed"])
def test_all_ranks_are_connected_whoever_cannot_be_dialled(hidden, num_met, secret):
    num_classes = 2
    third = min(set(range(4)) - hidden)

    async def scenario(fabrics, recorders, mail):
        assert passing(fabrics[third])[0] == num_met * (num_classes + 1)
        assert [passing(fabric)[0] for fabric in fabrics if fabric.rank != third] == [0, 0, 0]
        before = passing(fabrics[third])[1]
        await exchange(mail, list(itertools.combinations(range(4), 2)), range(2))
        passed = passing(fabrics[third])[1] - before
        assert num_met * 4 * MIB <= passed <= num_met * 4 * MIB * 1.01
        await gather(*(fabric.close() for fabric in fabrics))
        assert not any(recorder.lost for recorder in recorders)
        assert passing(fabrics[third])[0] == 0

    with_hidden(hidden, scenario, num_classes=num_classes, secret=secret, authenticate_frames=secret is not None)


def test_memory_is_shared_only_with_ranks_at_the_other_end_of_a_socket():
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, [(0, 1), (1, 2)], range(1))
        assert fabrics[1].is_local(0)
        assert not fabrics[1].is_local(2)

    with_hidden({1, 2}, scenario)


@pytest.mark.parametrize("pair", [(0, 2), (1, 2)], ids=["called", "met"])
@pytest.mark.parametrize("end", [0, 1], ids=["lower", "higher"])
def test_a_connection_that_breaks_is_opened_again(pair, end):
    async def scenario(fabrics, recorders, mail):
        for which in (1, 0):
            await exchange(mail, [pair], [10 + which])
            broken = sockets_of(fabrics[pair[end]], pair[1 - end])[which]
            moving = asyncio.ensure_future(exchange(mail, [pair], range(20 * which, 20 * which + 4)))
            with contextlib.suppress(OSError):
                broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                broken.shutdown(socket.SHUT_RDWR)
            await moving
            await exchange(mail, [pair], [100 + which])
        connections = fabrics[pair[0]].statistics().connections
        assert [each.reconnects for each in connections if each.peer == pair[1]] == [1, 1]
        assert not any(recorder.lost for recorder in recorders)

    with_hidden({0, 1, 2}, scenario, shares_memory=False)


def test_ranks_meet_elsewhere_when_the_third_is_lost():
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, [(1, 2)], range(1))
        fabrics[0].abort()
        await exchange(mail, [(1, 2)], range(1, 3))
        assert passing(fabrics[3])[0] == 2
        assert [set(recorder.lost) for recorder in recorders[1:]] == [{0}] * 3

    with_hidden({1, 2}, scenario, shares_memory=False)


def test_random_traffic():
    async def scenario(fabrics, recorders, mail):
        await random_traffic(fabrics, mail, random.Random(3), 120)
        assert not any(recorder.lost for recorder in recorders)

    with_hidden({0, 2}, scenario, shares_memory=False, num_classes=2)


def test_further_classes_are_opened():
    async def scenario(fabrics, recorders, mail):
        await gather(*(fabric.open_classes(Priorities(num_classes=3), timeout_s=60.0) for fabric in fabrics))
        pairs = list(itertools.combinations(range(4), 2))
        for connection_class in range(3):
            received = [mail.receive(pair[1], pair[0], connection_class, 9) for pair in pairs]
            sent = [
                mail.send(*pair, connection_class, b"a payload", connection_class=connection_class) for pair in pairs
            ]
            await gather(*sent, *received)
        assert not any(recorder.lost for recorder in recorders)

    with_hidden({0, 1}, scenario)


def test_two_ranks_that_could_meet_nowhere_are_told_so():
    async def scenario(fabrics, recorders, mail):
        raise AssertionError("they are connected")

    with pytest.raises(ConfigurationError, match=r"cannot be dialled \(SYNCLINE_ADVERTISE=none\), and neither can any"):
        with_hidden({0, 1}, scenario, world_size=2)


def test_a_call_without_the_jobs_key_is_refused():
    async def scenario(fabrics, recorders, mail):
        acceptor = fabrics[0]._mesh.acceptor
        loop, before = asyncio.get_running_loop(), acceptor.num_refused
        with socket.socket() as stranger:
            stranger.setblocking(False)
            await loop.sock_connect(stranger, acceptor._socket.getsockname())
            await loop.sock_sendall(stranger, CALL_MAGIC + bytes(CALL_BYTES - len(CALL_MAGIC)))
            assert await loop.sock_recv(stranger, 1) == b""
        assert acceptor.num_refused == before + 1

    with_hidden({1}, scenario)


class Through:
    """Two connections of this process that are joined in the middle."""

    def __init__(self):
        self.splices = Splices()
        self.near, self._one = socket.socketpair()
        self.far, self._other = socket.socketpair()
        for sock in (self._one, self._other):
            sock.setblocking(False)
        self.number = self.splices.add(self._one.fileno(), self._other.fileno())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.splices.close()
        for sock in (self.near, self.far, self._one, self._other):
            sock.close()


def read_all(sock):
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


async def on_threads(*calls):
    return await asyncio.wait_for(asyncio.gather(*(asyncio.to_thread(call) for call in calls)), 60.0)


def test_all_bytes_pass_both_ways_and_each_end_is_told_when_the_other_has_ended():
    there, back = (random.Random(seed).randbytes(5 * MIB + seed) for seed in (1, 2))

    def send(sock, payload):
        sock.sendall(payload)
        sock.shutdown(socket.SHUT_WR)

    with Through() as through:
        _, _, at_far, at_near = asyncio.run(
            on_threads(
                lambda: send(through.near, there),
                lambda: send(through.far, back),
                lambda: read_all(through.far),
                lambda: read_all(through.near),
            )
        )
        assert (at_far, at_near) == (there, back)
        assert through.splices.num_bytes == len(there) + len(back)


def test_an_end_that_breaks_ends_the_other_and_is_named_once():
    with Through() as through:
        through.far.settimeout(60.0)
        through.near.sendall(b"last words")
        assert through.far.recv(10) == b"last words"
        through.near.close()
        assert through.far.recv(1) == b""
        through.far.close()
        ended = asyncio.run(on_threads(lambda: _until_ended(through.splices)))
        assert ended == [[through.number]]
        assert through.splices.take_ended() == []
        assert through.splices.num_open == 0


def _until_ended(splices):
    while splices.num_open:
        pass
    return splices.take_ended()


def test_closing_ends_what_passes():
    with Through() as through:
        through.near.settimeout(60.0)
        through.splices.close()
        assert through.near.recv(1) == b""
