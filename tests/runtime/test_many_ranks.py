"""Twenty ranks, each connected to some of the others: results, groups, and errors that all of them have."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tcp_communicators import close_all

from syncline.errors import DeadlineError, MismatchError, PeerLostError
from syncline.fabric import FabricOptions
from syncline.report.job_trace import read_examination
from syncline.runtime import numpy_reduction
from syncline.schedule import Collective, plan_tree
from syncline.topology import Topology

NUM_RANKS = 20
FLAT = Topology.flat(NUM_RANKS)
FLOAT32 = numpy_reduction("float32")


def all_reduce(communicators, num_elements, **settings):
    buffers = [np.full(num_elements, rank, dtype=np.float32) for rank in range(len(communicators))]
    works = [
        communicator.all_reduce(memoryview(buffer).cast("B"), FLOAT32, **settings)
        for communicator, buffer in zip(communicators, buffers, strict=True)
    ]
    return works, buffers


def num_peers(communicator):
    return len({each.peer for each in communicator.statistics().fabric.connections})


@pytest.mark.parametrize("shares_memory", [True, False])
def test_connections_are_those_that_plans_need(over_tcp, shares_memory):
    communicators = over_tcp(FLAT, options=FabricOptions(shares_memory=shares_memory))
    works, buffers = all_reduce(communicators, 100)
    for work in works:
        work.wait(60)
    assert all((buffer == 190.0).all() for buffer in buffers)
    assert max(map(num_peers, communicators)) <= 12
    each_to_each = plan_tree(FLAT, Collective.ALL_REDUCE)
    works = [
        communicator.start(each_to_each, memoryview(buffer).cast("B"), FLOAT32)
        for communicator, buffer in zip(communicators, buffers, strict=True)
    ]
    for work in works:
        work.wait(60)
    assert all((buffer == 20 * 190.0).all() for buffer in buffers)
    assert {num_peers(communicator) for communicator in communicators} == {NUM_RANKS - 1}


def test_ranks_that_close_right_after_their_last_call_spoil_nothing(over_tcp):
    for _ in range(5):
        communicators = over_tcp(FLAT)
        works, buffers = all_reduce(communicators, 1000)

        def leave(communicator, work):
            work.wait(60)
            communicator.close()

        with ThreadPoolExecutor(NUM_RANKS) as pool:
            list(pool.map(leave, communicators, works))
        assert all((buffer == 190.0).all() for buffer in buffers)


def test_a_root_may_leave_before_others_ask_for_what_it_gave(over_tcp):
    communicators = over_tcp(FLAT)
    buffers = [bytearray(b"%d" % (rank == 3)) * 10 for rank in range(NUM_RANKS)]
    works = {3: communicators[3].broadcast(memoryview(buffers[3]), root=3)}
    for rank in range(NUM_RANKS):
        if rank != 3 and rank % 2:
            works[rank] = communicators[rank].broadcast(memoryview(buffers[rank]), root=3)
    for rank in range(0, NUM_RANKS, 2):
        works[rank] = communicators[rank].broadcast(memoryview(buffers[rank]), root=3)
    for work in works.values():
        work.wait(60)
    assert set(map(bytes, buffers)) == {b"1" * 10}


@pytest.mark.parametrize("late", [0, 7])
def test_a_rank_that_does_not_come_is_named_by_all_others(over_tcp, late):
    communicators = over_tcp(FLAT)
    others = [communicator for rank, communicator in enumerate(communicators) if rank != late]
    works, _ = all_reduce(others, 1000, timeout_s=4.0)
    for work in works:
        with pytest.raises(DeadlineError, match=rf"rank {late} \(host h{late}\)") as told:
            work.wait(60)
        assert told.value.ranks_at_fault == (late,)


def test_calls_that_differ_fail_on_every_rank(over_tcp):
    communicators = over_tcp(FLAT)
    works = [
        communicator.all_reduce(memoryview(bytearray(1000 + 4 * (rank == 9))), FLOAT32)
        for rank, communicator in enumerate(communicators)
    ]
    for work in works:
        with pytest.raises(MismatchError, match=r"rank 9 \(host h9\) called all_reduce of 251 x float32"):
            work.wait(60)


def test_all_ranks_answer_what_they_do(over_tcp):
    communicators = over_tcp(FLAT)
    for communicator in communicators:
        communicator.watch_ranks()
    found = read_examination(communicators[0].examine(0.1))
    assert [one.rank for one in found.ranks] == list(range(NUM_RANKS))
    assert max(map(num_peers, communicators)) < NUM_RANKS - 1


def test_a_rank_that_breaks_off_is_named(over_tcp):
    communicators = over_tcp(FLAT)
    others = communicators[:13] + communicators[14:]
    works, _ = all_reduce(others, 1000)
    communicators[13].abort("its program ended")
    for work in works:
        with pytest.raises(PeerLostError, match="its program ended") as told:
            work.wait(60)
        assert told.value.rank == 13


def test_a_group_of_ranks_that_are_not_connected_calls_and_closes(over_tcp):
    communicators = over_tcp(FLAT)
    members = [0, 3, 6, 9, 13]
    groups = [communicators[rank].open_group(members, streams=range(10, 12)) for rank in members]
    works, buffers = all_reduce(groups, 50_000)
    for work in works:
        work.wait(60)
    assert all((buffer == 10.0).all() for buffer in buffers)
    groups[2].give_up("it had enough")
    works, _ = all_reduce(groups[:2] + groups[3:], 1000)
    for work in works:
        with pytest.raises(PeerLostError, match="it had enough") as told:
            work.wait(60)
        assert told.value.rank == 6
    works, buffers = all_reduce(communicators, 1000)  # the job goes on
    for work in works:
        work.wait(60)
    close_all(groups)


def test_who_leaves_early_has_told_all_how_far_it_came(over_tcp):
    communicators = over_tcp(FLAT)
    works, _ = all_reduce(communicators, 100)
    for work in works:
        work.wait(60)
    communicators[5].close()
    others = communicators[:5] + communicators[6:]
    works, _ = all_reduce(others, 100)
    for work in works:
        with pytest.raises(PeerLostError, match=re.escape("rank 5 (host h5)")) as told:
            work.wait(60)
        assert told.value.rank == 5
