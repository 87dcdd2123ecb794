"""A rank that lives but does not train is named as that, to those who wait for it, and by the limit that was set."""

import threading

import numpy as np
import pytest

from syncline.errors import DeadlineError
from syncline.fabric import FabricOptions
from syncline.runtime import numpy_reduction
from syncline.topology import Topology

FLOAT32 = numpy_reduction("float32")
QUICK = {"heartbeat_s": 0.05, "suspect_s": 5.0, "dead_s": 60.0}
STALLED = r"rank 2 \(host .*\) lives, but its training thread has made no call for .* s, during sum of step, step 7"


def view(num_elements):
    return memoryview(np.ones(num_elements, "f4")).cast("B")


def tick(communicator, passed_s, values):
    """Let ``communicator`` hear heartbeats."""

    async def hear():
        communicator._fabric.stalls.tick(passed_s, values)

    communicator._loop.run(hear(), 60)


def start(communicator, **settings):
    return communicator.all_reduce(view(50_000), FLOAT32, label="sum of step", step=7, timeout_s=600, **settings)


def test_who_waits_for_a_stalled_rank_ends_after_the_limit(in_memory):
    communicators = in_memory(3)
    works = [start(communicator) for communicator in communicators[:2]]
    for communicator in communicators[:2]:
        communicator._fabric.stalls.limit_s = 0.05
        tick(communicator, 0.0, {2: 4})
        tick(communicator, 30.0, {2: 4})
    for work in works:
        with pytest.raises(DeadlineError, match=STALLED):
            work.wait(60)


def test_a_call_that_begins_after_the_stall_waits_as_long(in_memory):
    communicators = in_memory(3)
    communicators[0]._fabric.stalls.limit_s = 0.05
    tick(communicators[0], 0.0, {2: 4})
    tick(communicators[0], 30.0, {2: 4})
    with pytest.raises(DeadlineError, match=STALLED):
        start(communicators[0]).wait(60)


def test_a_rank_that_moves_again_in_time_is_waited_for(in_memory):
    communicators = in_memory(2)
    work = start(communicators[0])
    communicators[0]._fabric.stalls.limit_s = 20.0
    tick(communicators[0], 0.0, {1: 4})
    tick(communicators[0], 30.0, {1: 4})
    tick(communicators[0], 1.0, {1: 6})
    start(communicators[1]).wait(60)
    work.wait(60)


def test_the_deadline_names_a_hung_training_thread_too(in_memory):
    communicators = in_memory(3)
    for communicator in communicators[:2]:
        tick(communicator, 0.0, {2: 4})
        tick(communicator, 30.0, {2: 4})
    works = [communicator.barrier(timeout_s=0.2) for communicator in communicators[:2]]
    for work in works:
        with pytest.raises(DeadlineError, match=r"rank 2 .* its training thread has made no call for 30.0 s"):
            work.wait(60)


def test_nobody_is_named_who_waits_himself(over_tcp):
    """Over TCP, by heartbeats: rank 1 makes no other call than the one that waits for rank 2."""
    communicators = over_tcp(Topology.flat(3), options=FabricOptions(stall_s=1.0, **QUICK))
    works = [start(communicator) for communicator in communicators[:2]]
    errors = []

    def wait(work):
        try:
            work.wait(60)
        except DeadlineError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2
    for error in errors:
        assert "rank 2 " in error.split(" lives, but its training thread")[0]
        assert "rank 1 (host" not in error.split("during")[0]


def test_ports_know_who_is_stalled(in_memory):
    communicators = in_memory(2)
    port = communicators[0].open_port("test")
    communicators[0]._fabric.stalls.limit_s = 1.0
    tick(communicators[0], 0.0, {1: 4})
    tick(communicators[0], 1.0, {1: 4})
    assert port.stalls.stalled == communicators[0].stalls.stalled == {1}


def test_in_shared_memory_a_stalled_rank_is_named(in_shared_memory):
    communicators = in_shared_memory(2)
    communicators[0]._fabric.stalls.limit_s = 0.05
    tick(communicators[0], 0.0, {1: 4})
    tick(communicators[0], 30.0, {1: 4})
    with pytest.raises(DeadlineError, match=r"rank 1 .* lives, but its training thread has made no call"):
        communicators[0].barrier(is_awaited=True).wait(60)
