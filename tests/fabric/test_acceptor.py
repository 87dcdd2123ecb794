"""Strangers at the port: refused, counted, and the job goes on."""

import asyncio
import contextlib
import logging

import loops
import pytest
from fabric_scenarios import Mail, connect_all, gather
from hostile_peer import connect_raw

from meeting_stores import DictStore
from syncline.errors import ConfigurationError, FabricError, HandshakeError
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp
from syncline.fabric.acceptor import MAX_UNAUTHENTICATED, Acceptor
from syncline.fabric.dialling import connect_to, dial
from syncline.fabric.handshake import HELLO_BYTES, MAGIC, Terms, derive_key
from syncline.fabric.sockets import open_listening_socket

DEADLINE_S = 60.0


class WatchedAcceptor(Acceptor):
    """An acceptor that says when a handshake is over."""

    over = None

    def _finish(self, *arguments):
        super()._finish(*arguments)
        if self.over is not None:
            self.over.set()


class Door:
    """An acceptor by itself."""

    def __init__(self, **settings):
        self.options = FabricOptions(**settings)
        self.listening = open_listening_socket("127.0.0.1", self.options)
        self.port = self.listening.getsockname()[1]
        self.arrived = []
        self.acceptor = WatchedAcceptor(
            self.listening,
            self.terms(0),
            handshake_s=self.options.handshake_s,
            is_taken=lambda rank, connection_class: (
                (rank, connection_class) in [admission[:2] for admission, _ in self.arrived]
            ),
            on_connection=lambda *arrival: self.arrived.append(arrival),
        )

    def terms(self, rank, **changes):
        values = {
            "rank": rank,
            "world_size": 4,
            "job_id": "job",
            "epoch": 5,
            "key": derive_key(b"s" * 32, job_id="job"),
            "num_classes": 1,
        }
        return Terms(**(values | changes))

    async def dial(self, rank, connection_class=0, **changes):
        _, sock = await dial(
            self.terms(rank, **changes),
            self.options,
            peer=0,
            peer_name="rank 0 (host a)",
            address=("127.0.0.1", self.port),
            connection_class=connection_class,
            open_socket=lambda _: connect_to(("127.0.0.1", self.port), "127.0.0.1", self.options),
        )
        return sock

    async def wait_until(self, condition):
        self.acceptor.over = asyncio.Event()
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.acceptor.over.clear()
                await self.acceptor.over.wait()

    async def wait_refused(self, number):
        await self.wait_until(lambda: self.acceptor.num_refused >= number)

    async def wait_arrived(self, number):
        await self.wait_until(lambda: len(self.arrived) >= number)

    async def close(self):
        await asyncio.gather(*self.acceptor.close(), return_exceptions=True)
        for _, sock in self.arrived:
            sock.close()


def at_door(scenario, **settings):
    async def main():
        door = Door(**settings)
        try:
            await scenario(door)
        finally:
            await door.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    loops.run(main())


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: scanner\r\nAccept: */*\r\nConnection: close\r\n\r\n",
    "tls": bytes.fromhex("16030100f8010000f40303") + bytes(200),
    "zeros": bytes(HELLO_BYTES),
    "magic and garbage": MAGIC + bytes(range(200)),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_and_an_honest_rank_comes_in(garbage):
    async def scenario(door):
        loop = asyncio.get_running_loop()
        stranger = await connect_raw(door.port)
        await loop.sock_sendall(stranger, garbage)
        with contextlib.suppress(ConnectionResetError):
            assert len(await loop.sock_recv(stranger, 1000)) in {0, 76}
        stranger.close()
        await door.wait_refused(1)
        (await door.dial(2)).close()
        await door.wait_arrived(1)
        assert door.arrived[0][0][:2] == (2, 0)

    at_door(scenario)


def test_half_a_hello_has_a_deadline():
    async def scenario(door):
        loop = asyncio.get_running_loop()
        stranger = await connect_raw(door.port)
        await loop.sock_sendall(stranger, MAGIC)
        assert await is_closed(stranger, within_s=DEADLINE_S)
        stranger.close()
        assert door.acceptor.num_refused == 1

    at_door(scenario, handshake_s=0.1)


def test_a_byte_now_and_then_gets_no_more_time():
    async def scenario(door):
        loop = asyncio.get_running_loop()
        stranger = await connect_raw(door.port)
        stranger.send(MAGIC)
        num_sent = len(MAGIC)
        with contextlib.suppress(ConnectionError):
            while num_sent < HELLO_BYTES and not await is_closed(stranger, within_s=0.02):  # two seconds, if it is let
                await loop.sock_sendall(stranger, b"S")
                num_sent += 1
        assert num_sent < HELLO_BYTES
        await door.wait_refused(1)
        assert door.acceptor.last_refusal == "TimeoutError"
        stranger.close()

    at_door(scenario, handshake_s=0.2)


async def is_closed(sock, *, within_s):
    try:
        async with asyncio.timeout(within_s):
            return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    except TimeoutError:
        return False


def test_a_closed_half_hello_is_counted():
    async def scenario(door):
        stranger = await connect_raw(door.port)
        stranger.send(MAGIC)
        stranger.close()
        await door.wait_refused(1)
        assert door.acceptor.last_refusal == "EOFError"

    at_door(scenario)


def test_a_crowd_of_idle_sockets_does_not_keep_an_honest_rank_out(caplog, monkeypatch):
    monkeypatch.setattr("syncline.fabric.acceptor.LOG_INTERVAL_S", 1e6)

    async def scenario(door):
        crowd = await asyncio.gather(*(connect_raw(door.port) for _ in range(3 * MAX_UNAUTHENTICATED)))
        sock = await asyncio.wait_for(door.dial(3), DEADLINE_S)
        assert len(door.acceptor.handshakes) <= MAX_UNAUTHENTICATED
        await door.wait_arrived(1)
        assert door.arrived[0][0][:2] == (3, 0)
        assert door.acceptor.num_refused >= 2 * MAX_UNAUTHENTICATED
        for other in (sock, *crowd):
            other.close()

    with caplog.at_level(logging.WARNING):
        at_door(scenario)
    assert len(caplog.records) == 1, "the log says it once in an interval"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": bytes(32)}, "the shared secrets differ"),
        ({"job_id": "other"}, "the job ids differ"),
        ({"epoch": 6}, "another start of the job"),
        ({"versions": (9, 9)}, "the protocol versions differ"),
        ({"num_classes": 3}, "the numbers of connection classes differ"),
        ({"world_size": 100, "rank": 50}, "it is not the rank that was dialled"),
    ],
)
def test_a_rank_that_does_not_fit_learns_why(changes, message):
    async def scenario(door):
        with pytest.raises(HandshakeError, match=message):
            await asyncio.wait_for(door.dial(**({"rank": 1} | changes)), DEADLINE_S)
        await door.wait_refused(1)
        assert not door.arrived

    at_door(scenario)


def test_a_second_process_of_the_same_rank_learns_why():
    async def scenario(door):
        sockets = [await door.dial(1), await door.dial(1, -1)]
        await door.wait_arrived(2)
        with pytest.raises(HandshakeError, match="this rank is connected already"):
            await door.dial(1)
        for sock in sockets:
            sock.close()

    at_door(scenario)


def test_the_job_goes_on_while_strangers_knock():
    async def main():
        fabrics = await connect_all(2)
        port = fabrics[0]._mesh.acceptor._socket.getsockname()[1]
        loop = asyncio.get_running_loop()
        mail = Mail(fabrics)
        payload = bytes(1_000_000)
        for tag, garbage in enumerate(GARBAGE.values()):
            stranger = await connect_raw(port)
            await loop.sock_sendall(stranger, garbage)
            await gather(mail.send(0, 1, tag, payload), mail.receive(1, 0, tag, len(payload)))
            with contextlib.suppress(ConnectionResetError):
                while await loop.sock_recv(stranger, 1000):
                    pass
            stranger.close()
        assert fabrics[0].statistics().refused_connections == len(GARBAGE)
        await gather(*(fabric.close() for fabric in fabrics))

    loops.run(main())


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"secret": b"b" * 32}, "the shared secrets differ"), ({"num_classes": 2}, "the numbers of connection classes")],
)
def test_ranks_that_differ_do_not_connect(changed, message):
    async def main():
        store = DictStore()
        common = {"secret": b"a" * 32, "connect_s": 60.0}
        results = await asyncio.gather(
            *(
                connect_tcp(
                    FabricOptions(**(common | (changed if rank == 1 else {}))),
                    rank=rank,
                    world_size=2,
                    rendezvous=Rendezvous(store, job_id="syncline"),
                )
                for rank in range(2)
            ),
            return_exceptions=True,
        )
        assert all(isinstance(result, HandshakeError) for result in results)
        assert message in str(results[1])
        assert str(results[0]) == str(results[1]), "the other side is told at once, not at the deadline"
        assert "rank 1 and rank 0 (host " in str(results[0])
        assert message in str(results[0]), "who waits is told the remedy too"

    loops.run(main())


def test_an_open_address_without_a_secret_is_refused():
    async def main():
        with pytest.raises(ConfigurationError, match="insecure=True"):
            await connect_tcp(
                FabricOptions(address="192.0.2.7"),
                rank=0,
                world_size=2,
                rendezvous=Rendezvous(DictStore(), job_id="syncline"),
            )

    loops.run(main())


def test_a_rank_that_never_comes_is_named():
    async def main():
        with pytest.raises(FabricError, match="rank 1 did not come"):
            await connect_tcp(
                FabricOptions(connect_s=0.1),
                rank=0,
                world_size=2,
                rendezvous=Rendezvous(DictStore(), job_id="syncline"),
            )

    loops.run(main())
