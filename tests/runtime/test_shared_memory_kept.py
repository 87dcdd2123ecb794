"""Calls that are prepared once and made again: their bits, whoever else makes them otherwise, and how they fail."""

import os
import random
import threading

import numpy as np
import pytest
from segment_ranks import on_all

from syncline.errors import DeadlineError, MismatchError, PeerLostError
from syncline.fabric import _native
from syncline.runtime import numpy_reduction
from syncline.runtime.reduction import BITWISE_OPS, DTYPES, OPS
from syncline.runtime.shared_memory.opening import can_share
from syncline.runtime.shared_memory.operation import steps_of

pytestmark = pytest.mark.skipif(not can_share(2), reason="this platform has no segment")

FLOAT32 = numpy_reduction("float32")


class Numbers:
    """An array as a tensor shows itself."""

    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    def view(self):
        return memoryview(self.array).cast("B")


def keep(communicator, array, reduction=FLOAT32, **settings):
    kept = communicator.keep(array.nbytes, reduction, view=Numbers.view, **settings)
    assert kept is not None
    return kept


def make(communicator, array, reduction=FLOAT32, timeout_s=60.0, **settings):
    return keep(communicator, array, reduction, **settings).make(Numbers(array), timeout_s)


def make_in_any_way(communicator, array, reduction=FLOAT32, **settings):
    """Make it in the usual way where it has to go that way: others may have failed before this rank comes."""
    if not make(communicator, array, reduction, **settings):
        communicator.all_reduce(memoryview(array).cast("B"), reduction, is_awaited=True, **settings).wait(60)


def num_calls(communicator):
    return sum(communicator._shared_memory[0].num_calls.values())


def kinds():
    return [(dtype, op) for dtype in DTYPES for op in OPS if not (op in BITWISE_OPS and dtype.startswith("float"))]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_the_bits_are_those_of_calls_that_are_not_kept(in_shared_memory, num_ranks):
    communicators = in_shared_memory(num_ranks)
    source = np.random.default_rng(num_ranks)
    for dtype, op in kinds():
        assert _native.can_add(dtype, op)
        reduction = numpy_reduction(dtype, op)
        for num_elements in (1, 1001, 40_000 // num_ranks):
            arrays = [(source.normal(size=num_elements) * 100).astype(dtype) for _ in communicators]
            twins = [array.copy() for array in arrays]

            def both(communicator, arrays=arrays, twins=twins, reduction=reduction):
                rank = communicator.rank
                assert make(communicator, arrays[rank], reduction)
                view = memoryview(twins[rank]).cast("B")
                communicator.all_reduce(view, reduction, is_awaited=True).wait(60)

            assert on_all(communicators, both) == [None] * num_ranks
            assert {array.tobytes() for array in arrays} == {twins[0].tobytes()}, (dtype, op)
    num_made = 2 * 3 * len(kinds())
    assert [num_calls(communicator) for communicator in communicators] == [num_made] * num_ranks


@pytest.mark.parametrize("seed", range(4))
def test_each_rank_may_make_each_call_in_its_own_way(in_shared_memory, seed):
    communicators = in_shared_memory(3)
    plan = random.Random(seed)
    ways = [[plan.choice(["kept", "awaited", "later"]) for _ in range(60)] for _ in communicators]

    def body(communicator):
        works = []
        for number, way in enumerate(ways[communicator.rank]):
            array = np.full(1000, number + communicator.rank, "f4")
            if way != "kept" or not make(communicator, array):  # one that is late with others reads what it would use
                view = memoryview(array).cast("B")
                work = communicator.all_reduce(view, FLOAT32, is_awaited=way != "later")
                works.append((work, array, 3.0 * number + 3.0))
            else:
                assert (array == 3.0 * number + 3.0).all()
        for work, array, expected in works:
            work.wait(60)
            assert (array == expected).all()

    assert on_all(communicators, body) == [None] * 3
    assert len({num_calls(communicator) for communicator in communicators}) == 1


def test_what_is_to_be_done_with_the_sum_is_done(in_shared_memory):
    arrays = [np.ones(10, "f4"), np.full(10, 3, "f4")]

    def halve(numbers):
        numbers.array /= 2

    def body(communicator):
        assert make(communicator, arrays[communicator.rank], finish=halve, op="mean")

    assert on_all(in_shared_memory(2), body) == [None, None]
    assert [array.tolist() for array in arrays] == [[2.0] * 10] * 2


def test_calls_that_differ_fail_on_every_rank(in_shared_memory):
    def body(communicator):
        make_in_any_way(communicator, np.ones(10 + communicator.rank // 2, "f4"))

    for error in on_all(in_shared_memory(3), body):
        assert isinstance(error, MismatchError), error
        assert "called all_reduce of 10 x float32" in str(error)
        assert "rank 2 (host memory) called all_reduce of 11 x float32" in str(error)


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "awaited"])
def test_a_barrier_is_no_sum_of_a_byte(in_shared_memory, is_kept):
    byte = numpy_reduction("uint8")

    def body(communicator):
        barrier = communicator.rank == 0
        if is_kept:
            make_in_any_way(communicator, np.ones(1, "u1"), byte, op="barrier" if barrier else "sum")
        elif barrier:
            communicator.barrier(is_awaited=True).wait(60)
        else:
            communicator.all_reduce(memoryview(bytearray(1)), byte, is_awaited=True).wait(60)

    for error in on_all(in_shared_memory(3), body):
        assert isinstance(error, MismatchError), error


def test_a_rank_that_does_not_come_is_named(in_shared_memory):
    def body(communicator):
        if communicator.rank != 1:
            make_in_any_way(communicator, np.ones(10, "f4"), timeout_s=0.5)

    first, nothing, third = on_all(in_shared_memory(3), body)
    assert nothing is None
    for error in (first, third):
        assert isinstance(error, DeadlineError), error
        assert "rank 1 (host memory) sent nothing of all_reduce" in str(error)


def test_whoever_waits_is_let_go_when_a_rank_ends(in_shared_memory):
    communicators = in_shared_memory(2)
    begins = threading.Barrier(2)

    def body(communicator):
        begins.wait(60)
        if communicator.rank == 0:
            communicator.abort()
        elif not make(communicator, np.ones(10, "f4")):  # it was known before
            communicator.barrier(is_awaited=True).wait(60)

    nothing, error = on_all(communicators, body)
    assert nothing is None
    assert isinstance(error, PeerLostError)


def test_what_cannot_be_made_at_once_is_left(in_shared_memory, monkeypatch):
    communicators = in_shared_memory(2)
    array = np.ones(10, "f4")
    kept = keep(communicators[0], array)
    assert communicators[0].keep(3 << 20, FLOAT32, view=Numbers.view) is None
    collectives = communicators[0]._shared_memory[0]
    with collectives._lock:
        assert not kept.make(Numbers(array), 60)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a forked child, which has not got the memory
    assert not kept.make(Numbers(array), 60)
    monkeypatch.undo()
    assert num_calls(communicators[0]) == 0
    assert communicators[0]._shared_memory[0]._segment.number == 0
    del collectives
    communicators[0].close()
    assert not kept.make(Numbers(array), 60)


@pytest.mark.parametrize("steps", [[], [0, 1], [-1], [0, -1, 1], [0, 2, -1]])
def test_steps_that_are_no_sum_are_refused(steps):
    with pytest.raises(ValueError, match="no sum"):
        _native.SumOrder("float32", "sum", steps, 2)
    with pytest.raises(ValueError, match="there is no band of float32"):
        _native.SumOrder("float32", "band", [0, 1, -1], 2)


def test_steps_say_in_which_order_is_added():
    assert steps_of(0) == [0]
    assert steps_of((2, 0, 1)) == [2, 0, -1, 1, -1]
    assert steps_of((0, (1, (2, 3)))) == [0, 1, 2, 3, -1, -1, -1]
