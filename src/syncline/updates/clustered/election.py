"""The election of temporary servers: random, and yet agreed by every rank without a message.

Every rank orders a cluster's ranks by a hash of (job, term, rank): a random order that is the same everywhere, on any
machine and in any version of Python. The server is the first of that order that is not known to be dead. The dead only
ever grow in number and every message carries them, so ranks that know different dead soon draw the same server; that is
highest-random-weight hashing (Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import blake2b

from syncline.members import successor


def draw_order(job: str, term: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return ``ranks`` in the order in which they are to serve in ``term``."""
    return _draw_order(job, term, tuple(ranks))


def draw_server(job: str, term: int, ranks: Sequence[int], dead: Collection[int]) -> int | None:
    """Return the temporary server of a cluster in ``term``; None if all its ranks are dead."""
    return successor(draw_order(job, term, ranks), dead)


@lru_cache(maxsize=1024)
def _draw_order(job: str, term: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Each message that a rank hears asks for the order, of a cluster that may have hundreds of ranks."""
    return tuple(sorted(ranks, key=lambda rank: (_ticket(job, term, rank), rank)))


def _ticket(job: str, term: int, rank: int) -> bytes:
    return blake2b(f"{term}/{rank}/{job}".encode(), digest_size=16).digest()
