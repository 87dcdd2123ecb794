"""Whether all that are promised a sum end with the same bits: floating-point sums depend on the order of additions.

Where every atom has one owner the question does not arise: the owner adds, and all others are sent what it has.
Otherwise each rank adds for itself, and the additions must be the same. They are followed as expressions: a rank
begins with a number of its own, and a + b becomes a scrambled function of both that is the same for b + a, as it is in
IEEE arithmetic, but not for another grouping. Complexity: one small numpy operation for each transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from syncline.schedule.collective import After
from syncline.schedule.draft import Draft
from syncline.schedule.replay import Words, draw_words, scramble
from syncline.schedule.transfers import IntArray, Transfer

_SEED = 0xB175


def find_differing_rank(draft: Draft) -> tuple[int, int, int] | None:
    """Return a rank, another one and an atom at which they end with other additions, or None if there is none.

    All ranks are compared, or, where owners alone are promised a sum, all owners of each atom.
    """
    expressions = _begin(draft)
    for _, rows in groupby(draft.transfers, key=lambda row: row.step):
        for rank, value in list(_step(list(rows), expressions)):
            expressions[rank] = value
    holders: IntArray = np.arange(draft.num_ranks, dtype=np.int32)[:, None].repeat(draft.num_atoms, axis=1)
    if draft.collective.after is After.OWNERS:
        holders = draft.owners
    sums = expressions[holders, np.arange(draft.num_atoms)]
    differs = np.argwhere(sums != sums[0])
    if not len(differs):
        return None
    row, atom = differs[0].tolist()
    return int(holders[row, atom]), int(holders[0, atom]), atom


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
