"""Calls of a stream with a segment of its own: put up at once, and made by whoever waits for them."""

import threading

import numpy as np
import pytest
from segment_ranks import on_all

from syncline.errors import DeadlineError, FabricClosedError, MismatchError, PeerLostError
from syncline.runtime import numpy_reduction
from syncline.runtime.shared_memory.opening import can_share
from syncline.schedule import Collective, Layout, layout_of_step, plan_sharded_step, plan_tree
from syncline.topology import Topology

pytestmark = pytest.mark.skipif(not can_share(2), reason="this platform has no segment")

FLOAT32 = numpy_reduction("float32")
STREAM, OTHER_STREAM = 9, 11
NUM_ELEMENTS = 1001


@pytest.fixture
def with_segment(in_memory):
    """Make communicators of which a stream has a segment."""

    def make(num_ranks):
        communicators = in_memory(num_ranks)
        assert on_all(communicators, lambda each: each.open_segment(stream=STREAM)) == [True] * num_ranks
        return communicators

    return make


def num_made(communicator):
    """Return how many calls were made in shared memory."""
    return sum(communicator._shared_memory[STREAM].num_calls.values())


def reduce(communicator, array, *, stream=STREAM, **settings):
    """Begin to sum an array."""
    return communicator.all_reduce(memoryview(array).cast("B"), FLOAT32, stream=stream, **settings)


def schedules_of(kind, num_ranks):
    """Return the schedules and the layout of a bucket."""
    topology = Topology.flat(num_ranks)
    if kind == "whole":
        whole = plan_tree(topology, Collective.ALL_REDUCE)
        return (whole,), Layout.build(whole, NUM_ELEMENTS, 400)
    step = plan_sharded_step(topology, 4 * NUM_ELEMENTS)
    return (step.reduce_scatter, step.all_gather), layout_of_step(step, NUM_ELEMENTS, 400)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["whole", "divided"])
def test_the_bits_are_those_of_the_engine(with_segment, num_ranks, kind):
    communicators = with_segment(num_ranks)
    schedules, layout = schedules_of(kind, num_ranks)
    source = np.random.default_rng(num_ranks)
    given = (source.normal(size=(num_ranks, NUM_ELEMENTS)) * 1000).astype("f4")

    def body(communicator):
        both = [given[communicator.rank].copy() for _ in range(2)]
        for schedule in schedules:
            works = [
                communicator.start(schedule, memoryview(array).cast("B"), FLOAT32, layout=layout, stream=stream)
                for array, stream in zip(both, (STREAM, OTHER_STREAM), strict=True)
            ]
            assert [work.is_made_by_waiting for work in works] == [True, False]
            for work in works:
                work.wait(60)
        return both[0].tobytes() == both[1].tobytes()

    assert on_all(communicators, body) == [True] * num_ranks
    assert [num_made(each) for each in communicators] == [len(schedules)] * num_ranks


def test_a_rank_moves_only_what_others_need(with_segment):
    communicators = with_segment(4)
    (scatter, gather), layout = schedules_of("divided", 4)
    own_bytes = [4 * sum(stop - start for start, stop in layout.owned_ranges(scatter, rank)) for rank in range(4)]

    def body(communicator):
        sent = []
        for schedule in (scatter, gather):
            view = memoryview(np.ones(NUM_ELEMENTS, "f4")).cast("B")
            before = [one.sent_bytes for one in communicator._shared_memory[STREAM].traffic()]
            communicator.start(schedule, view, FLOAT32, layout=layout, stream=STREAM).wait(60)
            after = [one.sent_bytes for one in communicator._shared_memory[STREAM].traffic()]
            sent.append([new - old for new, old in zip(after, before, strict=True)])
        return sent

    for rank, (scattered, gathered) in enumerate(on_all(communicators, body)):
        assert scattered == [num_bytes for other, num_bytes in enumerate(own_bytes) if other != rank]
        assert gathered == [own_bytes[rank]] * 3


def test_nobody_need_wait_while_others_compute(with_segment):
    """A rank that asks whether it is done makes it, once all have come."""
    first, second = with_segment(2)
    arrays = [np.ones(10, "f4"), np.full(10, 2.0, "f4")]
    work = reduce(first, arrays[0])
    assert not work.done()
    with pytest.raises(DeadlineError, match="still under way"):
        work.wait(0.01)
    theirs = reduce(second, arrays[1])
    assert work.done()
    assert arrays[0].tolist() == [3.0] * 10
    theirs.wait(60)
    assert arrays[1].tolist() == [3.0] * 10


def test_callbacks_run_on_the_loop_though_nobody_waits(with_segment):
    communicators = with_segment(2)
    told = [threading.Event() for _ in communicators]
    threads = []

    def body(communicator):
        work = reduce(communicator, np.ones(10, "f4"))
        work.add_done_callback(lambda _: threads.append(communicator._loop.is_current()))
        work.add_done_callback(lambda _: told[communicator.rank].set())
        assert told[communicator.rank].wait(60)
        assert work.exception() is None

    assert on_all(communicators, body) == [None, None]
    assert threads == [True, True]
    for thread in threading.enumerate():
        if thread.name == "syncline-all_reduce":
            thread.join(60)


def test_calls_that_come_before_the_last_one_is_over_are_made_after_it(with_segment):
    communicators = with_segment(2)

    def body(communicator):
        arrays = [np.full(5, number + communicator.rank, "f4") for number in range(4)]
        works = [reduce(communicator, array) for array in arrays]
        for work in reversed(works):
            work.wait(60)
        return [array[0] for array in arrays]

    assert on_all(communicators, body) == [[1.0, 3.0, 5.0, 7.0]] * 2
    assert num_made(communicators[0]) == 1
    assert on_all(communicators, body) == [[1.0, 3.0, 5.0, 7.0]] * 2


def test_what_is_too_large_takes_the_engine(with_segment):
    communicators = with_segment(2)
    sizes = (10, 700_000, 10)

    def body(communicator):
        for size in sizes:
            array = np.ones(size, "f4")
            reduce(communicator, array).wait(60)
            assert (array == 2.0).all()

    assert on_all(communicators, body) == [None, None]
    assert [num_made(each) for each in communicators] == [2, 2]


def test_calls_that_differ_fail_on_every_rank(with_segment):
    communicators = with_segment(3)
    errors = on_all(communicators, lambda each: reduce(each, np.ones(3 + each.rank // 2, "f4")).wait(60))
    for error in errors:
        assert isinstance(error, MismatchError), error
        assert "called all_reduce of 4 x float32" in str(error)


def test_a_rank_that_does_not_come_is_named(with_segment):
    communicators = with_segment(2)
    error = on_all(communicators[:1], lambda each: reduce(each, np.ones(3, "f4"), timeout_s=0.2).wait(60))[0]
    assert isinstance(error, DeadlineError)
    assert "rank 1 (host memory) sent nothing of all_reduce" in str(error)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_whoever_waits_is_let_go_when_a_rank_ends(with_segment, end):
    communicators = with_segment(3)
    works = [reduce(each, np.ones(3, "f4")) for each in communicators[:2]]
    is_waiting = threading.Barrier(3)

    def body(communicator):
        is_waiting.wait(60)
        if communicator.rank == 2:
            getattr(communicators[0], end)()
        else:
            works[communicator.rank].wait(60)

    first, second, _ = on_all(communicators, body)
    assert isinstance(first, FabricClosedError)
    assert isinstance(second, PeerLostError)
    assert second.rank == 0


def test_a_work_that_was_never_waited_for_is_told_of_after_a_close(with_segment):
    (first, _) = with_segment(2)
    work = reduce(first, np.ones(3, "f4"))
    first.close()
    with pytest.raises(FabricClosedError):
        work.wait(60)
    assert work.done()
