"""Connections that nobody uses: when they are closed, what opens them again, and that nothing gets lost between."""

import asyncio
import random

import pytest
from fabric_scenarios import gather, num_descriptors, run_over_tcp, sockets_of, vanish

from syncline.errors import PeerLostError
from syncline.fabric import PeerLeftError
from syncline.fabric.frames import CONTROL_CLASS, FrameError, FrameType
from syncline.fabric.resting import AGREES, ASKS, IdleConnections
from syncline.priorities.settings import Priorities

IDLE = {"most_connected": 1, "idle_s": 0.2, "heartbeat_s": 0.05, "suspect_s": 20.0, "dead_s": 40.0}
"""Looked at every 50 ms."""
SETTINGS = [{}, {"num_classes": 3}, {"secret": b"s" * 32, "authenticate_frames": True}, {"shares_memory": True}]


async def exchange(mail, source, target, tag, num_bytes=5000):
    payload = random.Random(tag).randbytes(num_bytes)
    received = mail.receive(target, source, tag, num_bytes)
    await gather(mail.send(source, target, tag, payload), received)
    assert received.result() == payload


async def rest(one, other):
    for here, there in ((one, other), (other, one)):
        async with asyncio.timeout(30.0):
            await here.wait_until(lambda here=here, there=there: here.peer(there.rank).rests)


@pytest.mark.parametrize("sender", [0, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "classes", "keys", "memory"])
def test_who_has_nothing_to_say_closes_and_opens_again(in_a_ring, settings, sender):
    async def scenario(fabrics, recorders, mail):
        num_before = num_descriptors()
        for number in range(3):
            await exchange(mail, sender, 3 - sender, tag=number)
            assert all(fabrics[rank].peer(3 - rank).is_ready for rank in (0, 3))
            await rest(fabrics[0], fabrics[3])
            assert num_descriptors() == num_before
            assert 3 in fabrics[0].unconnected
            assert all(sock.fileno() < 0 for sock in sockets_of(fabrics[0], 3))
        assert not any(recorder.lost for recorder in recorders)

    run_over_tcp(6, scenario, **IDLE, **settings)


def test_both_may_wake_each_other(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        for number in range(0, 6, 2):
            await gather(exchange(mail, 0, 3, tag=number), exchange(mail, 3, 0, tag=number + 1, num_bytes=300_000))
            await rest(fabrics[0], fabrics[3])

    run_over_tcp(6, scenario, **IDLE)


@pytest.mark.parametrize("sender", [0, 3])
def test_reports_that_are_passed_on_keep_nobody_from_resting(in_a_ring, sender):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        one, other = fabrics[sender], fabrics[3 - sender]
        looked = one._idle.look

        def report_and_look(*arguments):
            one.pass_on(other.rank, b"a report")
            looked(*arguments)

        one._idle.look = report_and_look
        await rest(fabrics[0], fabrics[3])
        num_heard = len(recorders[other.rank].controls)
        await recorders[other.rank].wait_until(lambda: len(recorders[other.rank].controls) > num_heard + 2)
        assert one.peer(other.rank).rests, "they pass over others"

    run_over_tcp(6, scenario, **IDLE)


def test_neighbours_do_not_rest(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        await exchange(mail, 0, 1, tag=1)
        await rest(fabrics[0], fabrics[3])
        assert all(fabrics[rank].peer(1 - rank).is_ready for rank in (0, 1))
        fabrics[1].peer(0).send_frame(FrameType.REST, tag=ASKS)
        await exchange(mail, 1, 0, tag=2)
        assert fabrics[0].peer(1).is_ready

    run_over_tcp(6, scenario, **IDLE)


@pytest.mark.parametrize("waiting", [0, 3])
def test_who_waits_for_a_message_does_not_rest(in_a_ring, waiting):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        for other in (2, 4):  # which say that it was long enough
            await exchange(mail, 0, other, tag=1)
        received = mail.receive(waiting, 3 - waiting, 2, 70_000)
        for other in (2, 4):
            await rest(fabrics[0], fabrics[other])
        assert all(fabrics[rank].peer(3 - rank).is_ready for rank in (0, 3))
        await gather(mail.send(3 - waiting, waiting, 2, bytes(70_000)), received)
        await rest(fabrics[0], fabrics[3])

    run_over_tcp(6, scenario, **IDLE)


def test_what_is_posted_while_they_rest_lands_after(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        await rest(fabrics[0], fabrics[3])
        received = mail.receive(0, 3, 2, 70_000)
        await gather(mail.send(3, 0, 2, bytes(70_000)), received)

    run_over_tcp(6, scenario, **IDLE)


@pytest.mark.parametrize("sender", [0, 3])
def test_what_a_call_under_way_sends_wakes_too(in_a_ring, sender):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        await rest(fabrics[0], fabrics[3])
        received = mail.receive(3 - sender, sender, 2, 70_000)
        settings = {"signature": 7, "urgency": 0, "connection_class": 0}
        fabrics[sender].peer(3 - sender).transport.send(2, memoryview(bytes(70_000)), **settings)
        await gather(received)

    run_over_tcp(6, scenario, **IDLE)


def test_what_the_peer_is_not_known_to_have_keeps_connections_open(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        peers = [fabrics[rank].peer(3 - rank) for rank in (0, 3)]
        assert not peers[0].is_idle, "its message is with the kernel, for all that it knows"
        peers[1].send_frame(FrameType.HEARTBEAT)  # with which goes what has arrived
        fabrics[3].send_control(0, b"behind that")
        await recorders[0].wait_until(lambda: recorders[0].controls)
        assert peers[0].is_idle

    run_over_tcp(6, scenario, most_connected=1, heartbeat_s=500.0, suspect_s=600.0, dead_s=1000.0)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_gets_lost_however_often_they_rest(in_a_ring, monkeypatch, seed):
    """They are asked as often as is looked, and agree at once, so that it comes at any moment."""
    monkeypatch.setattr(IdleConnections, "_idle_for_s", lambda self, peer, now_s: 1e9)
    generator = random.Random(seed)

    async def scenario(fabrics, recorders, mail):
        num_rests, kept = 0, []
        for tag in range(150):
            source, target = generator.sample((0, 2, 4), 2)
            payload = generator.randbytes(generator.choice([0, 1, 3000, 90_000]))
            is_send_first = generator.random() < 0.5
            if is_send_first:
                mail.send(source, target, tag, payload, connection_class=tag % 2)
            kept.append((payload, mail.receive(target, source, tag, len(payload))))
            if not is_send_first:
                mail.send(source, target, tag, payload, connection_class=tag % 2)
            for fabric in fabrics:
                for peer in fabric.living():
                    peer.send_frame(FrameType.HEARTBEAT)  # with which goes what has arrived
                fabric._idle._looked_s = float("-inf")
                fabric._idle.look(asyncio.get_running_loop().time(), fabric.living())
                num_rests += len(fabric._idle._resting)
            if generator.random() < 0.4:
                await gather(*(future for _, future in kept))
            for _ in range(generator.choice((0, 1, 5, 40))):
                await asyncio.sleep(0)
        await gather(*(future for _, future in kept))
        assert all(future.result() == payload for payload, future in kept)
        assert num_rests > 10
        assert not any(recorder.lost for recorder in recorders)

    run_over_tcp(6, scenario, num_classes=2, most_connected=1, heartbeat_s=0.05, suspect_s=20.0, dead_s=40.0)


@pytest.mark.parametrize(("sender", "victim"), [(0, 3), (3, 0)])
def test_of_the_death_of_who_rests_neighbours_tell_and_who_wakes_it_finds_it_out(in_a_ring, sender, victim):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        await rest(fabrics[0], fabrics[3])
        vanish(fabrics[victim])
        await recorders[sender].wait_until(lambda: victim in recorders[sender].lost)
        assert type(recorders[sender].lost[victim]) is PeerLostError
        assert list(recorders[sender].lost) == [victim]

    run_over_tcp(6, scenario, **IDLE)


@pytest.mark.parametrize(("sender", "victim"), [(0, 3), (3, 0)])
def test_who_wakes_a_rank_that_has_ended_finds_that_out(in_a_ring, sender, victim):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        await rest(fabrics[0], fabrics[3])
        for watcher in ((victim - 1) % 6, (victim + 1) % 6):
            fabrics[watcher].living = list  # nobody tells of it
        vanish(fabrics[victim])
        mail.send(sender, victim, 2, b"hello")
        await recorders[sender].wait_until(lambda: victim in recorders[sender].lost)
        ends = ("nobody listens there any more", "closed for want of use, and cannot be opened again")
        assert ends[sender > victim] in str(recorders[sender].lost[victim])

    run_over_tcp(6, scenario, **IDLE)


def test_who_rests_hears_who_leaves(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        await rest(fabrics[0], fabrics[3])
        await gather(fabrics[3].close())
        await recorders[0].wait_until(lambda: 3 in recorders[0].lost)
        assert type(recorders[0].lost[3]) is PeerLeftError
        await gather(*(fabric.close() for fabric in fabrics))

    run_over_tcp(6, scenario, **IDLE)


def test_further_classes_are_opened_to_who_rests_too(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        await rest(fabrics[0], fabrics[3])
        await gather(*(fabric.open_classes(Priorities(num_classes=2), timeout_s=60.0) for fabric in fabrics))
        assert fabrics[0].peer(3).num_classes == fabrics[3].peer(0).num_classes == 2
        await rest(fabrics[0], fabrics[3])
        await exchange(mail, 3, 0, tag=2)

    run_over_tcp(6, scenario, **IDLE)


def test_further_classes_do_not_wait_for_who_rested_and_is_lost(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        await rest(fabrics[0], fabrics[3])
        vanish(fabrics[3])
        await recorders[0].wait_until(lambda: 3 in recorders[0].lost)
        await gather(fabrics[0]._mesh._settle(300.0), deadline_s=30.0)

    run_over_tcp(6, scenario, **IDLE)


def test_a_connection_that_breaks_while_others_are_still_opened_goes_on(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        await exchange(mail, 0, 3, tag=1)
        await rest(fabrics[0], fabrics[3])
        peer, resume, broken = fabrics[3].peer(0), fabrics[3].peer(0).transport.resume, []

        def resume_and_break(connection_class, sock, position):
            num_bytes = resume(connection_class, sock, position)
            if connection_class == CONTROL_CLASS and not broken:
                broken.append(True)
                peer.on_suspended(connection_class, EOFError()) if peer.transport.suspend(connection_class) else None
            return num_bytes

        peer.transport.resume = resume_and_break
        await exchange(mail, 3, 0, tag=2)
        assert broken

    run_over_tcp(6, scenario, **IDLE)


def test_few_ranks_keep_theirs_and_refuse_to_let_them_rest():
    async def scenario(fabrics, recorders, mail):
        fabrics[1].peer(0).send_frame(FrameType.REST)
        await recorders[0].wait_until(lambda: 1 in recorders[0].lost)
        assert "it lets connections rest, and all ranks are connected" in str(recorders[0].lost[1])

    run_over_tcp(2, scenario)


class OnePeer:
    """A peer of rank ``rank`` to who decides; what is sent to it is kept."""

    def __init__(self, rank):
        self.rank, self.num_exchanged = rank, 1
        self.is_idle = self.is_drained = True
        self.frames = []

    def send_frame(self, kind, *, tag):
        assert kind is FrameType.REST
        self.frames.append(tag)


class OneFabric:
    """A fabric of rank 1 that notes whose connections rest."""

    rank, may_rest = 1, True

    def __init__(self):
        self.rested, self.woken = [], []
        self.let_rest, self.wake = self.rested.append, self.woken.append


@pytest.fixture
def idle():
    """Return who decides, and its fabric."""
    fabric = OneFabric()
    return IdleConnections(fabric, idle_s=8.0), fabric


def test_the_higher_asks_when_it_was_long_enough_and_closes_if_nothing_came_between(idle):
    connections, fabric = idle
    peer, higher = OnePeer(0), OnePeer(2)
    for now_s in (0.0, 4.0, 7.9):
        connections.look(now_s, [peer, higher])
    assert not peer.frames
    connections.look(10.0, [peer, higher])
    assert (peer.frames, higher.frames) == ([ASKS], [])
    peer.num_exchanged += 1
    connections.on_frame(peer, AGREES, 10.1)
    assert not fabric.rested, "it has sent something since"
    connections.look(12.2, [peer])
    connections.look(20.3, [peer])
    assert peer.frames == [ASKS, ASKS]
    connections.on_frame(peer, AGREES, 20.4)
    assert fabric.rested == [peer]
    connections.on_frame(peer, AGREES, 20.5)
    assert fabric.rested == [peer], "it has not asked again"


@pytest.mark.parametrize("what", ["is_idle", "may_rest"])
def test_nobody_asks_agrees_or_closes_who_has_something_to_do(idle, what):
    connections, fabric = idle
    lower, higher = OnePeer(0), OnePeer(2)
    connections.look(0.0, [lower, higher])
    for each in (lower, higher, fabric):
        setattr(each, what, False)
    connections.look(20.0, [lower, higher])
    connections.on_frame(higher, ASKS, 20.0)
    assert lower.frames == higher.frames == []
    connections._asked[0] = lower.num_exchanged
    connections.on_frame(lower, AGREES, 20.0)
    assert not fabric.rested
    connections._agreed[2] = higher.num_exchanged
    assert not connections.has_agreed(higher)


def test_the_lower_agrees_if_it_was_long_enough_here_too_and_closes_once(idle):
    connections, fabric = idle
    peer = OnePeer(2)
    connections.look(0.0, [peer])
    connections.on_frame(peer, ASKS, 3.9)
    assert not peer.frames
    connections.on_frame(peer, ASKS, 4.1)
    assert peer.frames == [AGREES]
    assert connections.has_agreed(peer)
    assert not connections.has_agreed(peer), "the next end is not what it agreed to"
    connections.on_frame(peer, ASKS, 5.0)
    peer.num_exchanged += 1
    assert not connections.has_agreed(peer)
    assert not fabric.rested, "that is for who hears of the end"


def test_who_rests_and_has_something_to_send_is_woken_at_each_look(idle):
    connections, fabric = idle
    quiet, busy = OnePeer(0), OnePeer(2)
    for peer in (quiet, busy):
        connections.begin(peer)
    busy.is_drained = False
    connections.look(0.0, [])
    connections.look(0.1, [])
    assert fabric.woken == [busy, busy]
    connections.end(busy)
    connections.look(0.2, [])
    assert len(fabric.woken) == 2


def test_who_has_just_woken_is_not_asked_again_at_once(idle):
    connections, fabric = idle
    peer, higher = OnePeer(0), OnePeer(2)
    connections.look(0.0, [peer, higher])
    connections.look(9.0, [peer, higher])
    connections.on_frame(higher, ASKS, 9.0)
    assert peer.frames == [ASKS]
    for each in (peer, higher):
        connections.begin(each)
        connections.end(each)
    connections.look(30.0, [peer, higher])
    connections.on_frame(higher, ASKS, 30.1)
    connections.on_frame(peer, AGREES, 30.1)
    assert peer.frames == [ASKS]
    assert higher.frames == [AGREES]
    assert not fabric.rested
    assert not connections.has_agreed(higher)


@pytest.mark.parametrize(("rank", "tag"), [(0, ASKS), (2, AGREES), (0, 7), (2, 7)])
def test_what_is_not_its_to_ask_or_to_agree_to_is_refused(idle, rank, tag):
    with pytest.raises(FrameError, match="not its to close"):
        idle[0].on_frame(OnePeer(rank), tag, 0.0)
