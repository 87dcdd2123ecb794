"""Runs a draft on numbers that stand for contributions, all ranks and atoms at once, to see what ends up where.

Each rank's contribution is an odd 64-bit number drawn for it; sums wrap around. A sum equals the sum of all
contributions once each only if each was counted once, but for a chance of about 2^-60 (the numbers are fixed, so that
every rank of a job finds the same). Zero stands for "not written yet". This costs one addition for each transfer and
atom, in numpy; only when something is wrong does :mod:`syncline.schedule.verifier` count exactly.

State is [ranks, atoms of a block]; blocks bound the memory. Long transfers are copied as slices, short ones are
expanded into index arrays and moved together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from syncline.schedule.draft import After, Before, Draft
from syncline.schedule.traffic import steps_of
from syncline.schedule.transfers import Transfers

Words = npt.NDArray[np.uint64]
_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def draw_words(count: int, *, seed: int) -> Words:
    """Return ``count`` words, each of which differs from all others: those of SplitMix64 from ``seed`` on.

    ``numpy.random`` has better ones, but loading it takes longer than planning for a small topology.
    """
    return scramble(np.uint64(seed) + _STRIDE * np.arange(1, count + 1, dtype=np.uint64))


def scramble(words: Words) -> Words:
    """Mix bits one to one (the finalizer of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


_MAX_BLOCK_CELLS = 1 << 24
_LONG_ATOMS = 96
_SEED = 0x5EED
_Index = npt.NDArray[np.int64]


class Suspect(NamedTuple):
    """Where the replay found something wrong; ``step`` is set if it was a read of something never written."""

    rank: int
    atom: int
    step: int | None = None


def find_suspect(draft: Draft) -> Suspect | None:
    """Replay the draft; return the first place that breaks a promise, or None if all are kept."""
    coefficients = draw_words(draft.num_ranks, seed=_SEED) | np.uint64(1)
    width = max(1, min(draft.num_atoms, _MAX_BLOCK_CELLS // draft.num_ranks))
    for low in range(0, draft.num_atoms, width):
        block = _Block(draft, coefficients, low, min(low + width, draft.num_atoms))
        suspect = block.replay() or block.check_end()
        if suspect is not None:
            return suspect
    return None


class _Block:
    """The state of all ranks at the atoms [low, high)."""

    def __init__(self, draft: Draft, coefficients: Words, low: int, high: int) -> None:
        self._draft = draft
        self._low = low
        self._width = high - low
        self._owners = draft.owners[:, low:high]
        self._coefficients = coefficients
        self._rows = _clip(draft.transfers, low, high)
        self._state = self._begin()

    def _begin(self) -> Words:
        num_ranks = self._draft.num_ranks
        if self._draft.collective.before is Before.CONTRIBUTION:
            return np.repeat(self._coefficients[:, None], self._width, axis=1)
        state = np.zeros((num_ranks, self._width), dtype=np.uint64)
        if self._draft.collective.before is Before.ROOT:
            state[self._draft.root] = self._coefficients[self._draft.root]
        else:
            state[self._owners, np.arange(self._width)] = self._coefficients[self._owners[0]]
        return state

    def replay(self) -> Suspect | None:
        """Run all steps; stop at a read of something that was never written."""
        for step in steps_of(self._rows):
            rows = np.arange(step.start, step.stop)
            long = self._rows.last[rows] - self._rows.first[rows] > _LONG_ATOMS
            suspect = self._move(rows[~long], rows[long])
            if suspect is not None:
                return suspect
        return None

    def _move(self, short: _Index, long: _Index) -> Suspect | None:
        rows, flat, width = self._rows, self._state.reshape(-1), self._width
        lengths = (rows.last[short] - rows.first[short]).astype(np.int64)
        source = _expand(rows.src[short].astype(np.int64) * width + rows.first[short], lengths)
        values = flat[source]
        runs = [(row, int(rows.first[row]), int(rows.last[row])) for row in long.tolist()]
        copies = [self._state[rows.src[row], first:last].copy() for row, first, last in runs]
        unwritten = self._find_unwritten(source, values, copies, long)
        if unwritten is not None:
            return unwritten
        target = source + np.repeat((rows.dst[short].astype(np.int64) - rows.src[short]) * width, lengths)
        adds = np.repeat(rows.add[short], lengths)
        _scatter(flat, target, values, adds)
        for (row, first, last), value in zip(runs, copies, strict=True):
            if rows.add[row]:
                self._state[rows.dst[row], first:last] += value
        for (row, first, last), value in zip(runs, copies, strict=True):
            if not rows.add[row]:
                self._state[rows.dst[row], first:last] = value
        return None

    def _find_unwritten(self, source: _Index, values: Words, copies: list[Words], long: _Index) -> Suspect | None:
        if self._draft.collective.before is Before.CONTRIBUTION:
            return None
        if not values.all():
            return self._suspect_read(*divmod(int(source[values.argmin()]), self._width))
        for row, value in zip(long.tolist(), copies, strict=True):
            if not value.all():
                return self._suspect_read(int(self._rows.src[row]), int(self._rows.first[row]) + int(value.argmin()))
        return None

    def _suspect_read(self, rank: int, offset: int) -> Suspect:
        reads = (self._rows.src == rank) & (self._rows.first <= offset) & (self._rows.last > offset)
        return Suspect(rank=rank, atom=offset + self._low, step=int(self._rows.step[reads][0]))

    def check_end(self) -> Suspect | None:
        """Compare what the ranks hold with what the collective promises."""
        collective = self._draft.collective
        atoms = np.arange(self._width)
        if collective.before is Before.CONTRIBUTION:
            expected = np.broadcast_to(self._coefficients.sum(dtype=np.uint64), (self._width,))
        else:
            holders = self._owners[0] if collective.before is Before.SHARD else np.full(self._width, self._draft.root)
            expected = self._coefficients[holders]
        if collective.after is After.OWNERS:
            wrong = np.argwhere(self._state[self._owners, atoms] != expected)
            if not len(wrong):
                return None
            replica, atom = wrong[0].tolist()
            return Suspect(rank=int(self._owners[replica, atom]), atom=atom + self._low)
        for rank in range(self._draft.num_ranks):
            differs = self._state[rank] != expected
            if differs.any():
                return Suspect(rank=rank, atom=int(differs.argmax()) + self._low)
        return None


def _clip(rows: Transfers, low: int, high: int) -> Transfers:
    inside = (rows.first < high) & (rows.last > low)
    picked = rows if inside.all() else rows.take(inside)
    first, last = (np.clip(ends, low, high) - np.int32(low) for ends in (picked.first, picked.last))
    return replace(picked, first=first, last=last)


def _expand(starts: _Index, lengths: _Index) -> _Index:
    """Return all numbers of all ranges start, start + 1, ..., of the given lengths, one behind the other."""
    if len(lengths) == 0 or int(lengths.max()) == 1:
        return starts
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def _scatter(flat: Words, target: _Index, values: Words, adds: npt.NDArray[np.bool_]) -> None:
    if adds.all():
        np.add.at(flat, target, values)
        return
    np.add.at(flat, target[adds], values[adds])
    flat[target[~adds]] = values[~adds]
