"""Which call has waited too long for a rank that lives but does not train."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from syncline.fabric import PeerStalls
from syncline.runtime.active import ActiveCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """A call that waits for stalled ranks, and in how many seconds it will have waited enough; 0.0 or less: now."""

    active: ActiveCall
    peers: tuple[int, ...]
    in_s: float


def find_overdue(calls: Iterable[ActiveCall], stalls: PeerStalls, predecessor: int, *, now_s: float) -> Overdue | None:
    """Return the call that will be, or is, overdue first; None if none waits for a stalled rank.

    A rank may do something else for long before others begin to wait for it, so the waiting counts as well: a call is
    overdue once it has waited for the limit, for ranks that have been still for the limit.
    """
    found = [
        Overdue(active=active, peers=tuple(sorted(peers)), in_s=active.started_s + stalls.limit_s - now_s)
        for active in calls
        if (peers := active.awaited_peers(predecessor) & stalls.stalled)
    ]
    return min(found, key=lambda overdue: overdue.in_s, default=None)
