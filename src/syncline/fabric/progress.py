"""How far training threads are: this rank's own counter, and what the heartbeats of the others tell of theirs.

Heartbeats come from the communication thread, so they prove that a process lives, not that it trains. Each therefore
carries the number of calls that the rank's training thread has begun, and whether it waits in one at the moment. A rank
that computes, or hangs, is *still* as long as that number does not change; one that waits for others never is. A rank
that has been still for longer than the user's limit is *stalled*. What follows from it is for those who wait to say:
a collective ends with an error, a tolerant update rule goes on without the rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

StallHandler = Callable[[int, bool], None]
"""Told on the communication loop's thread that a rank is stalled (True), or moves again (False)."""
MAX_VALUE = (1 << 64) - 1


class Progress:
    """What this rank's training threads have begun; any thread but the communication loop's may say so.

    >>> progress = Progress()
    >>> progress.touch()
    >>> with progress.waiting():
    ...     progress.value
    5
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._waiting: dict[int, int] = {}
        self._wait = _Wait(self)
        self._holding = threading.Lock()
        self._num_held = 0

    def __repr__(self) -> str:
        return f"<Progress: {self._num_calls} calls{', waiting' * self.is_waiting}>"

    @property
    def is_waiting(self) -> bool:
        """Whether some thread waits in a call for other ranks, or is held to."""
        return bool(self._waiting) or self._num_held > 0

    @property
    def value(self) -> int:
        """What a heartbeat carries: twice the number of calls, plus one while a thread waits in one."""
        return (2 * self._num_calls + self.is_waiting) & MAX_VALUE

    def touch(self) -> None:
        """Count a call."""
        self._num_calls += 1

    def waiting(self) -> AbstractContextManager[None]:
        """Count a call that waits for other ranks, and say so while it does: ``with progress.waiting(): ...``."""
        return self._wait

    def hold(self) -> None:
        """Say that somebody waits until :meth:`release`, as foreign code may where nothing of it is seen."""
        with self._holding:
            self._num_held += 1

    def release(self) -> None:
        """Take one :meth:`hold` back."""
        with self._holding:
            self._num_held -= 1


class _Wait:
    """A thread's wait, which may hold another; it has no state of its own, as a small call takes microseconds."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __enter__(self) -> None:
        progress, thread = self._progress, threading.get_ident()
        progress.touch()
        progress._waiting[thread] = progress._waiting.get(thread, 0) + 1

    def __exit__(self, *_: object) -> None:
        progress, thread = self._progress, threading.get_ident()
        depth = progress._waiting.pop(thread) - 1
        if depth:
            progress._waiting[thread] = depth
        progress.touch()


class PeerStalls(Protocol):
    """What a rank knows of the training threads of the others.

    >>> async def connect(): return memory_fabrics(2)
    >>> asyncio.run(connect())[0].stalls.stalled
    frozenset()
    """

    @property
    def limit_s(self) -> float:
        """From when on a rank that is still is stalled."""

    @property
    def stalled(self) -> frozenset[int]:
        """The ranks that are stalled."""

    def progress_of(self, peer: int) -> int:
        """Return the calls that the training thread of ``peer`` had begun at its last heartbeat."""

    def still_s(self, peer: int) -> float:
        """Return for how many seconds ``peer`` has neither begun a call nor waited in one, as far as is known here."""

    def watch(self, handler: StallHandler) -> None:
        """Tell ``handler`` of every change from now on."""

    def unwatch(self, handler: StallHandler) -> None:
        """Tell ``handler`` no more."""


class Stalls:
    """Judges by what heartbeats carry; whoever owns the heartbeats calls :meth:`tick`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._values: dict[int, int] = {}
        self._still_s: dict[int, float] = {}
        self._stalled: frozenset[int] = frozenset()
        self._handlers: list[StallHandler] = []

    def __repr__(self) -> str:
        return f"<Stalls: {sorted(self._stalled)} after {self.limit_s:g} s>"

    @property
    def stalled(self) -> frozenset[int]:
        """The ranks that are stalled."""
        return self._stalled

    def progress_of(self, peer: int) -> int:
        """Return the calls that the training thread of ``peer`` had begun at its last heartbeat."""
        return self._values.get(peer, 0) >> 1

    def still_s(self, peer: int) -> float:
        """Return for how long ``peer`` has neither begun a call nor waited in one."""
        return self._still_s.get(peer, 0.0)

    def watch(self, handler: StallHandler) -> None:
        """Tell ``handler`` of every change from now on."""
        self._handlers.append(handler)

    def unwatch(self, handler: StallHandler) -> None:
        """Tell ``handler`` no more."""
        if handler in self._handlers:
            self._handlers.remove(handler)

    def tick(self, passed_s: float, values: Mapping[int, int]) -> None:
        """Take the last heartbeats' values of all peers that live; ``passed_s`` since the last time."""
        for peer, value in values.items():
            is_still = value == self._values.get(peer) and not value & 1
            self._still_s[peer] = self._still_s.get(peer, 0.0) + passed_s if is_still else 0.0
            self._values[peer] = value
        before = self._stalled
        self._stalled = frozenset(peer for peer in values if self._still_s[peer] >= self.limit_s)
        for peer in sorted(before ^ self._stalled):
            if peer in values:
                for handler in tuple(self._handlers):
                    handler(peer, peer in self._stalled)


class MemberStalls:
    """The same for a group, which numbers its members by their place in its list."""

    def __init__(self, stalls: PeerStalls, members: Sequence[int]) -> None:
        self._stalls = stalls
        self._members = tuple(members)
        self._translated: dict[StallHandler, StallHandler] = {}

    @property
    def limit_s(self) -> float:
        """The job's limit."""
        return self._stalls.limit_s

    @property
    def stalled(self) -> frozenset[int]:
        """The members that are stalled."""
        return frozenset(place for place, rank in enumerate(self._members) if rank in self._stalls.stalled)

    def progress_of(self, peer: int) -> int:
        """Return how many calls a member has begun, in all of the job."""
        return self._stalls.progress_of(self._members[peer])

    def still_s(self, peer: int) -> float:
        """Return how long a member has been still."""
        return self._stalls.still_s(self._members[peer])

    def watch(self, handler: StallHandler) -> None:
        """Tell ``handler`` of members."""

        def translated(rank: int, is_stalled: bool) -> None:
            if rank in self._members:
                handler(self._members.index(rank), is_stalled)

        self._translated[handler] = translated
        self._stalls.watch(translated)

    def unwatch(self, handler: StallHandler) -> None:
        """Tell ``handler`` no more."""
        if handler in self._translated:
            self._stalls.unwatch(self._translated.pop(handler))

    def close(self) -> None:
        """Tell nobody any more."""
        for handler in tuple(self._translated):
            self.unwatch(handler)
