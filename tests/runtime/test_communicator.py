"""The communicator: conveniences, statistics, threads and what is left after a close."""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from syncline.errors import (
    ConfigurationError,
    DeadlineError,
    FabricClosedError,
    FabricError,
    PeerLostError,
    TopologyError,
)
from syncline.runtime import CommunicationLoop, communicators_in_memory, numpy_reduction
from syncline.schedule import Collective
from syncline.topology import DirectedLink, Topology

FLOAT64 = numpy_reduction("float64")


def wait_all(works):
    for work in list(works):  # begin them all before the first is waited for
        work.wait(60)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("num_elements", [0, 1, 2, 1000, 300_001])
def test_reduce_scatter_and_all_gather_in_rank_order(in_memory, num_ranks, num_elements):
    communicators = in_memory(num_ranks, seed=1)
    buffers = [np.arange(num_elements, dtype=np.float64) * (rank + 1) for rank in range(num_ranks)]
    expected = np.sum(buffers, axis=0)
    wait_all(c.reduce_scatter(memoryview(b).cast("B"), FLOAT64) for c, b in zip(communicators, buffers, strict=True))
    for rank, buffer in enumerate(buffers):
        own = slice(rank * num_elements // num_ranks, (rank + 1) * num_elements // num_ranks)
        assert np.array_equal(buffer[own], expected[own])
        buffer[: own.start] = buffer[own.stop :] = np.nan
    wait_all(c.all_gather(memoryview(b).cast("B"), FLOAT64) for c, b in zip(communicators, buffers, strict=True))
    assert all(np.array_equal(buffer, expected) for buffer in buffers)


@pytest.mark.parametrize("root", range(3))
def test_broadcast(in_memory, root):
    communicators = in_memory(3, seed=2)
    buffers = [np.full(1001, rank, np.uint8) for rank in range(3)]
    wait_all(c.broadcast(memoryview(b), root=root) for c, b in zip(communicators, buffers, strict=True))
    assert all((buffer == root).all() for buffer in buffers)


def test_a_barrier_waits_for_every_rank(in_memory):
    communicators = in_memory(3)
    works = [communicator.barrier() for communicator in communicators[:2]]
    communicators[0].statistics()  # a round through the loop, as proof that it had time
    assert not any(work.done() for work in works)
    communicators[2].barrier().wait(60)
    wait_all(works)


def test_statistics_count_calls_links_and_waits(in_memory):
    topology = Topology.load("two-racks-5-3")
    communicators = in_memory(8, topology, seed=3)
    num_bytes = 8 * 120 * 8
    wait_all(c.all_reduce(memoryview(bytearray(num_bytes)), FLOAT64) for c in communicators)
    with communicators[0].progress.waiting("period"):
        pass
    records = [communicator.statistics() for communicator in communicators]
    assert records[0].waited_s["period"] >= 0
    assert records[0].calls == {"all_reduce": 1}
    assert records[0].call_bytes == {"all_reduce": num_bytes}
    assert records[0].num_pending_calls == records[0].queued_bytes == 0
    total = {}
    for record in records:
        for link, count in record.link_bytes.items():
            total[link] = total.get(link, 0) + count
    planned = communicators[0].plan(Collective.ALL_REDUCE, num_bytes).link_bytes(topology, num_bytes)
    for link, count in planned.items():
        assert total.get(link, 0) == pytest.approx(count, abs=8 * 200), link
    assert any(isinstance(link, DirectedLink) for link in total)


def test_plans_are_remembered(in_memory):
    (communicator,) = in_memory(1)
    schedule = communicator.plan(Collective.ALL_REDUCE, 1000)
    assert communicator.plan(Collective.ALL_REDUCE, 1001) is schedule
    assert communicator.layout(schedule, 10, 4) is communicator.layout(schedule, 10, 4)


def test_callbacks_run_on_the_loop_also_when_added_late(in_memory):
    communicators = in_memory(2)
    names, done = [], threading.Event()

    def note(work):
        names.append((threading.current_thread().name, work.done()))
        if len(names) == 2:
            done.set()

    works = [communicator.barrier() for communicator in communicators]
    works[0].add_done_callback(note)
    wait_all(works)
    works[0].add_done_callback(note)
    assert done.wait(60)
    assert names == [("syncline memory", True)] * 2


def test_a_callback_may_begin_the_next_call(in_memory):
    communicators = in_memory(2, seed=1)
    later = [threading.Event() for _ in communicators]

    def chain(communicator, event):
        def begin(_work):
            communicator.barrier().add_done_callback(lambda _: event.set())

        return begin

    for communicator, event in zip(communicators, later, strict=True):
        communicator.barrier().add_done_callback(chain(communicator, event))
    assert all(event.wait(60) for event in later)


def test_a_callback_must_not_wait(in_memory):
    communicators = in_memory(2)
    caught, seen = [], threading.Event()

    def wait_on_the_loop(_work):
        try:
            communicators[0].barrier().wait()
        except AssertionError as error:
            caught.append(str(error))
        seen.set()

    works = [communicator.barrier() for communicator in communicators]
    works[0].add_done_callback(wait_on_the_loop)
    assert seen.wait(60)
    assert "needs its thread" in caught[0]


def test_waiting_has_a_limit_of_its_own(in_memory):
    communicators = in_memory(2)
    work = communicators[0].barrier()
    with pytest.raises(DeadlineError, match=r"not done within 0\.01 s; it is still under way"):
        work.wait(0.01)
    assert work.exception() is None
    communicators[1].barrier()
    work.wait(60)


def test_a_topology_of_another_size_is_refused():
    before = threading.active_count()
    with pytest.raises(TopologyError, match="8 ranks but the job has 2"):
        communicators_in_memory(2, Topology.load("two-racks-5-3"))
    assert threading.active_count() == before


def test_unknown_dtypes_are_refused():
    with pytest.raises(ConfigurationError, match="not 'complex64'"):
        numpy_reduction("complex64")


def test_two_hundred_starts_leave_nothing_behind():
    def num_open():
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    for _ in range(3):
        _start_and_close()
    gc.collect()  # what earlier tests left in cycles would go in between
    before = num_open()
    for _ in range(200):
        _start_and_close()
    assert num_open() == before


def _start_and_close():
    communicators = communicators_in_memory(2)
    wait_all([communicator.barrier() for communicator in communicators])
    for communicator in communicators:
        communicator.close()


def test_a_closed_communicator_keeps_its_statistics_and_refuses_calls():
    (communicator,) = communicators_in_memory(1)
    with communicator:
        communicator.barrier().wait(60)
    assert communicator.statistics().calls == {"all_reduce": 1}
    with pytest.raises(FabricClosedError):
        communicator.barrier().wait(60)
    communicator.close()


def test_the_loop_reports_what_no_one_caught():
    loop = CommunicationLoop("test")
    loop.start()
    caught, seen = [], threading.Event()
    loop.on_crash(lambda error: (caught.append(error), seen.set()))
    loop.call_soon(lambda: 1 // 0)
    assert seen.wait(60)
    assert isinstance(caught[0], ZeroDivisionError)
    assert loop.is_running()
    loop.stop()
    loop.stop()
    with pytest.raises(FabricClosedError):
        loop.call_soon(print)


def test_the_loop_reports_an_exit_and_ends():
    loop = CommunicationLoop("test")
    loop.start()
    caught = []
    loop.on_crash(caught.append)
    loop.call_soon(_exit)
    loop._thread.join(60)
    assert isinstance(caught[0], SystemExit)
    assert not loop.is_running()
    loop.stop()


def _exit():
    raise SystemExit(3)


def test_the_loop_does_not_wait_forever_for_a_coroutine():
    loop = CommunicationLoop("test")
    loop.start()

    async def never():
        await loop.clock.create_future()

    with pytest.raises(DeadlineError, match=r"never was not done on the loop within 0\.01 s"):
        loop.run(never(), 0.01)
    loop.stop()


def test_a_rank_that_gives_up_tells_all_ranks_and_its_watchers(in_memory):
    communicators = in_memory(3)
    seen = [threading.Event() for _ in range(3)]
    told = [[] for _ in range(3)]
    for communicator, event, errors in zip(communicators, seen, told, strict=True):
        communicator.watch_failure(errors.append)
        communicator.watch_failure(lambda _, event=event: event.set())
    work = communicators[0].barrier()
    communicators[1].give_up("its device failed: too hot")
    with pytest.raises(PeerLostError, match=r"rank 1 .* gave up: its device failed: too hot"):
        work.wait(60)
    assert all(event.wait(60) for event in seen)
    assert [type(error) for (error,) in told] == [PeerLostError, FabricError, PeerLostError]
    late = []
    communicators[2].watch_failure(late.append)
    communicators[2].statistics()  # a round through the loop
    assert [str(error) for error in late] == [str(told[2][0])]
    with pytest.raises(FabricError, match=r"barrier .*cannot be done: its device failed: too hot"):
        communicators[1].barrier().wait(60)
