"""Whether all ranks end an all-reduce with the same bits: floating-point sums depend on the order of additions.

Where every atom has an owner the question does not arise: the owner adds, and all others are sent what it has.
Otherwise each rank adds for itself, and the additions must be the same. They are followed as expressions: a rank
begins with a number of its own, and a + b becomes a scrambled function of both that is the same for b + a, as it is in
IEEE arithmetic, but not for another grouping. Complexity: one small numpy operation for each transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from syncline.schedule.draft import Draft
from syncline.schedule.fingerprints import Words, draw_words, scramble
from syncline.schedule.transfers import Transfer

_SEED = 0xB175


def find_differing_rank(draft: Draft) -> tuple[int, int] | None:
    """Return a rank and an atom at which it ends with other additions than rank 0, or None if there is none."""
    expressions = _begin(draft)
    for _, rows in groupby(draft.transfers, key=lambda row: row.step):
        for rank, value in list(_step(list(rows), expressions)):
            expressions[rank] = value
    differs = np.argwhere(expressions != expressions[0])
    return (int(differs[0][0]), int(differs[0][1])) if len(differs) else None


def _begin(draft: Draft) -> Words:
    numbers = draw_words(draft.num_ranks, seed=_SEED)
    return np.repeat(numbers[:, None], draft.num_atoms, axis=1)


def _step(rows: list[Transfer], before: Words) -> Iterator[tuple[int, Words]]:
    by_receiver = sorted(rows, key=lambda row: (row.dst, row.src))
    for rank, received in groupby(by_receiver, key=lambda row: row.dst):
        yield rank, _receive(rank, list(received), before)


def _receive(rank: int, rows: list[Transfer], before: Words) -> Words:
    """Add in rank order of the sources, the own value at its own place; then overwrite."""
    own = Transfer(0, rank, rank, 0, before.shape[1], True)
    total = np.zeros(before.shape[1], dtype=np.uint64)
    begun = np.zeros(before.shape[1], dtype=np.bool_)
    for row in sorted([own, *(row for row in rows if row.add)], key=lambda row: row.src):
        span = slice(row.first, row.last)
        value = before[row.src, span]
        total[span] = np.where(begun[span], scramble(total[span] + value), value)
        begun[span] = True
    for row in rows:
        if not row.add:
            total[row.first : row.last] = before[row.src, row.first : row.last]
    return total
