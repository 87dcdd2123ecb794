"""Who is still there while ranks meet and connect, and what those that gave up said; through the store alone.

Before ranks are connected, nothing else tells that one of them died. Each writes a number that grows, its *pulse*:
rank 0 looks at the pulses of all, the others at rank 0's. One that moved before and then stands for too long is gone;
one that never moved may be a key that an earlier attempt left behind, or a rank that is late. Whoever gives up tells
rank 0, and rank 0 tells all, in keys that hold the nonce of whom they are for, so that no later attempt reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

BEAT_S = 0.5
MAX_TEXT = 4000


class Records(Protocol):
    """The store, as the rendezvous writes and reads it: JSON, with None for what is not there."""

    def set(self, key: str, value: object) -> None:
        """Write a record."""

    def get(self, key: str) -> Any:
        """Return what is there now."""


class Presence:
    """One rank's part in this."""

    def __init__(
        self, records: Records, rank: int, nonce: str, *, silence_s: float, now_s: Callable[[], float]
    ) -> None:
        self._records = records
        self._rank = rank
        self._nonce = nonce
        self._silence_s = silence_s
        self._now_s = now_s
        self._writing = threading.Lock()
        self._rests = False
        self._num_beats = 0
        self._beat_s = float("-inf")
        self._pulses: dict[int, object] = {}
        self._moved_s: dict[int, float] = {}

    def beat(self, watched: Iterable[int]) -> list[int]:
        """Let the pulse go on, and return those of ``watched`` that are gone; call it often."""
        now_s = self._now_s()
        if now_s - self._beat_s < min(BEAT_S, self._silence_s / 10):
            return []
        slept_s = now_s - self._beat_s - self._silence_s / 2
        if 0 < slept_s < float("inf"):  # this rank itself was away, and that does not count against the others
            self._moved_s = dict.fromkeys(self._moved_s, now_s)
        self._beat_s = now_s
        self._num_beats += 1
        with self._writing:  # another thread may let this rank rest, and the last word is that
            if not self._rests:
                self._records.set(f"pulse/{self._rank}", [self._nonce, self._num_beats])
        return [rank for rank in watched if self._is_gone(rank, now_s)]

    def vouch(self, ranks: Iterable[int]) -> None:
        """Take these for ranks of this attempt, which were there a moment ago, though their pulses did not move yet."""
        for rank in ranks:
            self._moved_s.setdefault(rank, self._now_s())

    def is_heard(self, rank: int) -> bool:
        """Whether the pulse of a rank that is watched has moved."""
        return rank in self._moved_s

    def rest(self) -> None:
        """Let nobody expect the pulse to go on: this rank is connected to all others, which now see for themselves."""
        with self._writing:
            self._rests = True
            self._records.set(f"pulse/{self._rank}", [self._nonce, -1])

    def heard(self) -> str | None:
        """Return why some rank gave up, if one did."""
        text = self._records.get(f"failed/{self._nonce}")
        return text[:MAX_TEXT] if isinstance(text, str) else None

    def tell(self, text: str, nonces: Mapping[int, str]) -> None:
        """Say why this rank gives up: to all of ``nonces`` if it is rank 0, else to rank 0, which passes it on."""
        for rank, nonce in nonces.items():
            if rank != self._rank and (self._rank == 0 or rank == 0):
                self._records.set(f"failed/{nonce}", text[:MAX_TEXT])

    def _is_gone(self, rank: int, now_s: float) -> bool:
        pulse = self._records.get(f"pulse/{rank}")
        if isinstance(pulse, list) and pulse[-1:] == [-1]:
            self._moved_s.pop(rank, None)
            return False
        if rank not in self._pulses:
            self._pulses[rank] = pulse
            return False
        if pulse != self._pulses[rank]:
            self._pulses[rank] = pulse
            self._moved_s[rank] = now_s
        return now_s - self._moved_s.get(rank, now_s) >= self._silence_s
