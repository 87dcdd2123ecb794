"""Who gives newcomers what they lack: for each the nearest member, so that no byte crosses a link twice. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from syncline.topology import Topology


def choose_sources(topology: Topology, holders: Collection[int], lacking: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return whom each source gives to: the holder below the lowest node above both, the first of several.

    Newcomers below one link have the same nearest holders outside, and so the same source: what they need crosses that
    link in one broadcast.

    >>> choose_sources(Topology.load("two-racks-5-3"), holders=(0, 1, 5), lacking=(4, 6, 7))
    {0: (4,), 5: (6, 7)}
    """
    served: dict[int, list[int]] = defaultdict(list)
    for rank in lacking:
        source = min(holders, key=lambda holder: (-_shared(topology, holder, rank), holder))
        served[source].append(rank)
    return {source: tuple(ranks) for source, ranks in sorted(served.items())}


def _shared(topology: Topology, first: int, second: int) -> int:
    """Return how many nodes below the root are above both."""
    above = zip(reversed(topology.path(first)), reversed(topology.path(second)), strict=False)
    count = 0
    for one, other in above:
        if one is not other:
            break
        count += 1
    return count
