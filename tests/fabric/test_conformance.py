"""What every fabric promises; the suite runs on each of them."""

import asyncio
import random

import pytest
from fabric_scenarios import gather

from syncline.errors import FabricClosedError, PeerLostError
from syncline.fabric import MAX_CONTROL_BYTES, PeerLeftError

SIZES = [0, 1, 5, 16384, 16385, 300_000, 2_000_003]


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("is_receive_first", [True, False])
def test_a_message_lands_in_its_destination(on_fabrics, num_bytes, is_receive_first):
    async def scenario(fabrics, recorders, mail):
        payload = random.Random(num_bytes).randbytes(num_bytes)
        if is_receive_first:
            received = mail.receive(1, 0, 99, num_bytes)
        sent = mail.send(0, 1, 99, payload)
        if not is_receive_first:
            await gather(*[mail.receive(0, 1, 5, 1), mail.send(1, 0, 5, b"x")])  # time for the message to arrive early
            received = mail.receive(1, 0, 99, num_bytes)
        await gather(sent, received)
        assert received.result() == payload
        assert fabrics[1].statistics().pending_receives == 0
        assert fabrics[1].statistics().unexpected_bytes == 0

    on_fabrics(2, scenario)


def test_many_messages_between_all_ranks_at_once(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        generator = random.Random(3)
        pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
        posts = [
            (a, b, tag, generator.randbytes(generator.choice([0, 10, 20_000, 700_000])))
            for a, b in pairs
            for tag in range(8)
        ]
        orders = [*((True, *post) for post in posts), *((False, *post) for post in posts)]
        generator.shuffle(orders)
        sent, received = [], {}
        for is_send, a, b, tag, payload in orders:
            if is_send:
                sent.append(mail.send(a, b, tag, payload, urgency=generator.randrange(4)))
            else:
                received[a, b, tag] = mail.receive(b, a, tag, len(payload))
        await gather(*sent, *received.values())
        for a, b, tag, payload in posts:
            assert received[a, b, tag].result() == payload
        total = sum(len(payload) for *_, payload in posts)
        assert sum(fabric.statistics().sent_bytes for fabric in fabrics) == total
        assert sum(fabric.statistics().received_bytes for fabric in fabrics) == total

    on_fabrics(3, scenario)


def test_control_messages_arrive_in_order(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        texts = [b"%d" % number for number in range(100)] + [b"x" * MAX_CONTROL_BYTES, b""]
        for text in texts:
            fabrics[0].send_control(1, text)
        await recorders[1].wait_until(lambda: len(recorders[1].controls) == len(texts))
        assert recorders[1].controls == [(0, text) for text in texts]
        assert recorders[0].controls == []

    on_fabrics(2, scenario)


@pytest.mark.parametrize("num_bytes", [100, 400_000])
@pytest.mark.parametrize("is_receive_first", [True, False])
@pytest.mark.parametrize("differs", ["signature", "size"])
def test_another_signature_or_size_is_told_and_not_written(on_fabrics, num_bytes, is_receive_first, differs):
    async def scenario(fabrics, recorders, mail):
        expected_bytes = num_bytes + (differs == "size")
        expected = 2 if differs == "signature" else 1
        if is_receive_first:
            received = mail.receive(1, 0, 4, expected_bytes, signature=expected)
        mail.send(0, 1, 4, b"a" * num_bytes, signature=1)
        if not is_receive_first:
            await gather(mail.send(0, 1, 5, b"x", urgency=1), mail.receive(1, 0, 5, 1))
            received = mail.receive(1, 0, 4, expected_bytes, signature=expected)
        assert await gather(mail.refused.get()) == [(1, 0, 4, 1)]
        await gather(mail.send(0, 1, 6, b"the rest goes on"), mail.receive(1, 0, 6, 16))
        assert not received.done()
        assert mail.refused.empty(), "it is told once, and to nobody else"

    on_fabrics(2, scenario)


@pytest.mark.parametrize("num_bytes", [100, 400_000])
def test_a_cancelled_receive_is_not_written(on_fabrics, num_bytes):
    async def scenario(fabrics, recorders, mail):
        received = mail.receive(1, 0, 4, num_bytes)
        fabrics[1].cancel(0, 4)
        mail.send(0, 1, 4, b"a" * num_bytes)
        await gather(mail.send(0, 1, 6, b"x"), mail.receive(1, 0, 6, 1))
        assert not received.done()
        assert fabrics[1].statistics().pending_receives == 0
        fabrics[1].cancel(0, 4)  # once more does nothing

    on_fabrics(2, scenario)


def test_a_message_that_no_one_receives_does_not_stop_others(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        late = b"z" * 3_000_000
        for tag in range(8):
            mail.send(0, 1, tag, late)
        for tag in range(100, 140):
            mail.send(0, 1, tag, b"y" * 16_000)
        payload = bytes(range(256)) * 4000
        await gather(mail.send(0, 1, 8, payload, urgency=-1), receiver := mail.receive(1, 0, 8, len(payload)))
        assert receiver.result() == payload
        assert fabrics[1].statistics().unexpected_bytes <= 40 * 16_000
        results = await gather(*(mail.receive(1, 0, tag, len(late)) for tag in range(8)))
        assert all(result == late for result in results)

    on_fabrics(2, scenario)


def test_what_comes_in_dropped_streams_is_thrown_away_and_counted(on_fabrics):
    sizes = [0, 100, 400_000]

    def tag(stream, number):
        return stream << 48 | number

    async def scenario(fabrics, recorders, mail):
        fabrics[1].drop_streams(range(7, 8))
        pieces = [(stream, number, size) for stream in (5, 6, 7) for number, size in enumerate(sizes * 7)]
        sent = [mail.send(0, 1, tag(stream, number), bytes(size)) for stream, number, size in pieces]
        kept = mail.send(0, 1, tag(9, 0), b"kept")
        await gather(mail.receive(1, 0, tag(8, 0), 1), mail.send(0, 1, tag(8, 0), b"x", urgency=9))  # time to arrive
        fabrics[1].drop_streams(range(5, 7))
        await gather(*sent)  # nothing stays with the sender
        received = mail.receive(1, 0, tag(9, 0), 4)
        await gather(kept, received)
        assert received.result() == b"kept"
        assert fabrics[1].statistics().dropped_messages == len(pieces)
        assert fabrics[1].statistics().unexpected_bytes == 0
        for number in range(100):  # what was held has given its credit back
            await gather(mail.receive(1, 0, tag(8, number), 9000), mail.send(0, 1, tag(8, number), bytes(9000)))
        assert not recorders[1].lost

    on_fabrics(2, scenario)


def test_streams_of_a_rank_that_is_gone_can_be_dropped(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        await gather(mail.send(0, 1, 5 << 48, b"early"), mail.send(0, 1, 6 << 48, b"kept"))
        await fabrics[0].close()
        await recorders[1].wait_until(lambda: recorders[1].lost)
        fabrics[1].drop_streams(range(5, 6))
        assert fabrics[1].statistics().unexpected_bytes == len(b"kept")
        assert fabrics[1].statistics().dropped_messages == 1
        assert await gather(mail.receive(1, 0, 6 << 48, 4)) == [b"kept"]

    on_fabrics(2, scenario)


def test_an_aborted_rank_is_lost_to_all_others(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        received = mail.receive(0, 1, 1, 1_000_000)
        fabrics[1].abort()
        for rank in (0, 2):
            await recorders[rank].wait_until(lambda rank=rank: recorders[rank].lost)
            error = recorders[rank].lost[1]
            assert isinstance(error, PeerLostError)
            assert not isinstance(error, PeerLeftError)
            assert error.rank == 1
            assert fabrics[rank].is_lost(1)
            assert fabrics[rank].statistics().lost_peers == (1,)
            assert fabrics[rank].describe_peer(1) in str(error)
        assert not received.done()
        mail.send(0, 1, 9, b"dropped")
        fabrics[0].send_control(1, b"dropped")
        payload = bytes(100_000)
        await gather(mail.send(0, 2, 1, payload), mail.receive(2, 0, 1, len(payload)))
        assert not recorders[1].lost

    on_fabrics(3, scenario)


def test_close_delivers_what_was_sent_and_says_that_the_rank_left(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        big = bytes(range(256)) * 2000
        received = mail.receive(1, 0, 1, len(big))
        mail.send(0, 1, 1, big)
        mail.send(0, 1, 2, b"early")
        fabrics[0].send_control(1, b"last words")
        await asyncio.wait_for(fabrics[0].close(), 60)
        await recorders[1].wait_until(lambda: recorders[1].lost)
        assert isinstance(recorders[1].lost[0], PeerLeftError)
        assert recorders[1].controls == [(0, b"last words")]
        (early,) = await gather(mail.receive(1, 0, 2, 5))
        assert early == b"early"
        assert (await received) == big

    on_fabrics(2, scenario)


def test_closing_on_all_ranks_at_once(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        await gather(*(fabric.close() for fabric in fabrics), deadline_s=5)
        await gather(*(fabric.close() for fabric in fabrics), deadline_s=5)  # once more does nothing
        for fabric in fabrics:
            fabric.abort()
            with pytest.raises(FabricClosedError):
                fabric.send_control((fabric.rank + 1) % 3, b"")
            with pytest.raises(FabricClosedError):
                fabric.send((fabric.rank + 1) % 3, 1, memoryview(b""), signature=0, urgency=0, connection_class=0)
            with pytest.raises(FabricClosedError):
                fabric.receive(
                    (fabric.rank + 1) % 3, 1, memoryview(bytearray()), signature=0, urgency=0, on_received=lambda: None
                )

    on_fabrics(3, scenario)


def test_a_late_listener_hears_what_happened_before(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        fabrics[0].send_control(1, b"hello")
        await recorders[1].wait_until(lambda: recorders[1].controls)
        assert fabrics[1].rank == 1
        assert fabrics[1].world_size == 2

    on_fabrics(2, scenario)


def test_typed_buffers_are_sent_as_bytes(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        numbers = memoryview(bytearray(8 * 10_000)).cast("d")
        numbers[9_999] = 1.5
        await gather(mail.send(0, 1, 1, numbers), received := mail.receive(1, 0, 1, 80_000))
        assert memoryview(received.result()).cast("d")[9_999] == 1.5

    on_fabrics(2, scenario)


def test_one_rank_alone(on_fabrics):
    async def scenario(fabrics, recorders, mail):
        assert fabrics[0].world_size == 1
        await fabrics[0].close()

    on_fabrics(1, scenario)
