"""Messages through memory that two ranks share: what fits, what is kept, and what a broken peer can do."""

import random
import struct
import threading

import numpy as np
import pytest

from syncline.fabric import _native
from syncline.runtime.shared_memory.opening import can_share

pytestmark = pytest.mark.skipif(not can_share(2), reason="this platform has no segment")

RING_BYTES, BUDGET_BYTES, HEAD_BYTES = 256 << 10, 4 << 20, 40
MESSAGE, OFFER, TAKEN = range(3)


def open_inboxes(num_ranks=2):
    memory = bytearray(_native.Inboxes.size_bytes(num_ranks))
    boxes = [
        _native.Inboxes(memoryview(memory), rank=rank, num_ranks=num_ranks, spin_s=0.0) for rank in range(num_ranks)
    ]
    return memory, boxes


def put(box, peer, tag, number, message):
    return box.put(peer, tag, number, np.frombuffer(message, np.uint8).ctypes.data, len(message))


def take(box, peer):
    found = box.first(peer)
    if found is None:
        return None
    kind, tag, number, num_bytes, address = found
    assert (kind, address) == (MESSAGE, 0)
    into = bytearray(num_bytes)
    box.take(peer, into)
    box.release(peer, num_bytes)
    return (tag, number), bytes(into)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_put_in_is_taken_out_in_order_whatever_its_size(seed):
    plan = random.Random(seed)
    _, (first, second, third) = open_inboxes(3)
    under_way = {1: [], 2: []}
    num_put = num_refused = 0
    for number in range(3_000):
        box, rank = plan.choice([(second, 1), (third, 2)])
        message = plan.randbytes(plan.choice([0, 1, 7, 8, 300, 65_536]))
        if plan.random() < 0.55:
            if put(box, 0, number - 1000, number, message):
                under_way[rank].append(((number - 1000, number), message))
                num_put += 1
            else:
                assert sum(HEAD_BYTES + len(each) + 7 for _, each in under_way[rank]) + len(message) > 190_000
                num_refused += 1
        else:
            assert take(first, rank) == (under_way[rank].pop(0) if under_way[rank] else None)
    assert num_put > 1000
    assert num_refused > 10
    for rank, box in ((1, second), (2, third)):
        assert box.counts(0)[0] == first.counts(rank)[2] + len(under_way[rank])
    assert second.counts(0)[0] + third.counts(0)[0] == num_put


def test_a_sender_is_only_so_far_ahead_of_what_is_asked_for():
    """What was taken and is not asked for yet lies in the receiver's memory."""
    _, (first, second) = open_inboxes()
    message, number = bytes(60_000), 0
    while put(first, 1, 0, number, message):
        second.take(0, bytearray(60_000))
        number += 1
    assert BUDGET_BYTES - 61_000 < number * 60_040 <= BUDGET_BYTES
    second.release(0, 60_000)
    assert put(first, 1, 0, number, message)
    assert not put(first, 1, 0, number, message)


def test_who_waits_is_woken_by_a_message_and_by_its_own_process():
    _, (first, second) = open_inboxes()
    for change in (lambda: put(first, 1, 5, 0, b"abc"), second.wake):
        seen = second.num_changes
        waits = threading.Thread(target=second.wait, args=(seen, 60.0))
        waits.start()
        change()
        waits.join(30.0)
        assert not waits.is_alive()
        assert second.num_changes == seen + 1
    second.wait(second.num_changes - 1, 60.0)  # it has changed already
    second.wait(second.num_changes, 0.001)
    assert first.num_changes == 0


def test_what_is_offered_is_copied_from_where_it_is_until_that_is_withdrawn():
    _, (first, second) = open_inboxes()
    message = memoryview(bytearray(random.Random(0).randbytes(1 << 20)))
    assert first.offer(1, 7, 3, message)
    kind, tag, number, num_bytes, address = second.first(0)
    assert (kind, tag, number, num_bytes) == (OFFER, 7, 3, 1 << 20)
    with pytest.raises(RuntimeError, match="no such message"):
        second.take(0, bytearray(num_bytes))
    second.skip(0)
    assert second.first(0) is None
    into = memoryview(bytearray(num_bytes))
    assert second.read(0, address + 1000, into[1000:])
    assert into[1000:] == message[1000:]
    assert into[:1000] == bytes(1000)
    assert second.answer(0, number, num_bytes)
    assert first.first(1)[:4] == (TAKEN, 0, 3, 1 << 20)
    first.skip(1)
    assert first.counts(1) == (1, 1 << 20, 0, 0)
    assert second.counts(0) == (0, 0, 1, 1 << 20)
    assert not second.read(0, 8, into)  # where nothing is
    first.withdraw()
    assert not second.read(0, address, into)


def test_nothing_is_read_of_a_process_that_has_not_the_token_of_the_page():
    memory, (first, second) = open_inboxes()
    message = memoryview(bytearray(100))
    assert first.offer(1, 7, 0, message)
    address = second.first(0)[4]
    into = memoryview(bytearray(b"1" * 100))
    (token,) = struct.unpack_from("<Q", memory, 144)
    struct.pack_into("<Q", memory, 144, token ^ 1)
    assert not second.read(0, address, into)
    assert into == b"1" * 100
    struct.pack_into("<Q", memory, 144, token)
    assert second.read(0, address, into)
    assert into == message


def test_a_rank_says_whether_it_must_be_called():
    _, (first, second, third) = open_inboxes(3)
    second.be_called(True)
    assert [first.must_call(rank) for rank in range(3)] == [False, True, False]
    second.be_called(False)
    assert not third.must_call(1)


def test_many_offers_leave_room_for_messages():
    _, (first, second) = open_inboxes()
    message = memoryview(bytearray(1 << 20))
    for number in range(200_000):
        assert first.offer(1, 0, number, message)
        second.skip(0)
    assert put(first, 1, 0, 200_000, b"abc")


@pytest.mark.parametrize("num_bytes", [4, RING_BYTES, 1 << 62, (1 << 64) - 1])
def test_what_is_no_message_is_not_read(num_bytes):
    memory, (first, second) = open_inboxes()
    assert put(first, 1, 5, 0, b"abc")
    page = _native.Inboxes.size_bytes(2) // 2 + 4096  # rank 1's page, and then its ring of rank 0
    place = memory.index(struct.pack("<qQQ", 5, 0, 3), page)
    struct.pack_into("<Q", memory, place + 16, num_bytes)
    if num_bytes == 4:  # it could be
        with pytest.raises(RuntimeError, match="no such message"):
            second.take(0, bytearray(3))
    else:
        with pytest.raises(RuntimeError, match="no message"):
            second.first(0)
    with pytest.raises(RuntimeError, match="no such message"):
        first.take(1, bytearray(3))


def test_what_is_of_no_kind_is_not_read():
    memory, (first, second) = open_inboxes()
    assert put(first, 1, 5, 0, b"abc")
    page = _native.Inboxes.size_bytes(2) // 2 + 4096
    struct.pack_into("<Q", memory, memory.index(struct.pack("<qQQ", 5, 0, 3), page) - 8, 3)
    with pytest.raises(RuntimeError, match="no message"):
        second.first(0)
