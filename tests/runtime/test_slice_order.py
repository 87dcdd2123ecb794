"""Which slice begins next, and which bound holds for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from syncline.runtime.active import SliceOrder


class Call:
    """What the order looks at in an active call."""

    def __init__(self, urgency: int, *, connection_class: int = 0) -> None:
        self.call = SimpleNamespace(urgency=urgency, connection_class=connection_class)
        self.order = urgency
        self.runs: set[int] = set()
        self.has_more = True


def begin(order: SliceOrder, size: int = 4) -> Any:
    """Begin the next slice, if one may begin; return its call."""
    active: Any = order.next()
    if active is not None:
        run: Any = SimpleNamespace(num_bytes=size)
        active.runs.add(len(active.runs))
        order.began(active, run)
    return active


def begun(*calls: Call, limit: int = 8) -> tuple[SliceOrder, list[Call]]:
    """Add the calls one after another, each time beginning all that may begin."""
    order = SliceOrder(limit)
    found = []
    for added in calls:
        order.add(added)  # type: ignore[arg-type]
        while (active := begin(order)) is not None:
            found.append(active)
    return order, found


def test_a_call_begins_slices_up_to_the_bound() -> None:
    only = Call(0)
    order, found = begun(only)
    assert found == [only, only]
    assert order.inflight_bytes == 8


def test_in_one_class_an_urgent_call_has_one_slice_while_earlier_ones_fill_the_bound() -> None:
    rear, front = Call(5), Call(0)
    _, found = begun(rear, front)
    assert found == [rear, rear, front]


def test_what_is_under_way_in_a_less_urgent_class_holds_nothing_up() -> None:
    rear, front = Call(5, connection_class=1), Call(0, connection_class=0)
    order, found = begun(rear, front)
    assert found == [rear, rear, front, front]
    assert order.inflight_bytes == 16


def test_what_is_under_way_in_a_more_urgent_class_counts_for_the_others() -> None:
    front, rear = Call(0, connection_class=0), Call(5, connection_class=1)
    front.has_more = True
    order, found = begun(front)
    front.has_more = False
    order.add(rear)  # type: ignore[arg-type]
    assert begin(order) is rear  # every call has at least one slice under way
    assert begin(order) is None
    assert found == [front, front]
