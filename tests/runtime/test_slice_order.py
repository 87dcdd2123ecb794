"""Which slice begins next, and which bound holds for it."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from syncline.runtime.active import SliceOrder

ORDER = itertools.count()


class Call:
    """What the order looks at in an active call."""

    def __init__(self, urgency: int, *, connection_class: int = 0, num_slices: int = 1000) -> None:
        self.call = SimpleNamespace(urgency=urgency, connection_class=connection_class)
        self.order = next(ORDER)
        self.runs: list[Any] = []
        self.num_left = num_slices
        self.largest_slice_bytes = 0

    @property
    def has_more(self) -> bool:
        return self.num_left > 0


class Ranked:
    """A slice order, and the slices that it let begin."""

    def __init__(self, limit: int = 8) -> None:
        self.found: list[Call] = []
        self.order = SliceOrder(limit)

    def fill(self, size: int = 4) -> None:
        """Begin all that may begin."""
        while (active := self.order.next()) is not None:
            call: Any = active
            run: Any = SimpleNamespace(num_bytes=size)
            call.num_left -= 1
            call.runs.append(run)
            self.order.began(active, run)
            self.found.append(call)

    def add(self, *calls: Any) -> list[Call]:
        """Add calls one after another; return of which a slice began."""
        before = len(self.found)
        for call in calls:
            self.order.add(call)
            self.fill()
        return self.found[before:]

    def end(self, call: Any) -> list[Call]:
        """End a slice; return of which slices began then."""
        before = len(self.found)
        self.order.ended(call, call.runs.pop())
        self.fill()
        return self.found[before:]


def test_a_call_begins_slices_up_to_the_bound() -> None:
    only, one = Call(0), Ranked()
    assert one.add(only) == [only, only]
    assert one.order.inflight_bytes == 8
    assert one.end(only) == [only]


def test_a_less_urgent_call_has_one_slice_while_the_urgent_one_fills_the_bound() -> None:
    front, rear, one = Call(0, num_slices=3), Call(5), Ranked()
    assert one.add(front, rear) == [front, front, rear]
    assert one.end(rear) == [rear], "never none"
    assert one.end(front) == [front]
    assert one.end(front) == [], "the last one of the front and one of the rear"
    assert one.end(front) == [rear]


def test_an_urgent_call_has_room_of_its_own_beside_what_was_begun_before() -> None:
    rear, front, one = [Call(number) for number in range(1, 9)], Call(0), Ranked()
    one.add(*rear)
    assert one.add(front) == [front, front]


def test_calls_each_more_urgent_than_the_last_have_twice_the_bound_in_all_but_for_a_slice_each() -> None:
    rear, middle, front, frontmost, one = Call(5), Call(4), Call(3), Call(2), Ranked()
    assert one.add(rear, middle, front, frontmost) == [rear, rear, middle, middle, front, front, frontmost]
    assert one.end(rear) == [frontmost]


def test_what_is_under_way_in_a_less_urgent_class_holds_nothing_up() -> None:
    rear, one = [Call(number, connection_class=1) for number in range(9, 3, -1)], Ranked()
    one.add(*rear)
    front = Call(0)
    assert one.add(front) == [front, front]


def test_what_is_under_way_in_a_more_urgent_class_counts_for_the_others() -> None:
    front, rear, one = Call(0, num_slices=2), Call(5, connection_class=1), Ranked()
    assert one.add(front, rear) == [front, front, rear], "every call has at least one slice under way"
    assert one.end(front) == []
    assert one.end(front) == [rear]


@given(seed=st.integers(0, 1 << 32), limit=st.sampled_from([1, 8, 20]))
def test_whatever_ends_first_every_call_goes_on_and_the_bound_holds(seed: int, limit: int) -> None:
    generator, one, size = random.Random(seed), Ranked(limit), 4
    calls = [Call(generator.randrange(6), num_slices=generator.randrange(1, 7)) for _ in range(6)]
    waiting = list(calls)
    while waiting or any(call.runs for call in calls):
        begun = [call for call in calls if call.runs]
        if waiting and (not begun or generator.random() < 0.5):
            one.add(waiting.pop())
        else:
            one.end(generator.choice(begun))
        open_calls = [call for call in calls if call not in waiting and (call.has_more or call.runs)]
        assert all(call.runs for call in open_calls), "ranks that order calls differently would wait for each other"
        assert one.order.inflight_bytes <= 2 * limit + size * (len(open_calls) + 1)
    assert not any(call.has_more for call in calls)
    assert not one.order.has_more
    assert one.order.inflight_bytes == 0
