"""Ranks that are not all connected: who meets whom and when, what everybody hears, and what a loss or a cut does."""

import asyncio
import random
from functools import partial

import pytest
from fabric_scenarios import connect_all, gather, run_over_tcp, vanish

from syncline.errors import PeerLostError
from syncline.fabric import FabricOptions, PeerLeftError, gossip
from syncline.fabric.frames import FrameType
from syncline.priorities.settings import Priorities

SPARSE = {"most_connected": 1}


def connected(fabric):
    return sorted(peer.rank for peer in fabric.living())


@pytest.mark.parametrize("world_size", [6, 17, 33])
def test_a_start_connects_neighbours_alone(world_size):
    async def scenario(fabrics, recorders, mail):
        for rank, fabric in enumerate(fabrics):
            assert connected(fabric) == sorted(gossip.neighbours(rank, world_size))
            assert fabric.unconnected == set(range(world_size)) - {rank, *connected(fabric)}

    run_over_tcp(world_size, scenario, **SPARSE)


def test_few_ranks_are_all_connected():
    async def scenario(fabrics, recorders, mail):
        assert [connected(fabric) for fabric in fabrics] == [[b for b in range(6) if b != a] for a in range(6)]

    run_over_tcp(6, scenario, most_connected=6)


@pytest.mark.parametrize("sender", [0, 3])
def test_what_is_sent_opens_the_connection_and_comes_in_order(in_a_ring, sender):
    async def scenario(fabrics, recorders, mail):
        receiver = 3 - sender
        payloads = [bytes([number]) * (1 + 50_000 * (number % 3)) for number in range(9)]
        received = [mail.receive(receiver, sender, tag, len(each)) for tag, each in enumerate(payloads)]
        sent = [mail.send(sender, receiver, tag, each) for tag, each in enumerate(payloads)]
        for number in range(5):
            fabrics[sender].send_control(receiver, b"%d" % number)
        await gather(*sent, *received)
        assert [each.result() for each in received] == payloads
        await recorders[receiver].wait_until(lambda: len(recorders[receiver].controls) == 5)
        assert recorders[receiver].controls == [(sender, b"%d" % number) for number in range(5)]
        assert connected(fabrics[sender]) == sorted({(sender + 1) % 6, (sender - 1) % 6, receiver})
        assert sender in connected(fabrics[receiver])
        assert fabrics[receiver].statistics().refused_connections == 0

    run_over_tcp(6, scenario, **SPARSE)


def test_both_may_send_first(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        pairs = [(a, b) for a in range(7) for b in range(7) if a != b]
        random.Random(7).shuffle(pairs)
        received = [mail.receive(b, a, 5, 3) for a, b in pairs]
        sent = [mail.send(a, b, 5, b"%d %d" % (a, b)) for a, b in pairs]
        await gather(*sent, *received)
        assert [each.result() for each in received] == [b"%d %d" % pair for pair in pairs]
        assert all(len(connected(fabric)) == 6 and not fabric.unconnected for fabric in fabrics)

    run_over_tcp(7, scenario, **SPARSE)


@pytest.mark.parametrize("settings", [{}, {"num_classes": 3}, {"secret": b"s" * 32, "authenticate_frames": True}])
def test_several_classes_and_keys_are_met_as_well(in_a_ring, settings):
    async def scenario(fabrics, recorders, mail):
        received = [mail.receive(4, 1, tag, 90_000) for tag in range(3)]
        sent = [mail.send(1, 4, tag, bytes(90_000), connection_class=tag) for tag in range(3)]
        await gather(*sent, *received)

    run_over_tcp(6, scenario, **SPARSE, **settings)


def test_who_waits_for_connections_goes_on_when_they_are_there(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        came = asyncio.get_running_loop().create_future()
        fabrics[0].when_connected([1, 2, 3], lambda: came.set_result(connected(fabrics[0])))
        await gather(came)
        assert came.result() == [1, 2, 3, 5]
        at_once = []
        fabrics[0].when_connected([1, 2], lambda: at_once.append(True))
        assert at_once

    run_over_tcp(6, scenario, **SPARSE)


def test_what_one_tells_all_get_in_its_order_without_a_connection(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        others = [[b for b in range(9) if b != a] for a in range(9)]
        for number in range(20):
            for rank, fabric in enumerate(fabrics):
                fabric.tell(others[rank], b"%d" % number)
        for rank, recorder in enumerate(recorders):
            await recorder.wait_until(lambda told=recorder: len(told.controls) == 160)
            for other in others[rank]:
                told = [payload for teller, payload in recorder.controls if teller == other]
                assert told == [b"%d" % number for number in range(20)]
        assert all(len(connected(fabric)) == 2 for fabric in fabrics)

    run_over_tcp(9, scenario, **SPARSE)


def test_what_is_for_some_the_others_only_pass_on(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        fabrics[0].tell([1, 4], b"some")
        fabrics[0].tell([1, 2, 3, 4, 5, 6, 7], b"all")
        for rank in range(1, 8):
            await recorders[rank].wait_until(lambda rank=rank: (0, b"all") in recorders[rank].controls)
            assert ((0, b"some") in recorders[rank].controls) == (rank in (1, 4))

    run_over_tcp(8, scenario, **SPARSE)


def test_a_message_is_passed_on_without_a_connection():
    async def scenario(fabrics, recorders, mail):
        for rank in range(1, 40):
            fabrics[rank].pass_on(0, b"%d" % rank)
        await recorders[0].wait_until(lambda: len(recorders[0].controls) == 39)
        assert sorted(recorders[0].controls) == [(rank, b"%d" % rank) for rank in range(1, 40)]
        assert {len(connected(fabric)) for fabric in fabrics} == {len(gossip.distances(40))}

    run_over_tcp(40, scenario, **SPARSE)


def test_what_was_told_before_a_connection_is_heard_before_what_comes_on_it(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        everyone = range(1, 60)
        fabrics[0].send_control(30, b"a connection, please")
        await fabrics[30].wait_until(lambda: 0 in connected(fabrics[30]))
        fabrics[0].peer(30).is_ready = False  # as if it were not there yet
        fabrics[0].tell(everyone, b"first")
        fabrics[0].peer(30).is_ready = True
        fabrics[0].on_ready(fabrics[0].peer(30))
        fabrics[0].tell(everyone, b"second")
        await recorders[30].wait_until(lambda: len(recorders[30].controls) == 3)
        assert [payload for _, payload in recorders[30].controls] == [b"a connection, please", b"first", b"second"]

    run_over_tcp(60, scenario, **SPARSE)


def test_all_hear_who_aborts_and_why(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        fabrics[4].abort("it had enough")
        for rank in (0, 1, 2, 3, 5, 6, 7):
            await recorders[rank].wait_until(lambda rank=rank: 4 in recorders[rank].lost)
            error = recorders[rank].lost[4]
            assert type(error) is PeerLostError
            assert "it had enough" in str(error)
            assert error.rank == 4
            assert list(recorders[rank].lost) == [4]

    run_over_tcp(8, scenario, **SPARSE)


def test_what_is_believed_later_is_told_with_its_reason():
    """Rank 2 has lost 0 and 3: as 0 lives, its word of 3 counts once 0 is lost."""

    async def scenario(fabrics, recorders, mail):
        one = fabrics[1]
        one.on_news(one.peer(2), 0, "sent nothing")
        one.on_news(one.peer(2), 3, "is lost: it had enough")
        assert not recorders[1].lost
        fabrics[0].abort("it ended")
        await recorders[1].wait_until(lambda: 3 in recorders[1].lost)
        assert "is lost: it had enough (as rank 2" in str(recorders[1].lost[3])

    run_over_tcp(4, scenario)


def test_all_hear_who_leaves_and_nobody_takes_it_for_lost(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        fabrics[0].tell([1, 2, 3, 4, 5], b"goodbye")
        await fabrics[0].close()
        for rank in range(1, 6):
            await recorders[rank].wait_until(lambda rank=rank: 0 in recorders[rank].lost)
            assert isinstance(recorders[rank].lost[0], PeerLeftError)
            assert recorders[rank].controls == [(0, b"goodbye")]

    run_over_tcp(6, scenario, **SPARSE)


def note_frame(fabric, send_frame, behind_the_end, kind, **fields):
    if fabric._overlay._has_left:
        behind_the_end.add(kind)
    send_frame(kind, **fields)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_leave_one_after_another_take_nobody_for_lost(seed):
    async def scenario(fabrics, recorders, mail):
        generator = random.Random(seed)
        leaving, behind_the_end = [], set()
        for rank in generator.sample(range(24), 23):
            fabrics[rank].tell([other for other in range(24) if other != rank], bytes(3000))
            for peer in fabrics[rank].living():
                peer.send_frame = partial(note_frame, fabrics[rank], peer.send_frame, behind_the_end)
            leaving.append(asyncio.ensure_future(fabrics[rank].close()))
            for _ in range(generator.randrange(4)):
                await asyncio.sleep(0)
        await gather(*leaving)
        (last,) = (recorder for fabric, recorder in zip(fabrics, recorders, strict=True) if not fabric._is_closed)
        for recorder in recorders:
            assert {type(error) for error in recorder.lost.values()} <= {PeerLeftError}
        assert len(last.lost) >= len(gossip.distances(24)), "those to whom it was connected"
        may_be_reset = {FrameType.FAREWELL, FrameType.HEARTBEAT}
        assert behind_the_end <= may_be_reset, "who has read the END may close, and resets what comes then"

    run_over_tcp(24, scenario, **SPARSE)


@pytest.mark.parametrize("victim", [0, 3, 7])
def test_a_rank_that_is_lost_to_those_above_it_alone_is_lost_for_all(in_a_ring, victim):
    async def scenario(fabrics, recorders, mail):
        vanish(fabrics[victim])
        for rank in set(range(8)) - {victim}:
            await recorders[rank].wait_until(lambda rank=rank: victim in recorders[rank].lost)
            assert list(recorders[rank].lost) == [victim], "nobody else"

    run_over_tcp(8, scenario, **SPARSE)


def test_ranks_take_others_as_neighbours_in_place_of_the_lost(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        for victim in (1, 2, 3):
            vanish(fabrics[victim])
        left = (0, 4, 5, 6, 7)
        for rank in left:
            await recorders[rank].wait_until(lambda rank=rank: {1, 2, 3} <= recorders[rank].lost.keys())
        async with asyncio.timeout(20):
            while not (4 in connected(fabrics[0]) and 0 in connected(fabrics[4])):
                await fabrics[0].wait_until(lambda: 4 in connected(fabrics[0]))
                await fabrics[4].wait_until(lambda: 0 in connected(fabrics[4]))
        vanish(fabrics[6])  # now the one way left from 5 to 7 leads through 4 and 0
        for rank in (0, 4, 5, 7):
            await recorders[rank].wait_until(lambda rank=rank: 6 in recorders[rank].lost)
        fabrics[5].tell([rank for rank in range(8) if rank != 5], b"still here")
        await recorders[7].wait_until(lambda: (5, b"still here") in recorders[7].controls)
        assert all(recorders[rank].lost.keys() == {1, 2, 3, 6} for rank in (0, 4, 5, 7))

    run_over_tcp(8, scenario, heartbeat_s=0.05, suspect_s=2.0, dead_s=10.0, **SPARSE)


def test_a_rank_that_leaves_is_replaced_when_others_stay(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        await fabrics[1].close()
        await recorders[0].wait_until(lambda: 1 in recorders[0].lost)
        now_s = asyncio.get_running_loop().time()
        for later_s in (0.0, 900.0):
            fabrics[0]._overlay.look(now_s + later_s)
            assert not fabrics[0].peer(2).is_neighbour, "the others may be about to leave too"
        fabrics[0]._overlay.look(now_s + 1000.0)
        await fabrics[0].wait_until(lambda: connected(fabrics[0]) == [2, 5])
        fabrics[0].send_control(2, b"behind that")
        await recorders[2].wait_until(lambda: recorders[2].controls)
        assert fabrics[2].peer(0).is_neighbour
        assert type(recorders[0].lost[1]) is PeerLeftError
        assert list(recorders[0].lost) == [1]

    run_over_tcp(6, scenario, heartbeat_s=500.0, suspect_s=600.0, dead_s=1000.0, **SPARSE)


@pytest.mark.parametrize(("sender", "victim"), [(0, 3), (3, 0)])
def test_who_sends_to_a_rank_that_has_ended_finds_that_out(in_a_ring, sender, victim):
    async def scenario(fabrics, recorders, mail):
        for watcher in ((victim - 1) % 6, (victim + 1) % 6):
            fabrics[watcher].living = list  # nobody tells of it
        vanish(fabrics[victim])
        fabrics[sender].send_control(victim, b"hello")
        await recorders[sender].wait_until(lambda: victim in recorders[sender].lost)
        assert "its process has ended" in str(recorders[sender].lost[victim])

    run_over_tcp(6, scenario, **SPARSE)


def test_who_dies_while_it_is_being_met_holds_nobody_up(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        peer = fabrics[0].peer(3)
        attach, held = peer.attach, []
        peer.attach = lambda *connection: held.append(connection) if connection[0] >= 0 else attach(*connection)
        fabrics[3].send_control(0, b"hello")
        await fabrics[3].wait_until(lambda: 0 in connected(fabrics[3]))
        assert peer.is_half_open
        vanish(fabrics[3])
        await recorders[0].wait_until(lambda: 3 in recorders[0].lost)
        assert not peer.is_half_open
        held[0][1].close()

    run_over_tcp(6, scenario, **SPARSE)


@pytest.mark.parametrize("is_met_first", [True, False])
def test_further_classes_are_opened_to_whom_there_is_a_connection_now_or_later(in_a_ring, is_met_first):
    async def scenario(fabrics, recorders, mail):
        async def exchange(tag):
            received = [mail.receive(3, 0, tag + each, 70_000) for each in range(4)]
            sent = [mail.send(0, 3, tag + each, bytes(70_000), connection_class=each) for each in range(4)]
            await gather(*sent, *received)

        if is_met_first:
            await exchange(100)
        priorities = Priorities(num_classes=4)
        await gather(*(fabric.open_classes(priorities, timeout_s=60.0) for fabric in fabrics))
        await exchange(200)
        classes = {each.connection_class for each in fabrics[0].statistics().connections if each.peer == 3}
        assert classes == {-1, 0, 1, 2, 3}

    run_over_tcp(6, scenario, **SPARSE)


def open_two_classes(fabric):
    return asyncio.ensure_future(fabric.open_classes(Priorities(num_classes=2), timeout_s=60.0))


def test_who_has_more_classes_already_is_met_when_both_have(in_a_ring):
    async def scenario(fabrics, recorders, mail):
        opening = [open_two_classes(fabric) for fabric in fabrics[1:]]
        await opening[2]  # that of rank 3, which waits for ranks 2 and 4 alone
        refused = asyncio.Event()
        fabrics[0]._mesh.acceptor._complain = lambda _: refused.set()
        received, sent = mail.receive(3, 0, 1, 5), mail.send(0, 3, 1, b"early")
        await gather(refused.wait())
        opening.append(open_two_classes(fabrics[0]))
        await gather(*opening, sent, received)
        assert fabrics[0].peer(3).num_classes == fabrics[3].peer(0).num_classes == 2

    run_over_tcp(6, scenario, **SPARSE)


@pytest.mark.parametrize("first_held", [-1, 0])
def test_classes_are_opened_when_both_see_who_is_being_met(in_a_ring, first_held):
    async def scenario(fabrics, recorders, mail):
        peer = fabrics[0].peer(3)
        attach, held = peer.attach, []
        peer.attach = lambda *connection: (
            held.append(connection) if connection[0] >= first_held else attach(*connection)
        )
        sent = mail.send(3, 0, 1, b"early")
        await fabrics[3].wait_until(lambda: 0 in connected(fabrics[3]))
        opening = [open_two_classes(fabric) for fabric in fabrics[1:]]
        if first_held == 0:  # of the two connections one is there
            opening.append(open_two_classes(fabrics[0]))
        for _ in range(50):  # what can be done until then is done
            await asyncio.sleep(0)
        peer.attach = attach
        for connection in held:
            attach(*connection)
        if first_held < 0:
            opening.append(open_two_classes(fabrics[0]))
        await gather(*opening, sent, mail.receive(0, 3, 1, 5))
        assert peer.num_classes == fabrics[3].peer(0).num_classes == 2

    run_over_tcp(6, scenario, **SPARSE)


def test_a_rank_that_cannot_be_dialled_has_all_connections_from_the_start():
    async def main():
        unreachable = {2: {"advertised": ("", 0)}}
        fabrics = await connect_all(6, FabricOptions(**SPARSE), of_ranks=unreachable)
        assert all(len(connected(fabric)) == 5 for fabric in fabrics)
        for fabric in fabrics:
            fabric.abort()

    asyncio.run(main())
