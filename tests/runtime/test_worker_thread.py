"""The order of jobs on a worker thread, and how it ends."""

import threading

from syncline.runtime.worker_thread import WorkerThread

WAIT_S = 60


def make(failures: list[BaseException]) -> WorkerThread:
    return WorkerThread("worker", on_failure=failures.append)


class Held:
    """A job that goes on when it is let."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)


def test_the_lowest_urgency_goes_first_and_of_equals_the_oldest() -> None:
    done: list[str] = []
    thread, held = make([]), Held()
    thread.submit(0, (), held)
    assert held.has_begun.wait(WAIT_S)
    for urgency, name in ((2, "late"), (1, "first"), (1, "second"), (0, "urgent")):
        thread.submit(urgency, (), lambda name=name: done.append(name))
    held.may_end.set()
    thread.close(finishes=True)
    assert done == ["urgent", "first", "second", "late"]


def test_jobs_that_have_not_begun_are_dropped_unless_they_are_to_be_finished() -> None:
    done: list[str] = []
    thread, held = make([]), Held()
    thread.submit(0, (), held)
    assert held.has_begun.wait(WAIT_S)
    thread.submit(0, (), lambda: done.append("more"))
    closing = threading.Thread(target=thread.close)
    closing.start()
    with thread._changed:
        assert thread._changed.wait_for(lambda: thread._closed, WAIT_S)
    held.may_end.set()
    closing.join(WAIT_S)
    assert done == []


def test_after_a_failure_nothing_more_is_done() -> None:
    failures: list[BaseException] = []
    done: list[str] = []
    thread, held = make(failures), Held()

    def fail() -> None:
        held()
        raise ValueError("no")

    thread.submit(0, (), fail)
    assert held.has_begun.wait(WAIT_S)
    thread.submit(0, (), lambda: done.append("more"))
    held.may_end.set()
    thread.close(finishes=True)
    assert [str(error) for error in failures] == ["no"]
    assert done == []


def test_a_thread_that_has_had_no_job_ends_at_once() -> None:
    make([]).close()
