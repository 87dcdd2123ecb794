"""Counts exactly, for one atom, whose contribution is where, so that a refusal can say what is wrong with a draft."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from syncline.schedule.collective import Before
from syncline.schedule.draft import Draft
from syncline.schedule.replay import Suspect
from syncline.schedule.transfers import Transfer

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
    start, stop = (Fraction(draft.cuts[cut], draft.denominator) for cut in (atom, atom + 1))
    return f"[{start}, {stop}) of the data"


def count_holdings(draft: Draft, atom: int) -> Holdings:
    """Replay one atom with exact counts."""
    held = _begin(draft, atom)
    rows = draft.transfers.take((draft.transfers.first <= atom) & (draft.transfers.last > atom))
    pending: list[tuple[Transfer, Counter[int]]] = []
    for row in rows:
        if pending and pending[0][0].step != row.step:
            _apply(held, pending)
            pending = []
        pending.append((row, Counter(held[row.src] or Counter())))
    _apply(held, pending)
    return held


def _begin(draft: Draft, atom: int) -> Holdings:
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
        f"rank {rank} is counted {_times(held[rank])} instead of {due[rank]}" for rank in wrong[:_MAX_NAMED]
    )
    more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
    return named + more


def _times(count: int) -> str:
    return f"{count} time" if count == 1 else f"{count} times"
