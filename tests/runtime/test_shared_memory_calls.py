"""Calls over shared memory, by ranks in threads: the engine's bits, counters, order and errors."""

import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from segment_ranks import on_all

from syncline.errors import DeadlineError, FabricClosedError, FabricError, MismatchError, PeerLostError
from syncline.observe import Trace, gather_events
from syncline.runtime import numpy_reduction
from syncline.runtime.reduction import DTYPES
from syncline.runtime.shared_memory.opening import can_share

pytestmark = pytest.mark.skipif(not can_share(2), reason="this platform has no segment")

FLOAT32 = numpy_reduction("float32")


def make(communicator, kind, array, *, is_awaited=True, **settings):
    """Make one call; end when it is over."""
    view = memoryview(array).cast("B") if array.nbytes else memoryview(bytearray())
    settings |= {"is_awaited": is_awaited}
    if kind == "broadcast":
        communicator.broadcast(view, **settings).wait(60)
    else:
        getattr(communicator, kind)(view, numpy_reduction(array.dtype.name), **settings).wait(60)


def num_calls_in_shared_memory(communicator):
    return sum(communicator._shared_memory[0].num_calls.values())


def random_arrays(num_ranks, num_elements, dtype, seed):
    source = np.random.default_rng([seed, num_ranks, num_elements])
    values = source.normal(size=(num_ranks, num_elements)) * 10.0 ** source.integers(-2, 3, size=num_elements)
    return list(np.clip(values, -100, 100).astype(dtype))


def make_both_ways(communicators, kind, arrays):
    """Make one call over shared memory, and one with the engine, and compare what they promise."""
    twins = [array.copy() for array in arrays]

    def both(communicator):
        make(communicator, kind, arrays[communicator.rank])
        make(communicator, kind, twins[communicator.rank], is_awaited=False)

    assert on_all(communicators, both) == [None] * len(arrays)
    for rank, (array, twin) in enumerate(zip(arrays, twins, strict=True)):
        edges = [place * len(array) // len(arrays) for place in (rank, rank + 1)]
        result = slice(*edges) if kind == "reduce_scatter" else slice(None)
        assert array[result].tobytes() == twin[result].tobytes(), (kind, array.dtype, len(array))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_the_bits_are_those_of_the_engine(in_shared_memory, num_ranks):
    communicators = in_shared_memory(num_ranks)
    num_made = 0
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        for dtype in DTYPES:
            for num_elements in (0, 1, 7, 1001, 40_000):
                arrays = random_arrays(num_ranks, num_elements, dtype, num_made)
                make_both_ways(communicators, kind, arrays)
                num_made += 1
    assert [num_calls_in_shared_memory(communicator) for communicator in communicators] == [num_made] * num_ranks


@pytest.mark.parametrize("seed", range(4))
def test_each_rank_may_choose_for_each_call(in_shared_memory, seed):
    """Some wait, some do not, some calls are too large: every call has its result, and all take the same way."""
    communicators = in_shared_memory(3)
    plan = random.Random(seed)
    sizes = [plan.choice([1, 10, 1000, 700_000]) for _ in range(60)]
    ways = [[plan.random() < 0.8 for _ in sizes] for _ in range(3)]

    def body(communicator):
        works = []
        for number, size in enumerate(sizes):
            array = np.full(size, number + communicator.rank, np.float32)
            is_awaited = ways[communicator.rank][number]
            work = communicator.all_reduce(memoryview(array).cast("B"), FLOAT32, is_awaited=is_awaited)
            works.append((work, array, 3.0 * number + 3.0))
            if is_awaited:
                work.wait(60)
        for work, array, expected in works:
            work.wait(60)
            assert (array == expected).all()

    assert on_all(communicators, body) == [None] * 3
    in_shared_memory = [num_calls_in_shared_memory(communicator) for communicator in communicators]
    everybody_waits = sum(all(way) for way, size in zip(zip(*ways, strict=True), sizes, strict=True) if size < 700_000)
    assert in_shared_memory[0] == in_shared_memory[1] == in_shared_memory[2]
    assert 0 < in_shared_memory[0] <= everybody_waits


def test_counters_and_spans_are_those_of_the_engine(in_shared_memory, tmp_path):
    traces = [Trace(rank=rank, path=tmp_path / f"trace-{rank}.json") for rank in range(2)]
    (first, second) = in_shared_memory(2)
    first.trace, second.trace = traces
    for communicator, trace in zip((first, second), traces, strict=True):
        communicator._shared_memory[0]._trace = trace
    before = first.statistics()
    on_all((first, second), lambda each: make(each, "all_reduce", np.ones(1000, "f4"), label="sum", step=3))
    on_all((first, second), lambda each: make(each, "all_gather", np.ones(1000, "f4")))
    after = first.statistics()
    assert after.calls["all_reduce"] - before.calls["all_reduce"] == 1
    assert after.call_bytes["all_gather"] == 4000
    assert after.fabric.sent_bytes - before.fabric.sent_bytes == 4000 + 2000
    assert after.fabric.received_bytes - before.fabric.received_bytes == 4000 + 2000
    copied = after.fabric.by_class()[-2]
    assert (copied.sent_messages, copied.received_messages) == (2, 2)
    traces[0].flush()
    spans = [event for event in gather_events([tmp_path / "trace-0.json"]) if event["ph"] == "X"]
    assert (spans[0]["name"], spans[0]["args"]) == ("sum", {"bytes": 4000, "connection_class": 0, "step": 3})


@pytest.mark.parametrize(
    ("theirs", "is_awaited"),
    [(("all_reduce", 4_000_000), True), (("all_reduce", 1001), False), (("all_gather", 1000), True)],
    ids=["large", "asynchronous", "of another kind"],
)
def test_calls_that_differ_fail_on_every_rank(in_shared_memory, theirs, is_awaited):
    communicators = in_shared_memory(3)
    kind, size = theirs
    on_all(communicators, lambda each: make(each, "all_reduce", np.ones(5, "f4")))

    def body(communicator):
        if communicator.rank == 2:
            make(communicator, kind, np.ones(size, "f4"), is_awaited=is_awaited)
        else:
            make(communicator, "all_reduce", np.ones(1000, "f4"))

    for error in on_all(communicators, body):
        assert isinstance(error, MismatchError), error
        assert "; call 3 of stream 0 differs" in str(error), "two for the segment itself, one on it"
        assert "called all_reduce of 1000 x float32" in str(error)
        assert f"rank 2 (host memory) called {kind} of {size} x float32" in str(error)


def test_a_rank_that_does_not_come_is_named(in_shared_memory):
    """Ranks 0 and 1 call together, well within the deadline: whoever came after it would be named too."""
    communicators = in_shared_memory(3)
    both_call = threading.Barrier(2)

    def body(communicator):
        if communicator.rank != 2:
            both_call.wait(60)
            make(communicator, "all_reduce", np.ones(100, "f4"), timeout_s=2.0, step=8)

    *errors, nothing = on_all(communicators, body)
    assert nothing is None
    assert [type(error) for error in errors] == [DeadlineError] * 2
    text = r"rank 2 \(host memory\) sent nothing of all_reduce, step 8 for 2(\.[0-9])? s \(deadline 2 s\); "
    for error in errors:
        assert re.match(text + "(ranks 0 and 1 wait|rank . waits) for it", str(error))
    with pytest.raises(DeadlineError):
        communicators[2].barrier(is_awaited=True).wait(60)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_whoever_waits_is_let_go_when_a_rank_ends(in_shared_memory, end):
    """Rank 0 is closed by another thread while it waits; rank 1 waits too, for rank 2."""
    communicators = in_shared_memory(3)
    is_waiting = threading.Barrier(3)

    def body(communicator):
        is_waiting.wait(60)
        if communicator.rank != 2:
            make(communicator, "all_reduce", np.ones(100, "f4"), label="sum")
        else:
            getattr(communicators[0], end)()

    first, second, _ = on_all(communicators, body)
    assert isinstance(first, FabricClosedError)
    assert isinstance(second, PeerLostError)
    assert second.rank == 0
    assert "sum" in str(second)


def test_a_fault_of_our_own_ends_the_call_on_every_rank(in_shared_memory):
    communicators = in_shared_memory(2)

    class Broken:
        dtype, itemsize, op = "float32", 4, "sum"

        def add(self, into, other):
            raise AssertionError

        def add_both(self, into, first, second):
            raise ZeroDivisionError("planted")

    def body(communicator):
        adds = Broken() if communicator.rank == 0 else FLOAT32
        communicator.all_reduce(memoryview(bytearray(40)), adds, is_awaited=True).wait(60)
        communicator.barrier(is_awaited=True).wait(60)

    first, second = on_all(communicators, body)
    assert isinstance(first, FabricError)
    assert isinstance(first.__cause__, ZeroDivisionError)
    assert isinstance(second, PeerLostError)
    assert "planted" in str(second)


def test_calls_of_other_threads_wait_for_their_turn(in_shared_memory):
    """What another thread, or the loop, calls while this one meets is made after it, and nobody blocks."""
    communicators = in_shared_memory(2)
    (first, second) = communicators
    late = [np.ones(10, "f4"), np.ones(10, "f4")]
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(make, first, "all_reduce", np.ones(10, "f4"))
        while first._shared_memory[0]._segment.progress(0) < 2:
            first.statistics()
        work = first.all_gather(memoryview(late[0]).cast("B"), FLOAT32)
        first.statistics()
        assert not work.done()
        assert not meeting.done()
        make(second, "all_reduce", np.ones(10, "f4"))
        meeting.result(60)
        make(second, "all_gather", late[1], is_awaited=False)
        work.wait(60)
    assert num_calls_in_shared_memory(first) == 1
    assert on_all(communicators, lambda each: make(each, "all_reduce", np.ones(3, "f4"))) == [None, None]
    assert num_calls_in_shared_memory(first) == 2


@pytest.mark.parametrize("all_wait", [True, False], ids=["over shared memory", "with the engine"])
def test_a_part_that_is_elsewhere_is_gathered_too(in_shared_memory, all_wait):
    communicators = in_shared_memory(3)
    arrays = [np.full(10, -1.0, "f4") for _ in communicators]
    parts = [np.arange(size, dtype="f4") + 10 * rank for rank, size in enumerate([3, 3, 4])]

    def body(communicator):
        rank = communicator.rank
        settings = {"own_part": memoryview(parts[rank]).cast("B"), "is_awaited": all_wait or rank != 1}
        communicator.all_gather(memoryview(arrays[rank]).cast("B"), FLOAT32, **settings).wait(60)

    assert on_all(communicators, body) == [None] * 3
    assert [array.tolist() for array in arrays] == [np.concatenate(parts).tolist()] * 3
    assert num_calls_in_shared_memory(communicators[0]) == (1 if all_wait else 0)


def test_one_rank_that_does_not_want_a_segment_decides_for_all(in_memory):
    communicators = in_memory(3)
    answers = on_all(communicators, lambda each: each.open_segment(is_wanted=each.rank != 1))
    assert answers == [False] * 3
    on_all(communicators, lambda each: make(each, "all_reduce", np.ones(3, "f4")))
    assert communicators[0].statistics().calls == {"all_reduce": 2}


def test_a_segment_that_cannot_be_opened_is_none_for_all(in_memory, monkeypatch):
    from syncline.runtime.shared_memory import opening

    def refuse(ticket, *, rank, world_size):
        if rank == 1:
            raise PermissionError("planted")
        return original(ticket, rank=rank, world_size=world_size)

    original = opening.open_segment
    monkeypatch.setattr(opening, "open_segment", refuse)
    assert on_all(in_memory(3), lambda each: each.open_segment()) == [False] * 3


def test_a_ticket_for_something_else_opens_nothing(tmp_path):
    from syncline.runtime.shared_memory.opening import open_segment, segment_file

    with segment_file(2) as ticket:
        assert open_segment(ticket, rank=0, world_size=2).world_size == 2
        with pytest.raises(OSError, match="another job"):
            open_segment(ticket[:-1] + bytes([ticket[-1] ^ 1]), rank=0, world_size=2)
        with pytest.raises(OSError, match="is not the segment of 3 ranks"):
            open_segment(ticket, rank=0, world_size=3)
    with pytest.raises(OSError, match="No such file"):
        open_segment(ticket, rank=0, world_size=2)
