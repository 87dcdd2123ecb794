"""Which message a receive gets: those of one rank and tag in the order in which they were sent and asked for.

Pure state: heads of messages and receives go in, matches come out. A receive from anyone takes the message that came
first.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from syncline.errors import FabricError

MAX_UNEXPECTED = 8192
"""Messages of one rank that nobody has asked for yet: each is some hundred bytes here, and more is a mistake."""

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class MessageHead:
    """A message that its sender has announced."""

    source: int
    tag: int
    num_bytes: int
    number: int
    """Its place among the messages of its source to this rank."""
    inline: bytes | bytearray | memoryview | None = None
    """The message itself, if it came with this, or has landed."""
    address: int = 0
    """Where it lies in its sender's memory, if it is to be copied from there."""
    num_read: int = 0
    """How much of it was."""
    is_put: bool = False
    """Whether it came through an inbox, where its sender has so much less room until it is asked for."""
    fetched: bytearray | None = None
    """Where a message that nobody has asked for yet lands, if it is of middling size."""
    on_fetched: Callable[[], None] | None = None
    """Told when it has landed, if somebody waits for that."""


class MessageMatcher(Generic[R]):
    """Matches heads with receives of type R."""

    def __init__(self) -> None:
        self._order = itertools.count()
        self._asked: dict[tuple[int | None, int], deque[tuple[int, R]]] = {}
        self._heads: dict[tuple[int, int], deque[tuple[int, MessageHead]]] = {}
        self._num_unexpected: dict[int, int] = {}

    def ask(self, source: int | None, tag: int, receive: R) -> MessageHead | None:
        """Return the head that ``receive`` gets, from ``source`` or (None) from anyone; else it waits for one."""
        if source is not None:
            key = (source, tag) if (source, tag) in self._heads else None
        else:
            there = [(heads[0][0], key) for key, heads in self._heads.items() if key[1] == tag]
            key = min(there)[1] if there else None
        if key is None:
            self._asked.setdefault((source, tag), deque()).append((next(self._order), receive))
            return None
        heads = self._heads[key]
        _, head = heads.popleft()
        if not heads:
            del self._heads[key]
        self._num_unexpected[head.source] -= 1
        return head

    def find(self, source: int, tag: int) -> R | None:
        """Return the receive that gets a message of ``source`` with ``tag``, which has come; None if none waits."""
        key: tuple[int | None, int] = source, tag
        waiting, from_anyone = self._asked.get(key), self._asked.get((None, tag))
        if from_anyone and not (waiting and waiting[0][0] < from_anyone[0][0]):
            key, waiting = (None, tag), from_anyone
        if not waiting:
            return None
        _, receive = waiting.popleft()
        if not waiting:
            del self._asked[key]
        return receive

    def arrive(self, head: MessageHead) -> R | None:
        """Return the receive that gets ``head``; else it is kept. FabricError if its source sends too many."""
        if (receive := self.find(head.source, head.tag)) is not None:
            return receive
        count = self._num_unexpected.get(head.source, 0) + 1
        if count > MAX_UNEXPECTED:
            raise FabricError(
                f"rank {head.source} has sent more than {MAX_UNEXPECTED} messages that nobody here has asked for; "
                "receive them, with the tags that they were sent with, or let the sender wait for its sends"
            )
        self._num_unexpected[head.source] = count
        self._heads.setdefault((head.source, head.tag), deque()).append((next(self._order), head))
        return None

    def withdraw(self, source: int | None, tag: int, receive: R) -> None:
        """Forget a receive that waits, if it still does."""
        waiting = self._asked.get((source, tag))
        kept = deque(one for one in waiting or () if one[1] is not receive)
        if kept:
            self._asked[source, tag] = kept
        elif waiting is not None:
            del self._asked[source, tag]
