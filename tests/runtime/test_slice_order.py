"""Which slice begins next, and which bound holds for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from syncline.runtime.active import PATIENCE_S, SliceOrder

ORDER = itertools.count()


class Call:
    """What the order looks at in an active call."""

    def __init__(self, urgency: int, *, connection_class: int = 0, num_slices: int = 1000) -> None:
        self.call = SimpleNamespace(urgency=urgency, connection_class=connection_class)
        self.order = next(ORDER)
        self.runs: list[Any] = []
        self.num_left = num_slices

    @property
    def has_more(self) -> bool:
        return self.num_left > 0

    def begin(self, run: Any) -> None:
        self.num_left -= 1
        self.runs.append(run)


class Clock:
    """Time that stands still until it is moved; timers go off when it is."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, Callable[..., object]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, callback: Callable[..., object], *_: object) -> Any:
        self.timers.append((self.now_s + delay, callback))
        return SimpleNamespace()

    def move(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for timer in self.timers if timer[0] <= self.now_s]
        self.timers = [timer for timer in self.timers if timer[0] > self.now_s]
        for _, callback in due:
            callback()


class Ranked:
    """A slice order with a clock, and the slices that it let begin."""

    def __init__(self, limit: int = 8) -> None:
        self.clock = Clock()
        self.found: list[Call] = []
        self.order = SliceOrder(limit, self.clock, self.fill)

    def fill(self, size: int = 4) -> None:
        """Begin all that may begin."""
        while (active := self.order.next()) is not None:
            run: Any = SimpleNamespace(num_bytes=size)
            call: Any = active
            call.begin(run)
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

    def wait(self, seconds: float) -> list[Call]:
        """Let time go by; return of which slices began."""
        before = len(self.found)
        self.clock.move(seconds)
        return self.found[before:]


def test_a_call_begins_slices_up_to_the_bound() -> None:
    only, one = Call(0), Ranked()
    assert one.add(only) == [only, only]
    assert one.order.inflight_bytes == 8
    assert one.end(only) == [only]


def test_a_less_urgent_call_begins_when_there_is_room() -> None:
    front, rear, one = Call(0, num_slices=3), Call(5), Ranked()
    assert one.add(front, rear) == [front, front]
    assert one.end(front) == [front]
    assert one.end(front) == [rear]
    assert one.end(front) == [rear]


def test_an_urgent_call_has_room_of_its_own_beside_what_was_begun_before() -> None:
    rear, front, frontmost, one = Call(5), Call(1), Call(0), Ranked()
    assert one.add(rear, front) == [rear, rear, front, front]
    assert one.add(frontmost) == [], "twice the bound in all"
    assert one.end(rear) == [frontmost]


def test_what_is_under_way_in_a_less_urgent_class_holds_nothing_up() -> None:
    rear, front, one = Call(5, connection_class=1), Call(0, connection_class=0), Ranked()
    assert one.add(Call(9, connection_class=1), rear, front)[-2:] == [front, front]
    assert one.order.inflight_bytes == 24


def test_what_is_under_way_in_a_more_urgent_class_counts_for_the_others() -> None:
    front, rear, one = Call(0, num_slices=2), Call(5, connection_class=1), Ranked()
    assert one.add(front, rear) == [front, front]
    assert one.end(front) == [rear]


def test_when_nothing_moves_each_call_begins_one_slice() -> None:
    front, middle, rear, one = Call(0), Call(1), Call(2), Ranked()
    assert one.add(front, middle, rear) == [front, front]
    assert one.wait(PATIENCE_S / 2) == []
    assert one.wait(PATIENCE_S) == [middle, rear]
    assert one.wait(10 * PATIENCE_S) == [], "each has one under way"
    assert one.clock.timers == []


def test_patience_begins_anew_with_each_sign_of_life() -> None:
    front, rear, one = Call(0), Call(1), Ranked()
    one.add(front, rear)
    for _ in range(10):
        assert one.wait(0.6 * PATIENCE_S) == []
        one.order.progressed()
    assert one.end(front) == [front]
    assert one.wait(0.9 * PATIENCE_S) == []
    assert one.wait(0.9 * PATIENCE_S) == [rear]


def test_after_idling_patience_is_whole() -> None:
    front, rear, one = Call(0), Call(1), Ranked()
    one.wait(1000 * PATIENCE_S)
    assert one.add(front, rear) == [front, front]


@given(data=st.data())
def test_ranks_that_call_in_different_orders_with_other_urgencies_never_stand_still(data: st.DataObject) -> None:
    num_calls, num_slices = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    everyone = [Ranked(limit=data.draw(st.sampled_from([1, 8]))) for _ in range(3)]
    calls = [[Call(data.draw(st.integers(0, 3)), num_slices=num_slices) for _ in range(num_calls)] for _ in everyone]
    for one, own in zip(everyone, calls, strict=True):
        one.add(*data.draw(st.permutations(own)))
    num_waits = 0
    while any(call.has_more or call.runs for own in calls for call in own):
        # A slice ends when it is under way everywhere; a call's slices, in their order.
        together = [call for call in zip(*calls, strict=True) if all(part.runs for part in call)]
        if together:
            for one, part in zip(everyone, data.draw(st.sampled_from(together)), strict=True):
                one.end(part)
            continue
        num_waits += 1
        assert num_waits <= 4 * num_calls * num_slices, "they wait for each other forever"
        for one in everyone:
            one.wait(2 * PATIENCE_S)
