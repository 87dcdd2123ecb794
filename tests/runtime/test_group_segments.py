"""Groups of ranks of one machine make small calls in memory that they share, in jobs of several hosts too."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from syncline.errors import DeadlineError, PeerLostError
from syncline.fabric.memory import MemoryFabric
from syncline.runtime import numpy_reduction
from syncline.runtime.shared_memory.opening import can_share

pytestmark = pytest.mark.skipif(not can_share(2), reason="this platform has no segment")

FLOAT32 = numpy_reduction("float32")


def on_all(ranks, body):
    """Run ``body`` for each rank in a thread of its own; return what it returned, or the error that it ended with."""

    def run(rank):
        try:
            return body(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(run, ranks), strict=True))


def open_group(communicators, members, *, stream=7, **settings):
    """Let its members open a group and its segment; return the groups, and whether they have a segment."""
    groups = {rank: communicators[rank].open_group(members, streams=range(stream, stream + 3)) for rank in members}
    return groups, set(on_all(members, lambda rank: groups[rank].open_segment(**settings)).values())


def reduce(communicator, array, **settings):
    """Sum an array and wait for it."""
    communicator.all_reduce(memoryview(array).cast("B"), FLOAT32, is_awaited=True, **settings).wait(60)
    return array


@pytest.fixture
def two_hosts(in_memory, monkeypatch):
    """Four ranks: two of each host."""
    monkeypatch.setattr(MemoryFabric, "is_local", lambda self, peer: self.rank // 2 == peer // 2)
    return in_memory(4)


def test_a_group_within_a_host_has_a_segment_where_the_job_has_none(two_hosts):
    assert set(on_all(range(4), lambda rank: two_hosts[rank].open_segment()).values()) == {False}
    groups, has_segment = open_group(two_hosts, (3, 2))
    assert has_segment == {True}
    across, has_segment = open_group(two_hosts, (0, 2), stream=20)
    assert has_segment == {False}
    sums = on_all((2, 3), lambda rank: reduce(groups[rank], np.full(5, rank, "f4")).tolist())
    assert sums == {2: [5.0] * 5, 3: [5.0] * 5}
    assert on_all((0, 2), lambda rank: reduce(across[rank], np.ones(5, "f4")).tolist()) == {0: [2.0] * 5, 2: [2.0] * 5}
    made = [group._shared_memory[group.user_stream].num_calls for group in groups.values()]
    assert made == [{"all_reduce": 1}] * 2
    assert [group.has_segment for group in across.values()] == [False] * 2


def test_what_a_group_moves_there_is_counted_as_memory(two_hosts):
    groups, _ = open_group(two_hosts, (0, 1))
    on_all((0, 1), lambda rank: reduce(groups[rank], np.ones(100, "f4")))
    moved = [
        (each.peer, each.sent_bytes) for each in groups[0].statistics().fabric.connections if each.sent_bytes > 300
    ]
    assert moved == [(1, 400)]


def test_groups_that_overlap_have_segments_of_their_own(in_memory):
    communicators = in_memory(3)
    first, _ = open_group(communicators, (0, 1))
    second, _ = open_group(communicators, (1, 2), stream=20)

    def body(rank):
        own = [groups[rank] for groups in (first, second) if rank in groups]
        return [reduce(group, np.full(3, rank + number, "f4"))[0] for number in range(20) for group in own]

    sums = on_all(range(3), body)
    assert sums[0] == [2 * number + 1 for number in range(20)]
    assert sums[2] == [2 * number + 3 for number in range(20)]
    assert sums[1] == [value for pair in zip(sums[0], sums[2], strict=True) for value in pair]


def test_a_member_that_does_not_come_is_named_by_the_jobs_numbers_and_so_is_who_waits(in_memory):
    communicators = in_memory(5)
    groups, _ = open_group(communicators, (1, 3, 4))
    errors = on_all((1, 4), lambda rank: reduce(groups[rank], np.ones(3, "f4"), timeout_s=0.5))
    for error in errors.values():
        assert isinstance(error, DeadlineError)
        text = r"rank 3 \(host memory\) sent nothing of all_reduce.*(ranks 1 and 4 wait|rank [14] waits) for it"
        assert re.search(text, str(error)), error
    on_all(range(5), lambda rank: reduce(communicators[rank], np.ones(3, "f4")))


def test_a_member_that_dies_is_named_by_the_jobs_number(in_memory):
    communicators = in_memory(4)
    groups, _ = open_group(communicators, (3, 1))
    communicators[1].abort()
    error = on_all((3,), lambda rank: reduce(groups[rank], np.ones(3, "f4")))[3]
    assert isinstance(error, PeerLostError)
    assert error.rank == 1
