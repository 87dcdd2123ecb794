"""Connection classes opened after the fabric: agreed, authenticated, marked, counted, and gone with the rest."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from dataclasses import replace

import loops
import pytest
from fabric_scenarios import Mail, connect_all, gather, num_descriptors, run_over_tcp, sockets_of

from meeting_stores import DictStore
from syncline.errors import ConfigurationError, FabricClosedError, HandshakeError, PeerLostError
from syncline.fabric import FabricOptions, sockets
from syncline.fabric.sockets import mark
from syncline.fabric.tcp import TcpFabric
from syncline.priorities.settings import Priorities
from syncline.topology import Topology

MIB = 1 << 20
FOUR = Priorities(num_classes=4, dscp=(46, 34, 18, 8))
THREE = Priorities(num_classes=3, dscp=(46, 34, 18))
TWO = Priorities(num_classes=2, dscp=(46, 8))


async def open_all(fabrics, priorities=FOUR, *, timeout_s=60.0, **settings):
    return await asyncio.gather(
        *(fabric.open_classes(priorities, timeout_s=timeout_s, **settings) for fabric in fabrics),
        return_exceptions=True,
    )


def test_every_fabric_opens_classes_and_messages_match_whatever_they_come_on(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        assert await open_all(fabrics) == [None] * 3
        assert await open_all(fabrics) == [None] * 3, "a second time does nothing"
        payloads = {tag: bytes([tag]) * size for tag, size in enumerate((0, 7, 16_000, 300_000, MIB, 20_000))}
        received = {tag: mail.receive(2, 0, tag, len(payload)) for tag, payload in payloads.items()}
        sent = [mail.send(0, 2, tag, payload, connection_class=tag % 4) for tag, payload in payloads.items()]
        await gather(*sent, *received.values())
        assert {tag: future.result() for tag, future in received.items()} == payloads

    on_fabrics(3, scenario)


def test_ranks_that_ask_for_different_classes_are_told_on_every_rank(on_sockets):
    async def scenario(fabrics, recorders, mail):
        outcomes = await asyncio.gather(
            *(fabric.open_classes(THREE if fabric.rank == 1 else FOUR, timeout_s=60.0) for fabric in fabrics),
            return_exceptions=True,
        )
        assert all(isinstance(outcome, ConfigurationError) for outcome in outcomes), outcomes
        for rank, outcome in enumerate(outcomes):
            assert fabrics[0].describe_peer(rank) in str(outcome) or f"rank {rank} (" in str(outcome)
            assert "rank 1 (" in str(outcome)
            assert "give all ranks the same priorities" in str(outcome)

    on_sockets(3, scenario)


def test_a_rank_that_does_not_ask_is_named_at_the_deadline(on_sockets):
    async def scenario(fabrics, recorders, mail):
        outcomes = await open_all(fabrics[:2], timeout_s=0.3)
        for outcome in outcomes:
            assert isinstance(outcome, HandshakeError)
            assert "rank 2 (host" in str(outcome)
            assert "did not ask for them" in str(outcome)
        assert "rank 1 (" not in str(outcomes[0])

    on_sockets(3, scenario)


def test_a_rank_that_is_lost_meanwhile_is_named(on_sockets):
    async def scenario(fabrics, recorders, mail):
        asking = asyncio.gather(
            *(fabric.open_classes(FOUR, timeout_s=60.0) for fabric in fabrics[:2]), return_exceptions=True
        )
        await asyncio.sleep(0)
        fabrics[2].abort()
        for outcome in await asking:
            assert isinstance(outcome, PeerLostError)
            assert outcome.rank == 2

    on_sockets(3, scenario)


def test_a_fabric_that_closes_meanwhile_ends_the_wait(on_sockets):
    async def scenario(fabrics, recorders, mail):
        asking = asyncio.ensure_future(fabrics[0].open_classes(FOUR, timeout_s=60.0))
        await asyncio.sleep(0)
        fabrics[0].abort()
        with pytest.raises(FabricClosedError):
            await asking
        with pytest.raises(FabricClosedError):
            await fabrics[0].open_classes(FOUR, timeout_s=60.0)

    on_sockets(2, scenario)


def test_each_class_counts_what_went_on_it():
    async def scenario(fabrics, recorders, mail):
        await gather(mail.send(0, 1, 50, bytes(10), connection_class=3), mail.receive(1, 0, 50, 10))
        assert fabrics[0].statistics().by_class()[0].sent_messages == 1, "with one connection everything goes on it"
        before = fabrics[0].statistics()
        await open_all(fabrics)
        for tag in range(4):
            payload = bytes(100_000 * (tag + 1))
            await gather(mail.send(0, 1, tag, payload, connection_class=tag), mail.receive(1, 0, tag, len(payload)))
        after = fabrics[0].statistics()
        assert after.time_s > before.time_s
        sent, received = after.by_class(), fabrics[1].statistics().by_class()
        assert sorted(sent) == [-1, 0, 1, 2, 3]
        for tag in range(4):
            already = 10 if tag == 0 else 0
            assert sent[tag].sent_bytes == received[tag].received_bytes == 100_000 * (tag + 1) + already
            assert sent[tag].sent_messages == received[tag].received_messages == 1 + bool(already)
            assert sent[tag].queued_bytes == 0
        assert sum(entry.sent_bytes for entry in sent.values()) == after.sent_bytes

    run_over_tcp(2, scenario)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_old_and_new_connections_are_marked(address):
    async def scenario(fabrics, recorders, mail):
        await open_all(fabrics)
        is_v6 = ":" in address
        place = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if is_v6 else (socket.IPPROTO_IP, socket.IP_TOS)
        for fabric, other in ((fabrics[0], 1), (fabrics[1], 0)):
            sockets = sockets_of(fabric, other)
            assert [sock.getsockopt(*place) >> 2 for sock in sockets] == [46, 46, 34, 18, 8]
            priorities = [sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) for sock in sockets]
            assert priorities == [6, 5, 4, 3, 2]

    run_over_tcp(2, scenario, address=address)


def test_classes_can_be_added_but_not_taken_away():
    async def scenario(fabrics, recorders, mail):
        assert await open_all(fabrics, TWO) == [None, None]
        assert await open_all(fabrics, Priorities(num_classes=3, dscp=(46, 8, 0))) == [None, None]
        assert all(fabric.peer(1 - fabric.rank).num_classes == 3 for fabric in fabrics)
        for outcome in await open_all(fabrics, FOUR):
            assert isinstance(outcome, ConfigurationError)
            assert "3 connection classes (DSCP 46 8 0)" in str(outcome)
            assert "give all models of a job the same priorities" in str(outcome)
        await gather(mail.send(0, 1, 1, bytes(MIB), connection_class=2), mail.receive(1, 0, 1, MIB))

    run_over_tcp(2, scenario)


def test_a_model_without_priorities_leaves_those_of_another_alone():
    async def scenario(fabrics, recorders, mail):
        await open_all(fabrics)
        await fabrics[0].open_classes(Priorities.off(), timeout_s=0.1)
        assert fabrics[0].peer(1).num_classes == 4

    run_over_tcp(2, scenario)


NEIGHBOURS = Topology.flat(3, rate=125e6)
UNASKED_BYTES = 200_000


async def unasked_bytes(fabrics, mail, tag):
    """Return how much of a message of 200 KB comes to a neighbour before it has posted a receive."""
    await gather(mail.send(0, 1, tag, b"."), mail.receive(1, 0, tag, 1))  # the credit is here
    late = mail.send(0, 1, tag + 1, bytes(UNASKED_BYTES))
    await gather(mail.send(0, 1, tag + 2, b"."), mail.receive(1, 0, tag + 2, 1))  # it follows on the same connection
    num_bytes = fabrics[1].statistics().unexpected_bytes
    await gather(late, mail.receive(1, 0, tag + 1, UNASKED_BYTES))
    return num_bytes


def test_neighbours_send_unasked_while_one_class_is_used_and_ask_only_while_several_are():
    async def scenario(fabrics, recorders, mail):
        assert await unasked_bytes(fabrics, mail, 10) == UNASKED_BYTES
        assert await open_all(fabrics, only_check=True) == [None] * 3
        assert [fabric.peer(1).num_classes for fabric in (fabrics[0], fabrics[2])] == [1, 1]
        assert await unasked_bytes(fabrics, mail, 20) == UNASKED_BYTES, "nothing has changed"
        for number in range(2):
            assert await open_all(fabrics) == [None] * 3
            assert await unasked_bytes(fabrics, mail, 100 * number + 30) == 0
            await asyncio.gather(*(fabric.open_classes(Priorities.off(), timeout_s=60.0) for fabric in fabrics))
            assert [fabric.peer(1).num_classes for fabric in (fabrics[0], fabrics[2])] == [4, 4], "they stay open"
            assert await unasked_bytes(fabrics, mail, 100 * number + 40) == UNASKED_BYTES

    run_over_tcp(3, scenario, topology=NEIGHBOURS)


def test_the_window_is_that_of_one_class_again(monkeypatch):
    told = []
    monkeypatch.setattr(TcpFabric, "resize_grants", lambda _, sizes: told.append(sizes))

    async def scenario(fabrics, recorders, mail):
        await open_all(fabrics)
        assert [(sizes["window"].is_fixed, sizes["quantum_bytes"]) for sizes in told] == [(False, 16 << 10)] * 2
        await asyncio.gather(*(fabric.open_classes(Priorities.off(), timeout_s=60.0) for fabric in fabrics))
        assert [(sizes["window"].is_fixed, sizes["quantum_bytes"]) for sizes in told[2:]] == [(True, 100_000)] * 2

    run_over_tcp(2, scenario, topology=Topology.flat(2, rate=20e6))


def test_classes_that_do_not_go_together_are_refused_before_either_is_open():
    async def scenario(fabrics, recorders, mail):
        assert await open_all(fabrics, only_check=True) == [None, None]
        for outcome in await open_all(fabrics, TWO, only_check=True):
            assert isinstance(outcome, ConfigurationError)
            assert "4 connection classes (DSCP 46 34 18 8)" in str(outcome)
            assert "give all models of a job the same priorities" in str(outcome)
        assert await open_all(fabrics, Priorities(num_classes=2, dscp=None)) == [None, None]
        assert [fabric.peer(1 - fabric.rank).num_classes for fabric in fabrics] == [4, 4], "those that were checked"

    run_over_tcp(2, scenario)


def test_what_waits_since_before_cuts_became_small_arrives():
    async def scenario(fabrics, recorders, mail):
        await gather(mail.send(0, 1, 99, b"."), mail.receive(1, 0, 99, 1))  # the credit is here
        payloads = {tag: bytes([tag]) * 16_000 for tag in range(80)}
        sent = [mail.send(0, 1, tag, payload) for tag, payload in payloads.items()]
        peer = fabrics[0].peer(1)
        peer.expect(replace(peer.options, chunk_bytes=4096, eager_bytes=4096))
        received = {tag: mail.receive(1, 0, tag, len(payload)) for tag, payload in payloads.items()}
        await gather(*sent, *received.values())
        assert {tag: future.result() for tag, future in received.items()} == payloads

    run_over_tcp(2, scenario, buffer_bytes=8192)


def test_after_a_failure_they_stay_closed_and_the_rest_goes_on():
    async def scenario(fabrics, recorders, mail):
        with pytest.raises(HandshakeError):
            await fabrics[0].open_classes(FOUR, timeout_s=0.1)
        with pytest.raises(HandshakeError):
            await fabrics[0].open_classes(FOUR, timeout_s=60.0)
        await gather(mail.send(0, 1, 1, bytes(MIB), connection_class=3), mail.receive(1, 0, 1, MIB))
        await gather(*(fabric.close() for fabric in fabrics), deadline_s=60.0)

    run_over_tcp(2, scenario)


def test_the_loss_of_a_peer_with_several_connections_is_told_once():
    async def scenario(fabrics, recorders, mail):
        failed_callbacks = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed_callbacks.append(context))
        await open_all(fabrics)
        for tag in range(8):
            mail.send(0, 1, tag, bytes(MIB), connection_class=tag % 4)
            mail.receive(1, 0, tag, MIB)
        for fabric in fabrics:
            fabric._mesh.acceptor.close()  # nobody is there to open them again
        for sock in sockets_of(fabrics[0], 1):
            sock.shutdown(socket.SHUT_RDWR)
        for rank in (0, 1):
            await recorders[rank].wait_until(lambda rank=rank: recorders[rank].lost)
        await gather(*(fabric.close() for fabric in fabrics), deadline_s=60.0)
        assert [sorted(recorder.lost) for recorder in recorders] == [[1], [0]]
        assert not failed_callbacks, "the recorder refuses to hear of a peer twice"

    run_over_tcp(2, scenario)


def test_nothing_is_left_of_two_hundred_fabrics_with_four_classes():
    async def cycle():
        store = DictStore()
        fabrics = await connect_all(2, store=store)
        assert await open_all(fabrics) == [None, None]
        mail = Mail(fabrics)
        await gather(mail.send(0, 1, 7, bytes(10), connection_class=3), mail.receive(1, 0, 7, 10))
        await gather(*(fabric.close() for fabric in fabrics), deadline_s=60.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def many(number):
        for _ in range(number):
            await cycle()
        loop = asyncio.get_running_loop()
        assert not loop._selector.get_map().keys() - {loop._ssock.fileno()}
        return num_descriptors()

    async def main():
        assert await many(2) == await many(200)

    loops.run(main())


class RefusingSocket:
    """A socket to which the kernel allows nothing."""

    family = socket.AF_INET6

    def __init__(self):
        self.asked = []

    def setsockopt(self, level, name, value):
        self.asked.append((level, name))
        raise PermissionError(1, "Operation not permitted")


def test_a_mark_that_is_refused_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(sockets, "_warned", set())
    options = FabricOptions(num_classes=4, dscp=FOUR.dscp)
    refusing = RefusingSocket()
    with caplog.at_level(logging.WARNING):
        for connection_class in range(-1, 4):
            mark(refusing, connection_class, options)
    assert len(refusing.asked) == 10
    assert [record.getMessage() for record in caplog.records] == [
        "the kernel refuses IPV6_TCLASS = 184 (Operation not permitted); going on without it",
        "the kernel refuses SO_PRIORITY = 6 (Operation not permitted); going on without it",
    ]


UNPRIVILEGED = """
import logging, os, socket, sys
from syncline.fabric import FabricOptions
from syncline.fabric import sockets
os.setgroups([]); os.setgid(65534); os.setuid(65534)
logging.basicConfig(format="%(message)s", stream=sys.stdout)
options = FabricOptions(num_classes=4, dscp=(46, 34, 18, 8))
for connection_class in range(-1, 4):
    with socket.socket() as one, socket.socket(socket.AF_INET6) as six:
        sockets.mark(one, connection_class, options)
        sockets.mark(six, connection_class, options)
        print(one.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) >> 2,
              six.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) >> 2,
              six.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY))
with socket.socket() as one:
    for _ in range(2):
        sockets._try_option(one, socket.SOL_SOCKET, socket.SO_PRIORITY, 7, "SO_PRIORITY")
"""


def test_a_user_without_rights_sets_every_mark_and_is_told_once_what_he_may_not():
    if os.geteuid() != 0:
        pytest.fail("this test becomes another user and needs root; it is never skipped")
    command = [sys.executable, "-c", UNPRIVILEGED]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert printed[:5] == ["46 46 6", "46 46 5", "34 34 4", "18 18 3", "8 8 2"]
    assert printed[5:] == ["the kernel refuses SO_PRIORITY = 7 (Operation not permitted); going on without it"]


def test_this_machine_has_ipv6():
    """The tests over ::1 are never skipped; this one says why they fail where they must."""
    with contextlib.closing(socket.socket(socket.AF_INET6, socket.SOCK_STREAM)) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError as error:
            pytest.fail(
                f"::1 cannot be used here ({error}); the tests over IPv6 need: sysctl net.ipv6.conf.lo.disable_ipv6=0"
            )
