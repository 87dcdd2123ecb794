"""Which slice begins next, and which bound holds for it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, strategies as st

from syncline.fabric import _native

NUMBERS = itertools.count()


class Ranked:
    """A slice order, and the slices that it let begin."""

    def __init__(self, limit: int = 8, size: int = 4) -> None:
        self.found: list[_native.Sliced] = []
        self.size = size
        self.order = _native.SliceOrder(limit)

    def call(self, urgency: int, *, connection_class: int = 0, num_slices: int = 1000) -> _native.Sliced:
        return _native.Sliced(urgency, connection_class=connection_class, number=next(NUMBERS), num_slices=num_slices)

    def fill(self) -> None:
        """Begin all that may begin."""
        while (call := self.order.next()) is not None:
            self.order.began(call, self.size)
            self.found.append(call)

    def add(self, *calls: _native.Sliced) -> list[_native.Sliced]:
        """Add calls one after another; return of which a slice began."""
        before = len(self.found)
        for call in calls:
            self.order.add(call)
            self.fill()
        return self.found[before:]

    def end(self, call: _native.Sliced) -> list[_native.Sliced]:
        """End a slice; return of which slices began then."""
        before = len(self.found)
        self.order.ended(call, self.size)
        self.fill()
        return self.found[before:]


@pytest.fixture
def one() -> Ranked:
    """An order with room for two slices."""
    return Ranked()


def test_a_call_begins_slices_up_to_the_bound(one: Ranked) -> None:
    only = one.call(0)
    assert one.add(only) == [only, only]
    assert one.order.inflight_bytes == 8
    assert one.end(only) == [only]


def test_a_less_urgent_call_has_one_slice_while_the_urgent_one_fills_the_bound(one: Ranked) -> None:
    front, rear = one.call(0, num_slices=3), one.call(5)
    assert one.add(front, rear) == [front, front, rear]
    assert one.end(rear) == [rear], "never none"
    assert one.end(front) == [front]
    assert one.end(front) == [], "the last one of the front and one of the rear"
    assert one.end(front) == [rear]


def test_an_urgent_call_has_room_of_its_own_beside_what_was_begun_before(one: Ranked) -> None:
    rear, front = [one.call(urgency) for urgency in range(1, 9)], one.call(0)
    one.add(*rear)
    assert one.add(front) == [front, front]


def test_calls_each_more_urgent_than_the_last_have_twice_the_bound_in_all_but_for_a_slice_each(one: Ranked) -> None:
    rear, middle, front, frontmost = (one.call(urgency) for urgency in (5, 4, 3, 2))
    assert one.add(rear, middle, front, frontmost) == [rear, rear, middle, middle, front, front, frontmost]
    assert one.end(rear) == [frontmost]


def test_what_is_under_way_in_a_less_urgent_class_holds_nothing_up(one: Ranked) -> None:
    one.add(*(one.call(urgency, connection_class=1) for urgency in range(9, 3, -1)))
    front = one.call(0)
    assert one.add(front) == [front, front]


def test_what_is_under_way_in_a_more_urgent_class_counts_for_the_others(one: Ranked) -> None:
    front, rear = one.call(0, num_slices=2), one.call(5, connection_class=1)
    assert one.add(front, rear) == [front, front, rear], "every call has at least one slice under way"
    assert one.end(front) == []
    assert one.end(front) == [rear]


def test_of_equally_urgent_calls_the_first_goes_first(one: Ranked) -> None:
    first, second = one.call(3, num_slices=4), one.call(3)
    assert one.add(first, second) == [first, first, second]
    assert one.end(second) == [second]
    assert one.end(first) == []
    assert one.end(first) == [first]


@given(seed=st.integers(0, 1 << 32), limit=st.sampled_from([1, 8, 20]))
def test_whatever_ends_first_every_call_goes_on_and_the_bound_holds(seed: int, limit: int) -> None:
    source, one = random.Random(seed), Ranked(limit)
    calls = [
        one.call(source.randrange(6), connection_class=source.randrange(2), num_slices=source.randrange(1, 7))
        for _ in range(6)
    ]
    waiting = list(calls)
    while waiting or any(call.num_active for call in calls):
        begun = [call for call in calls if call.num_active]
        if waiting and (not begun or source.random() < 0.5):
            one.add(waiting.pop())
        else:
            one.end(source.choice(begun))
        open_calls = [call for call in calls if call not in waiting and (call.has_more or call.num_active)]
        assert all(call.num_active for call in open_calls), "ranks that order calls differently would wait"
    assert not any(call.has_more for call in calls)
    assert one.order.next() is None
    assert one.order.inflight_bytes == 0


@given(seed=st.integers(0, 1 << 32), limit=st.sampled_from([1, 8, 20]))
def test_all_together_make_up_less_than_twice_the_bound_and_a_slice_each(seed: int, limit: int) -> None:
    source, one = random.Random(seed), Ranked(limit)
    calls = [one.call(source.randrange(6), num_slices=source.randrange(1, 7)) for _ in range(6)]
    for number, call in enumerate(calls, start=1):
        one.add(call)
        assert one.order.inflight_bytes <= 2 * limit + one.size * (number + 1)
        begun = [each for each in calls[:number] if each.num_active]
        one.end(source.choice(begun))
        assert one.order.inflight_bytes <= 2 * limit + one.size * (number + 1)
