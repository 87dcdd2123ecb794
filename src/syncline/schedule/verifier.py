"""Proves drafts. What is not proved cannot be run.

Proved is: (1) *form*: cuts rise from 0 to the denominator, ranks and atoms exist, nobody sends to itself; (2)
*writes*: in one step no atom of a rank is overwritten twice, or both overwritten and added to; (3) *counts*: every
rank that is promised a result holds each contribution exactly once (counts, not presence), and nothing is read before
it was written; (4) *bits*: all ranks end an all-reduce, and all owners of a range a reduce-scatter, with the same
bits. That is so if the sum is made at one owner and sent on from there; otherwise all of them must make the same
additions in the same grouping.

Complexity: time in proportion to the sum over transfers of their atoms (numpy), memory bounded by blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from syncline.arguments import checked
from syncline.errors import ScheduleError
from syncline.schedule.draft import UNOWNED, After, Before, Collective, Draft
from syncline.schedule.replay import Suspect, Words, draw_words, find_suspect, scramble
from syncline.schedule.schedule import Schedule, prove
from syncline.schedule.transfers import IntArray, Transfer
from syncline.units import counted

if TYPE_CHECKING:
    from syncline.schedule.outline import Outline


@checked
def verify(draft: Draft) -> Schedule:
    """Prove that the draft does what its collective promises, and return it as a schedule that can be run.

    Raises :class:`~syncline.errors.ScheduleError` that names the rule, the rank, the atom and who is counted how often.
    Proved are the form, that no write clashes with another, that each contribution counts once, and that all ranks end
    an all-reduce with the same bits, and all owners of a range a reduce-scatter; in time proportional to the sum over
    transfers of their atoms.

    >>> draft = PLANNERS["ring"].plan(Topology.flat(3), Collective.ALL_REDUCE).draft
    >>> verify(draft).digest == verify(draft).digest
    True
    """
    _check_cuts(draft)
    _check_ranks(draft)
    _check_rows(draft)
    _check_writes(draft)
    halves = split_at_owners(draft)
    if halves is None or any(find_suspect(half) for half in halves):
        _check_counts(draft)
        _check_bits(draft)
    return prove(draft)


_PIECES_AT_ONCE = 16


def verify_outline(outline: Outline) -> str:
    """Prove pieces of the data, each on its way among all ranks, and say what they stand for.

    By symmetry that is all data (:mod:`syncline.schedule.outline`); where the tree has too little of it they are drawn.
    Raises :class:`~syncline.errors.ScheduleError` as :func:`verify`.
    """
    places, is_all = outline.standing
    owners = set[int]()
    for begin in range(0, len(places), _PIECES_AT_ONCE):
        draft = outline.pieces(places[begin : begin + _PIECES_AT_ONCE])
        verify(draft)
        owners.update(draft.owners[0].tolist())
    number = f"{len(owners)} of {outline.num_ranks:,} ranks"
    if is_all:
        return f"by symmetry: {number} {'stands' if len(owners) == 1 else 'stand'} for the others"
    return f"on a sample, drawn from what {number} own: too few are alike"


def _refusal(draft: Draft, reason: str) -> ScheduleError:
    return ScheduleError(
        f"the {draft.planner} draft for {draft.collective} on {draft.num_ranks} ranks is refused: {reason}; "
        "this is a fault of the planner, choose another one"
    )


def _check_cuts(draft: Draft) -> None:
    cuts = draft.cuts
    rising = len(cuts) >= 2 and all(left < right for left, right in pairwise(cuts))
    if not rising or cuts[0] != 0:
        raise _refusal(draft, f"cuts must rise from 0 to the denominator, not {cuts[:8]}...")


def _check_ranks(draft: Draft) -> None:
    if draft.num_ranks < 1 or not 0 <= draft.root < draft.num_ranks:
        raise _refusal(draft, f"the root must be one of the ranks, not {draft.root}")
    if draft.owners.shape[1:] != (draft.num_atoms,) or not draft.num_replicas:
        raise _refusal(draft, f"each of the {draft.num_atoms} atoms needs an owner, not {draft.owners.shape}")
    lowest = 0 if draft.collective.needs_owners else UNOWNED
    wrong = np.argwhere((draft.owners < lowest) | (draft.owners >= draft.num_ranks))
    if len(wrong):
        replica, atom = wrong[0].tolist()
        owner = draft.owners[replica, atom]
        raise _refusal(draft, f"atom {atom} ({describe_atom(draft, atom)}) has rank {owner} as its owner")


def _check_rows(draft: Draft) -> None:
    rows = draft.transfers
    rules = {
        "steps begin at 0 and the rows stand in their order": np.diff(rows.step, prepend=0) >= 0,
        "sources are ranks": (rows.src >= 0) & (rows.src < draft.num_ranks),
        "destinations are ranks": (rows.dst >= 0) & (rows.dst < draft.num_ranks),
        "no rank sends to itself": rows.src != rows.dst,
        "atoms exist and no transfer is empty": (rows.first >= 0)
        & (rows.first < rows.last)
        & (rows.last <= draft.num_atoms),
    }
    for rule, kept in rules.items():
        if not kept.all():
            row = int(np.flatnonzero(~kept)[0])
            raise _refusal(draft, f"{rule}, but transfer {row} is {_describe_row(draft, row)}")


def _describe_row(draft: Draft, row: int) -> str:
    return str(next(iter(draft.transfers.take(np.array([row])))))


def _check_writes(draft: Draft) -> None:
    rows = draft.transfers
    copies = np.flatnonzero(~rows.add)
    if not len(copies):
        return
    keys = (rows.step.astype(np.int64) * draft.num_ranks + rows.dst) * (draft.num_atoms + 1)
    starts, stops = keys + rows.first, keys + rows.last
    copies = copies[np.argsort(starts[copies])]
    clashes = np.flatnonzero(starts[copies[1:]] < stops[copies[:-1]])
    if len(clashes):
        raise _clash(draft, int(copies[clashes[0]]), int(copies[clashes[0] + 1]))
    has_copies = np.zeros(rows.step[-1] + 1, dtype=np.bool_)
    has_copies[rows.step[copies]] = True
    adds = np.flatnonzero(rows.add & has_copies[rows.step])
    before = np.searchsorted(starts[copies], stops[adds], side="left") - 1
    clashes = np.flatnonzero((before >= 0) & (stops[copies[before]] > starts[adds]))
    if len(clashes):
        raise _clash(draft, int(copies[before[clashes[0]]]), int(adds[clashes[0]]))


def _clash(draft: Draft, copy: int, other: int) -> ScheduleError:
    rows = draft.transfers
    atom = max(int(rows.first[copy]), int(rows.first[other]))
    return _refusal(
        draft,
        f"in one step an atom is written once or added to, but in step {rows.step[copy]} rank {rows.dst[copy]}, "
        f"atom {atom} ({describe_atom(draft, atom)}) is overwritten from rank {rows.src[copy]} and also written from "
        f"rank {rows.src[other]}",
    )


def split_at_owners(draft: Draft) -> tuple[Draft, Draft] | None:
    """Return an all-reduce as what adds and what is sent back after that, or None where it is not of that form."""
    rows = draft.transfers
    scatter, gather = rows.take(rows.add), rows.take(~rows.add)
    overlap = len(scatter) > 0 and len(gather) > 0 and scatter.step[-1] >= gather.step[0]
    if draft.collective is not Collective.ALL_REDUCE or not draft.has_owners or draft.num_replicas > 1 or overlap:
        return None
    first_step = int(gather.step[0]) if len(gather) else 0
    return (
        replace(draft, collective=Collective.REDUCE_SCATTER, transfers=scatter),
        replace(draft, collective=Collective.ALL_GATHER, transfers=gather.shifted(-first_step)),
    )


def _check_counts(draft: Draft) -> None:
    suspect = find_suspect(draft)
    if suspect is not None:
        raise _refusal(draft, explain(draft, suspect))


def _check_bits(draft: Draft) -> None:
    differing = find_differing_rank(draft) if _has_equal_sums(draft) else None
    if differing is None:
        return
    rank, other, atom = differing
    raise _refusal(
        draft,
        f"all ranks add in the same order, so that they end with the same bits, but rank {rank} adds atom {atom} "
        f"({describe_atom(draft, atom)}) in another order than rank {other}",
    )


def _has_equal_sums(draft: Draft) -> bool:
    """Whether several ranks are promised the same sum."""
    return draft.collective.adds and (draft.collective.after is After.EVERY_RANK or draft.num_replicas > 1)


# Whether all that are promised a sum end with the same bits: floating-point sums depend on the order of additions.
#
# Where every atom has one owner the question does not arise: the owner adds, and all others are sent what it has.
# Otherwise each rank adds for itself, and the additions must be the same. They are followed as expressions: a rank
# begins with a number of its own, and a + b becomes a scrambled function of both that is the same for b + a, as it is
# in IEEE arithmetic, but not for another grouping. Complexity: one small numpy operation for each transfer.


_SEED = 0xB175


def find_differing_rank(draft: Draft) -> tuple[int, int, int] | None:
    """Return a rank, another one and an atom at which they end with other additions, or None if there is none.

    All ranks are compared, or, where owners alone are promised a sum, all owners of each atom.
    """
    expressions = np.repeat(draw_words(draft.num_ranks, seed=_SEED)[:, None], draft.num_atoms, axis=1)
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


# What is wrong with a draft: for one atom it is counted exactly whose contribution is where.


_MAX_NAMED = 6
Holdings = list[Counter[int] | None]
"""For each rank, how often each rank's contribution is counted in what it holds; None where nothing was written."""


def explain(draft: Draft, suspect: Suspect) -> str:
    """Return the rule that the draft breaks at the suspect rank and atom, and how."""
    where = f"rank {suspect.rank}, atom {suspect.atom} ({describe_atom(draft, suspect.atom)})"
    if suspect.step is not None:
        return f"nothing may be read before it was written, but {where} is sent in step {suspect.step} and was not"
    held = count_holdings(draft, suspect.atom)[suspect.rank]
    promise = draft.collective.after.value
    if held is None:
        return f"{promise} after {draft.collective}, but {where} was never written"
    return f"{promise} after {draft.collective}, but in {where} {_describe_counts(draft, suspect, held)}"


def describe_atom(draft: Draft, atom: int) -> str:
    """Return where an atom lies, as fractions: ``[1/4, 1/2) of the data``."""
    from fractions import Fraction  # of what is wrong alone

    start, stop = (Fraction(draft.cuts[cut], draft.denominator) for cut in (atom, atom + 1))
    return f"[{start}, {stop}) of the data"


def count_holdings(draft: Draft, atom: int) -> Holdings:
    """Replay one atom with exact counts."""
    held = _held_first(draft, atom)
    rows = draft.transfers.take((draft.transfers.first <= atom) & (draft.transfers.last > atom))
    pending: list[tuple[Transfer, Counter[int]]] = []
    for row in rows:
        if pending and pending[0][0].step != row.step:
            _apply(held, pending)
            pending = []
        pending.append((row, Counter(held[row.src] or Counter())))
    _apply(held, pending)
    return held


def _held_first(draft: Draft, atom: int) -> Holdings:
    if draft.collective.before is Before.CONTRIBUTION:
        return [Counter({rank: 1}) for rank in range(draft.num_ranks)]
    holders = [draft.root] if draft.collective.before is Before.ROOT else draft.owners[:, atom].tolist()
    return [Counter({holders[0]: 1}) if rank in holders else None for rank in range(draft.num_ranks)]


def _apply(held: Holdings, pending: list[tuple[Transfer, Counter[int]]]) -> None:
    for row, value in pending:
        if row.add:
            held[row.dst] = (held[row.dst] or Counter()) + value
    for row, value in pending:
        if not row.add:
            held[row.dst] = value


def _describe_counts(draft: Draft, suspect: Suspect, held: Counter[int]) -> str:
    if draft.collective.before is Before.CONTRIBUTION:
        due = Counter(dict.fromkeys(range(draft.num_ranks), 1))
    else:
        source = draft.root if draft.collective.before is Before.ROOT else int(draft.owners[0, suspect.atom])
        due = Counter({source: 1})
    wrong = [rank for rank in range(draft.num_ranks) if held[rank] != due[rank]]
    named = ", ".join(
        f"rank {rank} is counted {counted(held[rank], 'time')} instead of {due[rank]}" for rank in wrong[:_MAX_NAMED]
    )
    more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
    return named + more
