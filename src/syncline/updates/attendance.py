"""Who is in which round: parties that are late hold up the others for a while only.

A round needs all ranks, as its sums go along a tree of all. But a rank whose training thread is late can take part
without it, with no weight. So rank 0 hears who has begun the next round, and decides which parties are in it, for all
alike. It waits for every party that came to the last one; once a quorum is there, for a *grace window* at most. Who is
left out of a round is not waited for in the next ones, until it tells that it begins one.

This is the decision alone, without clock or network. (After the quorum with a grace window of Decoupled DiLoCo,
arXiv:2604.21428, 2026.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from syncline.arguments import Bounds, Count, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Grace:
    """How long rounds wait for parties that are late: ``LocalSteps(pace=Grace(seconds=1.0))``.

    ``seconds``: for so long after ``quorum`` parties have begun a round; and so long a party waits for a quorum before
    it trains on. Shorter, and pauses hold up the others less; but who is left out brings what it has moved to a later
    round, so that the loss needs more samples. ``quorum``: how many parties are in a round at least. None: more than
    half.

    It is for training threads that are late: they load data, write files, share a device. A process that stands still
    as a whole holds up all, as sums go through it. Not for elastic jobs, and not with ``period="auto"``.

    Raises :class:`ConfigurationError` unless ``seconds`` is finite and from 0 up, and ``quorum`` from 1 up;
    ``distribute()`` raises it for a quorum of more parties than there are.

    >>> rule = syncline.LocalSteps(pace=syncline.Grace(seconds=2.0))
    >>> model, optimizer = syncline.distribute(model, optimizer, rule)
    >>> optimizer.statistics().num_left_out
    0
    """

    seconds: Annotated[float, Bounds(0, below=math.inf)] = 1.0
    quorum: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Begun:
    """To rank 0: this rank has begun a round, and ``ends`` its period in it, or does not."""

    number: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Decided:
    """To all: the parties that are left out of a round."""

    number: int
    left_out: tuple[int, ...]


class Attendance:
    """Decides about one round after the other; ``parties`` are ranks, and a party is there when all of its ranks are.

    ``patience_s``: after so long without a quorum all parties are in, whoever is there: then errors of the sums name
    who is missing. So it is where all that are there end their periods: they have nothing better to do than wait.

    >>> attendance = Attendance([[0], [1], [2]], quorum=2, grace_s=1.0, patience_s=30.0)
    >>> for rank in (0, 1): attendance.begin(rank, 0, ends=False, now_s=5.0)
    >>> attendance.decide(5.0), attendance.look_s, attendance.decide(6.0)
    (None, 6.0, (2,))
    >>> for rank in (0, 1): attendance.begin(rank, 1, ends=False, now_s=6.5)
    >>> attendance.decide(6.5)
    (2,)
    """

    def __init__(self, parties: Sequence[Sequence[int]], *, quorum: int, grace_s: float, patience_s: float) -> None:
        self.parties = parties
        self._quorum, self._grace_s, self._patience_s = quorum, grace_s, patience_s
        self._party_of = {rank: party for party, ranks in enumerate(parties) for rank in ranks}
        self._awaited = set(range(len(parties)))
        self.number = 0
        """Of the round that is decided next."""
        self._begin_round()

    def _begin_round(self) -> None:
        self._missing = [set(ranks) for ranks in self.parties]
        self._all_end = True
        self._first_s: float | None = None
        self._quorum_s: float | None = None

    def begin(self, rank: int, number: int, *, ends: bool, now_s: float) -> None:
        """Hear that a rank has begun a round, perhaps one that is decided: it has come back then."""
        party = self._party_of[rank]
        self._awaited.add(party)
        if number != self.number:
            return
        self._missing[party].discard(rank)
        self._all_end = self._all_end and ends
        self._first_s = now_s if self._first_s is None else self._first_s
        if self._quorum_s is None and len(self._there) >= self._quorum:
            self._quorum_s = now_s

    @property
    def look_s(self) -> float | None:
        """When to :meth:`decide` though nobody else has come; None before anybody has."""
        if self._quorum_s is not None:
            return self._quorum_s + self._grace_s
        return None if self._first_s is None else self._first_s + self._patience_s

    def decide(self, now_s: float) -> tuple[int, ...] | None:
        """Return which parties are left out of the round, if that is clear by now; then the next one begins."""
        if self._first_s is None:
            return None
        there = self._there
        has_all_awaited = self._awaited <= there and self._quorum_s is not None
        if not has_all_awaited and (self.look_s is None or now_s < self.look_s):
            return None
        waits_for_all = self._all_end or self._quorum_s is None
        left_out = set() if waits_for_all else set(range(len(self.parties))) - there
        self._awaited -= left_out
        self.number += 1
        self._begin_round()
        return tuple(sorted(left_out))

    @property
    def _there(self) -> set[int]:
        return {party for party, missing in enumerate(self._missing) if not missing}
