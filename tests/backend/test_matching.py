"""Which message a receive gets."""

from __future__ import annotations

import pytest

from syncline.backend.matching import MAX_UNEXPECTED, MessageHead, MessageMatcher
from syncline.errors import FabricError


def head(source: int, tag: int, number: int = 0) -> MessageHead:
    return MessageHead(source=source, tag=tag, num_bytes=0, number=number, inline=b"")


def test_messages_of_one_rank_and_tag_are_received_in_order() -> None:
    matcher: MessageMatcher[str] = MessageMatcher()
    first, second, other = head(1, 5, 0), head(1, 5, 1), head(1, 6, 2)
    assert [matcher.arrive(one) for one in (first, second, other)] == [None] * 3
    assert matcher.ask(1, 6, "a") is other
    assert matcher.ask(1, 5, "b") is first
    assert matcher.ask(1, 5, "c") is second
    assert matcher.ask(1, 5, "d") is None
    assert matcher.arrive(head(2, 5)) is None
    assert matcher.arrive(head(1, 5)) == "d"


def test_a_receive_from_anyone_takes_the_message_that_came_first() -> None:
    matcher: MessageMatcher[str] = MessageMatcher()
    late, early = head(1, 0), head(2, 0)
    matcher.arrive(early)
    matcher.arrive(late)
    assert matcher.ask(None, 0, "a") is early
    assert matcher.ask(None, 0, "b") is late


def test_receives_are_served_in_the_order_in_which_they_were_asked_for() -> None:
    matcher: MessageMatcher[str] = MessageMatcher()
    assert matcher.ask(None, 0, "anyone") is None
    assert matcher.ask(1, 0, "one") is None
    assert matcher.arrive(head(1, 0)) == "anyone"
    assert matcher.arrive(head(1, 0)) == "one"
    assert matcher.arrive(head(1, 0)) is None


def test_a_withdrawn_receive_gets_nothing() -> None:
    matcher: MessageMatcher[str] = MessageMatcher()
    matcher.ask(1, 0, "a")
    matcher.ask(1, 0, "b")
    matcher.withdraw(1, 0, "a")
    matcher.withdraw(1, 7, "a")
    assert matcher.arrive(head(1, 0)) == "b"
    matcher.ask(1, 0, "c")
    matcher.withdraw(1, 0, "c")
    assert matcher.arrive(head(1, 0)) is None


def test_too_many_messages_that_nobody_asks_for_are_refused() -> None:
    matcher: MessageMatcher[str] = MessageMatcher()
    for number in range(MAX_UNEXPECTED):
        matcher.arrive(head(1, number % 7, number))
    with pytest.raises(FabricError, match="rank 1 has sent more than"):
        matcher.arrive(head(1, 0))
    assert matcher.arrive(head(2, 0)) is None
    assert matcher.ask(1, 0, "a") is not None
    assert matcher.arrive(head(1, 0)) is None
