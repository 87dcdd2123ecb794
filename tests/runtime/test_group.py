"""Groups: some ranks of a job as a job of their own, on the same fabric, beside the calls of all."""

import numpy as np
import pytest

from small_racks import RACKS
from syncline.errors import ConfigurationError, MismatchError, PeerLostError, TopologyError
from syncline.runtime import numpy_reduction
from syncline.topology import Topology

SUM = numpy_reduction("float64")


def open_groups(communicators, groups, *, first_stream=7):
    streams = range(first_stream, first_stream + 3)
    return {rank: communicators[rank].open_group(group, streams=streams) for group in groups for rank in group}


def values(num_elements, rank):
    return np.arange(num_elements, dtype="float64") * (rank + 1)


def memory(array):
    return memoryview(array).cast("B")


@pytest.mark.parametrize("seed", range(4))
def test_groups_and_all_ranks_call_at_once(in_memory, seed):
    communicators = in_memory(6, Topology.parse(RACKS), seed=seed)
    members = {0: (4, 0, 2), 1: (1, 3, 5)}
    groups = open_groups(communicators, members.values())
    buffers = [values(1001, rank) for rank in range(6)]
    everyone = [values(77, rank) for rank in range(6)]
    works = [groups[rank].all_reduce(memory(buffers[rank]), SUM) for rank in range(6)]
    works += [one.all_reduce(memory(buffer), SUM) for one, buffer in zip(communicators, everyone, strict=True)]
    for work in works:
        work.wait(60)
    for rank in range(6):
        expected = sum(values(1001, member) for member in members[rank % 2])
        np.testing.assert_allclose(buffers[rank], expected)
        np.testing.assert_allclose(everyone[rank], sum(values(77, member) for member in range(6)))


def test_a_groups_ranks_are_numbered_as_its_list_says(in_memory):
    communicators = in_memory(4)
    groups = open_groups(communicators, [(3, 1), (0, 2)])
    assert [groups[rank].rank for rank in range(4)] == [0, 1, 1, 0]
    buffers = {rank: values(8, rank) for rank in range(4)}
    works = [groups[rank].broadcast(memory(buffers[rank]), root=0) for rank in range(4)]
    for work in works:
        work.wait(60)
    np.testing.assert_array_equal(buffers[1], values(8, 3))
    np.testing.assert_array_equal(buffers[2], values(8, 0))


def test_a_member_that_is_late_to_open_the_group_misses_nothing(in_memory):
    communicators = in_memory(3)
    early = communicators[0].open_group((0, 2), streams=range(5, 6))
    buffers = {rank: values(50, rank) for rank in (0, 2)}
    work = early.all_reduce(memory(buffers[0]), SUM)
    communicators[1].barrier()
    late = communicators[2].open_group((0, 2), streams=range(5, 6))
    late.all_reduce(memory(buffers[2]), SUM).wait(60)
    work.wait(60)
    np.testing.assert_allclose(buffers[0], values(50, 0) + values(50, 2))


def test_members_that_call_different_things_are_named_by_the_jobs_numbers(in_memory):
    communicators = in_memory(5)
    groups = open_groups(communicators, [(1, 3, 4)])
    works = [groups[1].all_reduce(memory(values(10, 1)), SUM), groups[3].all_reduce(memory(values(11, 3)), SUM)]
    works.append(groups[4].all_reduce(memory(values(10, 4)), SUM))
    for work in works:
        with pytest.raises(MismatchError, match=r"rank 3 .*11 x float64"):
            work.wait(60)
    done = [one.barrier() for one in communicators]  # the job goes on
    for work in done:
        work.wait(60)


def test_a_member_that_dies_is_named_by_the_jobs_numbers_and_others_go_on(in_memory):
    communicators = in_memory(5)
    groups = open_groups(communicators, [(1, 3, 4), (0, 2)])
    works = [groups[rank].all_reduce(memory(values(100, rank)), SUM) for rank in (1, 4)]
    communicators[3].abort()
    for work in works:
        with pytest.raises(PeerLostError, match="rank 3") as raised:
            work.wait(60)
        assert raised.value.rank == 3
    works = [groups[rank].all_reduce(memory(values(100, rank)), SUM) for rank in (0, 2)]
    for work in works:
        work.wait(60)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_call_ends_where_a_member_leaves_the_job_that_never_opened_the_group(in_memory, is_interrupted):
    communicators = in_memory(3)
    group = communicators[0].open_group((0, 2), streams=range(5, 6))
    work = group.broadcast(memory(values(10, 0)))
    assert not work.done()
    if is_interrupted:
        communicators[2].interrupt("it takes no part")
    communicators[2].close()
    with pytest.raises(PeerLostError, match=r"rank 2 .*left") as raised:
        work.wait(10)
    assert raised.value.rank == 2


def test_a_group_is_closed_by_itself(in_memory):
    communicators = in_memory(4)
    groups = open_groups(communicators, [(0, 1), (2, 3)])
    for group in groups.values():
        group.close()
    again = open_groups(communicators, [(0, 1), (2, 3)], first_stream=20)
    for work in [group.barrier() for group in again.values()] + [one.barrier() for one in communicators]:
        work.wait(60)
    assert again[3].statistics().calls == {"all_reduce": 1}


@pytest.mark.parametrize(("ranks", "message"), [((0, 0), "each of its ranks once"), ((0, 9), "from 0 to 2")])
def test_a_group_of_ranks_that_do_not_exist_is_refused(in_memory, ranks, message):
    with pytest.raises(ConfigurationError, match=message):
        in_memory(3)[0].open_group(ranks, streams=range(3, 4))


def test_who_is_not_a_member_cannot_open_a_group(in_memory):
    with pytest.raises(ConfigurationError, match="Rank 1 cannot open a group that it is not in"):
        in_memory(3)[1].open_group((0, 2), streams=range(3, 4))


def test_the_topology_of_some_ranks():
    part = Topology.parse(RACKS).restricted((4, 0, 1))
    assert part.num_ranks == 3
    assert [part.host_of(rank).name for rank in range(3)] == ["b", "a0", "a0"]
    assert [host.name for host in part.hosts] == ["a0", "b"]
    assert part.node("right").link == Topology.parse(RACKS).node("right").link
    for ranks in ((), (1, 1), (7,)):
        with pytest.raises(TopologyError):
            part.restricted(ranks)
