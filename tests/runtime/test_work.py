"""Whoever waits for a work is let go when it ends, by whatever thread and however many wait."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from syncline.errors import DeadlineError, PeerLostError
from syncline.fabric import Progress
from syncline.runtime import CommunicationLoop, Work

NUM_THREADS = 5


@pytest.fixture
def loop():
    loop = CommunicationLoop("test")
    loop.start()
    yield loop
    loop.stop()


def outcome(work):
    try:
        work.wait(60)
    except PeerLostError as error:
        return error
    return None


@pytest.mark.parametrize("error", [None, PeerLostError("rank 1 is lost", rank=1, host="a")])
def test_a_rank_whose_foreign_code_waits_for_a_work_is_not_still(loop, error):
    progress = Progress()
    work = Work("sum", timeout_s=60.0, loop=loop, progress=progress)

    async def finish():
        work.finish(error)

    assert not progress.is_waiting
    work.wait_elsewhere()
    assert progress.is_waiting
    loop.run(finish(), 60)
    assert not progress.is_waiting
    work.wait_elsewhere()
    assert not progress.is_waiting, "it has ended already"


@pytest.mark.parametrize("error", [None, PeerLostError("rank 1 is lost", rank=1, host="a")])
def test_every_thread_that_waits_hears_how_it_ended(loop, error):
    """Many works one after another, so that they end before, while and after threads begin to wait."""
    start = threading.Barrier(NUM_THREADS + 1)

    def wait_for(work):
        start.wait(60)
        return outcome(work)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in range(50):
            work = Work("test", timeout_s=60.0, loop=loop)
            waiting = [pool.submit(wait_for, work) for _ in range(NUM_THREADS)]
            start.wait(60)
            loop.call_soon(work.finish, error)
            assert [each.result(60) for each in waiting] == [error] * NUM_THREADS
            assert work.done()
            assert outcome(work) is error


def test_a_limit_that_passes_leaves_the_work_as_it_was(loop):
    work = Work("test", timeout_s=60.0, loop=loop)
    for limit_s in (0.0, -1.0, 0.001):
        with pytest.raises(DeadlineError, match="it is still under way"):
            work.wait(limit_s)
    assert not work.done()
    loop.call_soon(work.finish, None)
    work.wait(60)
    work.wait(0.0)
    assert work.exception() is None


def test_a_work_ends_once_and_its_callbacks_run_once(loop):
    work = Work("test", timeout_s=60.0, loop=loop)
    seen, is_over = [], threading.Event()
    work.add_done_callback(lambda ended: seen.append((ended, threading.current_thread().name)))
    loop.call_soon(work.finish, None)
    work.wait(60)
    work.add_done_callback(lambda _: is_over.set())
    assert is_over.wait(60)
    assert seen == [(work, "test")]
    with pytest.raises(AssertionError, match="ended twice"):
        work.finish(None)


def test_the_error_of_a_loss_can_be_sent_to_the_process_that_started_the_rank():
    error = PeerLostError("rank 1 is lost", rank=1, host="a")
    error.add_note("of the user's")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is PeerLostError
    assert (found.args, vars(found)) == (error.args, vars(error))
    assert (found.rank, found.host, found.ranks_at_fault) == (1, "a", (1,))
