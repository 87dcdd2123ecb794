"""Direct calls on a communicator: gather, scatter, all-to-all of bytes, among the calls of schedules."""

import numpy as np
import pytest

from syncline.errors import ConfigurationError, MismatchError, PeerLostError
from syncline.runtime import numpy_reduction
from syncline.runtime.direct import MESSAGE_BYTES, DirectCall
from syncline.topology import Topology

SUM = numpy_reduction("float64")


def memory(num_bytes, value=0):
    return memoryview(bytearray([value]) * num_bytes)


def all_to_all(communicators, size_of):
    """Begin one where rank r sends ``size_of(r, k)`` bytes to rank k; return works and what lands on each rank."""
    works, landing = [], []
    for one in communicators:
        peers = [peer for peer in range(one.world_size) if peer != one.rank]
        receives = tuple((peer, memory(size_of(peer, one.rank))) for peer in peers)
        sends = tuple((peer, memory(size_of(one.rank, peer), one.rank + 1)) for peer in peers)
        works.append(one.start_direct("all_to_all", sends=sends, receives=receives, about="bytes"))
        landing.append(dict(receives))
    return works, landing


def test_messages_of_all_sizes_in_any_order(anywhere):
    sizes = [0, 1, 20_000, MESSAGE_BYTES, 2 * MESSAGE_BYTES + 1]
    communicators = anywhere(3, Topology.flat(3), seed=5)
    for shift in range(len(sizes)):
        works, landing = all_to_all(communicators, lambda src, dst, shift=shift: sizes[(src + 2 * dst + shift) % 5])
        for work in works:
            work.wait(60)
        for rank, received in enumerate(landing):
            for peer, view in received.items():
                assert len(view) == sizes[(peer + 2 * rank + shift) % 5]
                assert bytes(view) == bytes([peer + 1]) * len(view)
    assert [one.statistics().calls for one in communicators] == [{"all_to_all": 5}] * 3


def test_they_keep_their_place_among_other_calls(in_memory):
    communicators = in_memory(3, seed=2)
    sums = [np.full(1000, rank + 1.0) for rank in range(3)]
    works = [one.all_reduce(memoryview(sums[one.rank]).cast("B"), SUM) for one in communicators]
    more, landing = all_to_all(communicators, lambda src, dst: 10 * src + dst)
    works += more + [one.barrier() for one in communicators]
    for work in works:
        work.wait(60)
    assert all(np.array_equal(one, np.full(1000, 6.0)) for one in sums)
    assert {peer: len(view) for peer, view in landing[1].items()} == {0: 1, 2: 21}


def test_a_rank_may_leave_when_its_part_is_done(anywhere):
    """What it sent arrives, though it is gone: as at the end of a program."""
    first, second = anywhere(2, Topology.flat(2), seed=1)
    landed = memory(1000)
    receiving = first.start_direct("gather", sends=(), receives=((1, landed),), about="1000 bytes", root=0)
    sending = second.start_direct("gather", sends=((0, memory(1000, 7)),), receives=(), about="1000 bytes", root=0)
    sending.wait(60)
    second.close()
    receiving.wait(60)
    assert bytes(landed) == bytes([7]) * 1000


@pytest.mark.parametrize("sizes", [(4, 5), (0, 5), (5, 0), (MESSAGE_BYTES + 1, MESSAGE_BYTES + 2)])
def test_another_size_than_is_expected_is_an_error_of_all(anywhere, sizes):
    communicators = anywhere(3, Topology.flat(3), seed=3)
    sent, expected = sizes
    sends = {0: ((2, memory(sent)),), 1: ((2, memory(9)),), 2: ()}
    receives = {0: (), 1: (), 2: ((0, memory(expected)), (1, memory(9)))}
    works = [
        one.start_direct("gather", sends=sends[one.rank], receives=receives[one.rank], about="bytes", root=2)
        for one in communicators
    ]
    with pytest.raises(MismatchError, match=r"rank 0 .* and rank 2 .* disagree on how many bytes .* in gather"):
        works[2].wait(60)
    for one in communicators:
        with pytest.raises(MismatchError, match="disagree on how many bytes"):
            one.barrier().wait(60)


def test_a_loss_in_the_middle_ends_it_and_nothing_lands_any_more(anywhere):
    communicators = anywhere(3, Topology.flat(3), seed=4)
    landed = memory(100_000)
    receives = ((1, landed), (2, memory(100_000)))
    work = communicators[0].start_direct("gather", sends=(), receives=receives, about="bytes", root=0)
    communicators[2].abort()
    with pytest.raises(PeerLostError, match=r"rank 2 .*, during gather; rank 0 waits for it"):
        work.wait(60)
    assert communicators[0].statistics().fabric.pending_receives == 0
    late = communicators[1].start_direct("gather", sends=((0, memory(100_000, 1)),), receives=(), about="bytes", root=0)
    with pytest.raises(PeerLostError):
        late.wait(60)
    assert bytes(landed) == bytes(100_000)


def call_of(direction, *, root=None, **changes):
    settings = {"stream": 0, "label": direction, "timeout_s": 1.0, "about": "bytes", "num_ranks": 3}
    messages = {"sends": (), "receives": ()}
    return DirectCall(direction=direction, root=root, **{**settings, **messages, **changes})


def test_who_needs_whom():
    assert call_of("gather", root=1).needed_by(0) == [1]
    assert call_of("gather", root=1).needed_by(1) == []
    assert call_of("scatter", root=1).needed_by(1) == [0, 2]
    assert call_of("scatter", root=1).needed_by(0) == []
    assert call_of("all_to_all").needed_by(2) == [0, 1]


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(ConfigurationError, match="messages are contiguous bytes"):
        call_of("scatter", root=0, sends=((1, memoryview(np.ones(3))),))
    with pytest.raises(ConfigurationError, match="messages are contiguous bytes"):
        call_of("scatter", root=0, sends=((1, memory(8)[::2]),))
    with pytest.raises(ConfigurationError, match="a deadline lies in the future"):
        call_of("gather", root=0, timeout_s=0.0)
