"""Whatever goes wrong, every rank gets an error that names who and what, and no buffer is written any more."""

import asyncio
import re
import threading

import numpy as np
import pytest

from syncline.errors import (
    ConfigurationError,
    DeadlineError,
    FabricClosedError,
    FabricError,
    MismatchError,
    PeerLostError,
    SynclineError,
)
from syncline.observe import Trace
from syncline.runtime import CollectiveCall, numpy_reduction
from syncline.schedule import PLANNERS, Collective, plan_tree
from syncline.topology import Topology

FLOAT32 = numpy_reduction("float32")


def view(num_elements, dtype="float32", value=1):
    return memoryview(np.full(num_elements, value, dtype)).cast("B")


def errors_of(works, timeout_s=60.0):
    errors = []
    for work in works:
        with pytest.raises(SynclineError) as caught:
            work.wait(timeout_s)
        errors.append(caught.value)
    return errors


def assert_nothing_is_posted(communicators):
    for communicator in communicators:
        statistics = communicator.statistics()
        assert statistics.fabric.pending_receives == 0
        assert statistics.num_pending_calls == 0


MISMATCHES = {
    "count": lambda odd: odd.all_reduce(view(1001), FLOAT32),
    "dtype": lambda odd: odd.all_reduce(view(1000, "int32"), numpy_reduction("int32")),
    "kind": lambda odd: odd.reduce_scatter(view(1000), FLOAT32),
    "root": lambda odd: odd.broadcast(view(1000), root=2),
    "barrier": lambda odd: odd.barrier(),
    "nothing": lambda odd: odd.all_reduce(view(0), FLOAT32),
}


@pytest.mark.parametrize("odd_rank", range(4))
@pytest.mark.parametrize("kind", MISMATCHES)
def test_calls_that_differ_are_an_error_on_every_rank_that_names_both(in_memory, kind, odd_rank):
    communicators = in_memory(4, seed=odd_rank)
    works = []
    for rank, communicator in enumerate(communicators):
        if rank == odd_rank:
            works.append(MISMATCHES[kind](communicator))
        elif kind == "root":
            works.append(communicator.broadcast(view(1000), root=0))
        else:
            works.append(communicator.all_reduce(view(1000), FLOAT32, label="sum of gradients", step=7))
    if kind == "root":  # a rank that has all it needs from ranks that agree with it finds out at its next call
        works = [*works, *(communicator.barrier() for communicator in communicators)][-4:]
    errors = errors_of(works)
    assert all(isinstance(error, MismatchError) for error in errors)
    for text in {str(error) for error in errors}:
        assert f"rank {odd_rank} (host memory) called" in text
        assert "same calls in the same order" in text
        assert re.match(r"rank \d+ \(host \w+\) called ", text), "numbers and hashes come after that"
    assert_nothing_is_posted(communicators)
    assert all(isinstance(communicator.failure, MismatchError) for communicator in communicators)


def test_a_barrier_is_no_sum_of_a_byte(in_memory):
    first, *others = in_memory(3)
    works = [first.barrier(), *(other.all_reduce(view(1, "uint8"), numpy_reduction("uint8")) for other in others)]
    for error in errors_of(works):
        assert isinstance(error, MismatchError)
        assert "(barrier)" in str(error)


def test_roots_and_sizes_of_parts_that_differ_are_told(in_memory):
    """Of many parts, the first that differs."""

    def texts_of(num_ranks, calls):
        communicators = in_memory(num_ranks)
        works = [calls[rank > 0](communicator) for rank, communicator in enumerate(communicators)]
        works = [*works, *(communicator.barrier() for communicator in communicators)]
        return {str(error) for error in errors_of(works[-num_ranks:])}

    def gather(parts):
        return lambda each: each.all_gather(memoryview(bytearray(sum(parts))), parts=parts)

    calls = [lambda each, root=root: each.broadcast(view(4), root=root) for root in (1, 0)]
    for text in texts_of(2, calls):
        assert "broadcast of 16 x uint8 from rank 1 (broadcast)" in text
        assert "broadcast of 16 x uint8 from rank 0 (broadcast)" in text
    for text in texts_of(2, [gather([5, 3]), gather([3, 5])]):
        assert "all_gather of 8 x uint8 in parts of 5, 3 (all_gather)" in text
        assert "all_gather of 8 x uint8 in parts of 3, 5 (all_gather)" in text
    for text in texts_of(9, [gather([1, 2, 3, *[4] * 6]), gather([1, 3, 2, *[4] * 6])]):
        assert "in parts of which rank 1's is 2 (all_gather)" in text
        assert "in parts of which rank 1's is 3 (all_gather)" in text
    for text in texts_of(9, [gather([1, 2, 3, *[4] * 6]), gather([])]):
        assert "in parts of which rank 0's is 1 (all_gather)" in text


def test_large_messages_of_calls_that_differ_do_not_wait_for_the_deadline(in_memory):
    communicators = in_memory(3, seed=4)
    sizes = [300_000, 300_000, 300_002]
    works = [c.all_reduce(view(size), FLOAT32) for c, size in zip(communicators, sizes, strict=True)]
    assert all(isinstance(error, MismatchError) for error in errors_of(works))


def test_every_call_after_a_mismatch_fails_with_it(in_memory):
    communicators = in_memory(2)
    errors_of([communicators[0].barrier(), communicators[1].all_reduce(view(5), FLOAT32)])
    later = errors_of([communicator.barrier() for communicator in communicators])
    assert all(isinstance(error, MismatchError) for error in later)


def test_swapped_calls_of_one_stream_are_found(in_memory):
    communicators = in_memory(2)
    works = [
        communicators[0].all_reduce(view(10), FLOAT32),
        communicators[0].broadcast(view(10)),
        communicators[1].broadcast(view(10)),
        communicators[1].all_reduce(view(10), FLOAT32),
    ]
    assert all(isinstance(error, MismatchError) for error in errors_of(works))


def test_a_rank_that_does_not_call_is_named_with_those_who_wait(in_memory):
    communicators = in_memory(4, planner=lambda topology, collective, *_: PLANNERS["ring"].plan(topology, collective))
    works = [
        communicator.all_reduce(view(100_000), FLOAT32, label="all_reduce of bucket 4", step=118, timeout_s=0.4)
        for communicator in communicators
        if communicator.rank != 2
    ]
    errors = errors_of(works)
    assert all(isinstance(error, DeadlineError) for error in errors)
    for error in errors:
        assert "rank 2 (host memory) sent nothing of" in str(error)
        assert "of all_reduce of bucket 4, step 118 for" in str(error)
        assert "rank 3" in str(error)
    assert_nothing_is_posted(communicators[:2])


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("alone_s", "together_s"), [(3.0, 2.4), (4.0, 9.0)])
def test_the_error_tells_in_which_other_call_the_accused_waits(in_memory, alone_s, together_s, is_late):
    """Whichever call's time is over first, and also where the second is made when half of the first's time is over."""
    communicators = in_memory(3)
    works = [broadcast_alone(communicators[0], "save(): call it on every rank", timeout_s=alone_s)]
    for communicator in communicators[1:]:
        while is_late and not communicator._engine._early_waits.is_any:
            communicator.statistics()  # a round through the loop
        works.append(communicator.all_reduce(view(10), FLOAT32, timeout_s=together_s))
    for error in errors_of(works):
        assert isinstance(error, DeadlineError)
        assert "save(): call it on every rank" in str(error)
        assert error.ranks_at_fault == (0,)


def broadcast_alone(communicator, label, *, timeout_s):
    """Make a call that the others do not."""
    schedule = communicator.plan(Collective.BROADCAST, 4)
    layout = communicator.layout(schedule, 1, 4)
    return communicator.submit(
        CollectiveCall(
            stream=5,
            schedule=schedule,
            layout=layout,
            buffer=view(1),
            reduction=FLOAT32,
            label=label,
            timeout_s=timeout_s,
        )
    )


def test_who_waits_in_a_newer_call_too_is_not_taken_for_who_makes_another(in_memory):
    """Rank 3 tells of its second call, which the others have not made yet, long before half of the first's time."""
    communicators = in_memory(4, planner=lambda topology, collective, *_: PLANNERS["ring"].plan(topology, collective))
    works = [
        one.all_reduce(view(10), FLOAT32, timeout_s=60 if one.rank == 3 else 3.0)
        for one in communicators
        if one.rank != 2
    ]
    works.append(broadcast_alone(communicators[3], "the next", timeout_s=4.0))
    for error in errors_of(works):
        assert isinstance(error, DeadlineError)
        assert error.ranks_at_fault == (2,)


def test_a_call_that_others_gave_up_fails_with_their_error(in_memory):
    communicators = in_memory(3)
    urgent = communicators[0].barrier(timeout_s=0.1)
    bulk = communicators[1].barrier(timeout_s=60)
    errors = errors_of([urgent, bulk])
    assert all("rank 2 (host memory) sent nothing" in str(error) for error in errors)


def test_a_rank_that_did_not_run_until_its_deadline_blames_itself(in_memory):
    communicators = in_memory(2)
    work = communicators[0].all_reduce(view(10), FLOAT32, label="sum", timeout_s=60)

    async def stand_still():
        loop = asyncio.get_running_loop()
        now_s = loop.time
        for away_s in (40.0, 140.0):  # half of the time is over, and then all of it
            loop.time = lambda away_s=away_s: now_s() + away_s
            for _ in range(3):
                await asyncio.sleep(0)

    communicators[0]._loop.run(stand_still(), 60)
    (error,) = errors_of([work])
    assert isinstance(error, DeadlineError)
    assert str(error).startswith("rank 0 (host memory) did not run for 70.")
    assert "sum (deadline 60 s) was not done before" in str(error)
    assert "rank 1" not in str(error)


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_dies_in_the_middle_is_named_everywhere(in_memory, seed):
    communicators = in_memory(4, seed=seed)
    buffers = [np.ones(400_000, np.float32) for _ in range(4)]
    works = [
        communicator.all_reduce(memoryview(buffer).cast("B"), FLOAT32, label="all_reduce of bucket 1", step=3)
        for communicator, buffer in zip(communicators, buffers, strict=True)
        if communicator.rank != 1
    ]
    communicators[1].abort()
    survivors = [communicator for communicator in communicators if communicator.rank != 1]
    for error in errors_of(works):
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
        assert "rank 1" in str(error)
        assert "during all_reduce of bucket 1, step 3; ranks 0, 2 and 3 wait for it" in str(error)
    assert_nothing_is_posted(survivors)
    for error in errors_of([survivor.barrier() for survivor in survivors]):
        assert isinstance(error, PeerLostError)
        assert "during barrier" in str(error)


def test_who_cannot_do_a_call_because_of_a_loss_tells_those_who_wait_for_it(in_memory):
    communicators = in_memory(3, planner=lambda topology, collective, *_: plan_tree(topology, collective))
    sent = communicators[0].broadcast(memoryview(bytearray(10)))  # the others get all they need of rank 0
    waits = communicators[2].broadcast(memoryview(bytearray(10)))  # but rank 2 waits for the word of rank 1
    sent.wait(60)
    communicators[0].abort()
    for error in errors_of([communicators[1].broadcast(memoryview(bytearray(10))), waits]):
        assert isinstance(error, PeerLostError)
        assert error.rank == 0


def test_a_rank_that_leaves_in_good_order_spoils_nothing(in_memory):
    for seed in range(10):
        communicators = in_memory(4, seed=seed)
        buffers = [np.ones(1000, np.float32) for _ in range(4)]
        works = [
            communicator.all_reduce(memoryview(buffer).cast("B"), FLOAT32)
            for communicator, buffer in zip(communicators, buffers, strict=True)
        ]
        closers = [threading.Thread(target=_close_after, args=pair) for pair in zip(communicators, works, strict=True)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        assert [work.exception() for work in works] == [None] * 4, f"seed {seed}"
        assert all((buffer == 4).all() for buffer in buffers)


def _close_after(communicator, work):
    work.wait(60)
    communicator.close()


def test_a_rank_that_leaves_without_a_call_is_named(in_memory):
    communicators = in_memory(3)
    works = [communicator.barrier() for communicator in communicators[:2]]
    communicators[2].close()
    for error in errors_of(works):
        assert isinstance(error, PeerLostError)
        assert "rank 2 (host memory) closed its communicator before barrier was done" in str(error)
    assert isinstance(errors_of([communicators[2].barrier()])[0], FabricClosedError)


def test_a_rank_that_left_is_named_by_later_calls(in_memory):
    communicators = in_memory(3)
    for work in [communicator.barrier() for communicator in communicators]:
        work.wait(60)
    communicators[0].close()
    for error in errors_of([communicator.barrier(timeout_s=60.0) for communicator in communicators[1:]]):
        assert isinstance(error, PeerLostError)
        assert error.rank == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_left_may_have_done_its_part_of_a_later_call(in_memory, seed):
    communicators = in_memory(3, seed=seed, planner=lambda topology, collective, *_: plan_tree(topology, collective))
    buffers = [np.full(10, rank + 5, np.uint8) for rank in range(3)]
    first = communicators[0].broadcast(memoryview(buffers[0]))
    last = communicators[2].broadcast(memoryview(buffers[2]))  # the root hears from the rank before it alone
    first.wait(60)
    communicators[0].close()
    communicators[1].broadcast(memoryview(buffers[1])).wait(60)
    last.wait(60)
    assert all((buffer == 5).all() for buffer in buffers)
    for error in errors_of([communicator.broadcast(memoryview(bytearray(10))) for communicator in communicators[1:]]):
        assert isinstance(error, PeerLostError)


def test_closing_ends_the_own_calls(in_memory):
    communicators = in_memory(2)
    work = communicators[0].all_reduce(view(10), FLOAT32, label="all_reduce of bucket 0")
    communicators[0].close()
    with pytest.raises(FabricClosedError, match="all_reduce of bucket 0 cannot be done: the communicator of rank 0"):
        work.wait(60)


class _Broken:
    dtype, itemsize, op = "float32", 4, "sum"

    def add(self, into, other):
        raise ZeroDivisionError("planted")

    add_both = add


def test_a_fault_of_our_own_ends_every_call_on_every_rank(in_memory):
    communicators = in_memory(3, seed=1)
    works = [communicators[0].all_reduce(view(10), _Broken())]
    works += [communicator.all_reduce(view(10), FLOAT32) for communicator in communicators[1:]]
    errors = errors_of(works)
    assert "planted" in str(errors[0])
    assert isinstance(errors[0], FabricError)
    assert isinstance(errors[0].__cause__, ZeroDivisionError)
    assert all(isinstance(error, PeerLostError) and error.rank == 0 for error in errors[1:])


def test_an_exception_that_no_one_caught_on_the_loop_ends_every_call(in_memory):
    communicators = in_memory(2)
    work = communicators[0].barrier()
    communicators[0]._loop.call_soon(lambda: 1 // 0)
    assert "ZeroDivisionError" in str(errors_of([work])[0])


def test_a_failed_call_leaves_its_buffer_alone(in_memory):
    communicators = in_memory(2)
    buffer = np.zeros(100_000, np.uint8)
    late = communicators[0].all_gather(memoryview(buffer), timeout_s=0.05)
    errors_of([late])
    buffer[:] = 7
    errors_of([communicators[1].all_gather(memoryview(np.ones(100_000, np.uint8)))])
    assert (buffer == 7).all()


def test_failures_are_marked_in_the_trace(in_memory, tmp_path):
    trace = Trace(rank=0, path=tmp_path / "trace.json")
    communicators = in_memory(2, trace=trace)
    errors_of([communicators[0].barrier(timeout_s=0.05)])
    trace.close()
    text = (tmp_path / "trace.json").read_text()
    assert '"failed: deadline"' in text
    assert '"name": "barrier"' in text


def test_a_schedule_for_another_number_of_ranks_is_refused(in_memory):
    communicators = in_memory(2)
    schedule = plan_tree(Topology.flat(3), Collective.ALL_REDUCE)
    layout = communicators[0].layout(schedule, 4, 4)
    call = CollectiveCall(
        stream=1, schedule=schedule, layout=layout, buffer=view(4), reduction=FLOAT32, label="x", timeout_s=5
    )
    with pytest.raises(ConfigurationError, match="schedule is for 3 ranks but the job has 2"):
        communicators[0].submit(call).wait(60)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffer": view(5)}, "must be 16 writable bytes"),
        ({"buffer": memoryview(bytes(16))}, "read-only"),
        ({"buffer": memoryview(np.zeros(4, np.float32))}, "format 'f'"),
        ({"timeout_s": 0}, "deadline lies in the future"),
    ],
)
def test_calls_that_cannot_be_are_refused(in_memory, changes, message):
    communicators = in_memory(2)
    schedule = communicators[0].plan(Collective.ALL_REDUCE, 16)
    settings = {
        "stream": 1,
        "schedule": schedule,
        "layout": communicators[0].layout(schedule, 4, 4),
        "buffer": view(4),
        "reduction": FLOAT32,
        "label": "x",
        "timeout_s": 5,
    }
    with pytest.raises(ConfigurationError, match=message):
        CollectiveCall(**{**settings, **changes})


def test_streams_beyond_sixteen_bits_are_refused(in_memory):
    communicators = in_memory(2)
    schedule = communicators[0].plan(Collective.ALL_REDUCE, 16)
    layout = communicators[0].layout(schedule, 4, 4)
    call = CollectiveCall(
        stream=1 << 16, schedule=schedule, layout=layout, buffer=view(4), reduction=FLOAT32, label="x", timeout_s=5
    )
    with pytest.raises(ConfigurationError, match="from 0 to 65535"):
        communicators[0].submit(call).wait(60)
