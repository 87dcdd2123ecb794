"""Which ranks form a pair, and which side each is on. Pure; every rank comes to the same answer.

Activations cross between the two ranks of a pair at every stage, so partners are as near as the tree allows: first the
ranks of one host, then what is left over below one switch, from the leaves up. O(number of nodes).
"""

from __future__ import annotations

from syncline.errors import ConfigurationError
from syncline.topology import Topology
from syncline.topology.tree import Node, Rank

Pair = tuple[int, int]
"""The rank on side 0, which computes stages 0, 2 ..., and the one on side 1; the lower number is on side 0."""


def pair_ranks(topology: Topology) -> tuple[Pair, ...]:
    """Return the pairs, in the order of their first ranks; raises :class:`ConfigurationError` for an odd number."""
    if topology.num_ranks % 2:
        raise ConfigurationError(
            f"Phased execution is done by pairs of ranks, so their number is even, not {topology.num_ranks}; start one "
            "more, or one less"
        )
    pairs: list[Pair] = []
    left = _pair_below(topology.root, pairs)
    assert left is None, "of an even number none is left over"
    return tuple(sorted(pairs))


def find_pair(pairs: tuple[Pair, ...], rank: int) -> tuple[int, int]:
    """Return the number of the pair that ``rank`` is in, and its side."""
    for number, pair in enumerate(pairs):
        if rank in pair:
            return number, pair.index(rank)
    raise AssertionError(f"rank {rank} is in no pair of {pairs}")


def _pair_below(node: Node, pairs: list[Pair]) -> int | None:
    """Pair the ranks below ``node``; return the one that is left over."""
    if isinstance(node, Rank):
        return node.rank
    left = None
    for child in node.children:
        other = _pair_below(child, pairs)
        if other is None:
            continue
        if left is None:
            left = other
        else:
            pairs.append((min(left, other), max(left, other)))
            left = None
    return left
