"""Which flows to measure at once, so that every link is full in some round and links that are shared show.

First each pair of hosts in both directions, all hosts at once (a round-robin tournament: 2 (N - 1) rounds for N hosts):
a host that sends does not receive, so that no answer waits behind data. Then each host with all others at once, where
there are few. Then, for each switch that these tell of, all below it with all others, which fills the link above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.discovery.tree_search import Flow, Set

MOST_STARS = 8
"""So many hosts, or fewer, also speak with all others at once."""
FEW = 3
"""A host near so few others is measured with them again: what a host can do shows in two rounds or not at all."""


def first_rounds(num_hosts: int) -> Iterator[tuple[Flow, ...]]:
    """Yield what is measured before anything is known."""
    for pairs in tournament(num_hosts):
        yield pairs
        yield tuple((target, source) for source, target in pairs)
    if 2 < num_hosts <= MOST_STARS:
        for host in range(num_hosts):
            others = [other for other in range(num_hosts) if other != host]
            yield tuple((host, other) for other in others)
            yield tuple((other, host) for other in others)


def tournament(num_hosts: int) -> Iterator[tuple[Flow, ...]]:
    """Yield rounds of pairs that share no host, in which each pair comes once (the circle method).

    >>> [len(pairs) for pairs in tournament(5)]
    [2, 2, 2, 2, 2]
    """
    places: list[int | None] = list(range(num_hosts))
    if num_hosts % 2:
        places.append(None)
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield tuple((first, second) for first, second in pairs if first is not None and second is not None)
        places = [places[0], places[-1], *places[1:-1]]


def rounds_across(num_hosts: int, switches: Sequence[Set]) -> Iterator[tuple[Flow, ...]]:
    """Yield two rounds for each switch: all below it to others, and back; who has no partner of its own shares one."""
    for switch in switches:
        inside = sorted(switch)
        outside = sorted(set(range(num_hosts)) - switch)
        longest = max(len(inside), len(outside))
        pairs = tuple((inside[k % len(inside)], outside[k % len(outside)]) for k in range(longest))
        yield pairs
        yield tuple((target, source) for source, target in pairs)


def rounds_inside(nodes: Sequence[Set]) -> Iterator[tuple[Flow, ...]]:
    """Yield rounds of the pairs inside sets of few hosts, which have none in common; all sets at once."""
    of_sets = [
        [tuple((members[first], members[second]) for first, second in pairs) for pairs in tournament(len(members))]
        for node in nodes
        if 1 < len(node) <= FEW and (members := sorted(node))
    ]
    for number in range(max(map(len, of_sets), default=0)):
        flows = tuple(flow for rounds in of_sets for pairs in rounds[number : number + 1] for flow in pairs)
        yield flows
        yield tuple((target, source) for source, target in flows)
