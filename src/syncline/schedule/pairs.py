"""Pairs of ranks that compute a model's stages in turns: who they are, and how long a step takes by prediction.

Activations cross between the two ranks of a pair at every stage, so partners are as near as the tree allows: first the
ranks of one host, then what is left over below one switch, from the leaves up. Every rank comes to the same answer.

The prediction goes through the visits of :mod:`syncline.updates.phased.phases`: each micro-batch begins when its rank
is free, what the partner makes of it has come, and the stage's last update is over; on the way back a stage gets the
room of the one before the last of its side, once that is updated. The updates of a side follow each other, and those of
both sides take together what links take for all of them. Left out are the disk, and that what a pair passes may wait on
links behind updates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import ConfigurationError
from syncline.priorities.forward_timing import BACKWARD_PER_FORWARD
from syncline.schedule.cost import CostModel, predicted_slice_bytes
from syncline.schedule.step_candidates import draft_sharded_steps
from syncline.topology import DirectedLink, Topology
from syncline.topology.tree import Node, Rank

Pair = tuple[int, int]
"""The rank on side 0, which computes stages 0, 2 ..., and the one on side 1; the lower number is on side 0."""
_NUM_STEPS = 4
"""That are played; the first two begin with nothing under way."""


def pair_ranks(topology: Topology) -> tuple[Pair, ...]:
    """Return the pairs, in the order of their first ranks; raises :class:`ConfigurationError` for an odd number.

    O(number of nodes).

    >>> pair_ranks(Topology.load("two-racks-5-3"))
    ((0, 1), (2, 3), (4, 7), (5, 6))
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """What a prediction needs of one stage: ``passed_bytes`` is what it hands on for one rank's batch."""

    num_bytes: int
    forward_share: float
    """Of the forward pass of the whole model."""
    passed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMoves:
    """What pairs move in a step, for a batch of each rank: a pair computes those of both of its ranks."""

    stages: tuple[StageShape, ...]
    passed_bytes_per_s: float
    """Between partners, on the slowest way."""
    updates_s: float
    """What all stages take to be reduced and gathered."""
    most_owned: float
    """The part of its side's parameters that a rank owns at most."""
    carried: Mapping[DirectedLink, float]
    """Bytes on each link."""
    moved: Mapping[str, float]
    """Bytes that the ranks of each host send and receive, by its name."""

    @property
    def held_bytes(self) -> int:
        """The most parameters that a rank has in memory at once: of two of its stages, which follow each other."""
        sizes = [stage.num_bytes for stage in self.stages]
        return max(sum(sizes[first : first + 3 : 2]) for first in range(len(sizes)))

    def step_s(self, forward_s: float, updates_s: float, micro_batches: int) -> float:
        """Return the time from one step to the next, where a rank alone computes its batch forward in ``forward_s``.

        ``updates_s`` is as :attr:`updates_s`, for all stages.
        """
        num_stages = len(self.stages)
        total = [sum(stage.num_bytes for stage in self.stages[side::2]) for side in (0, 1)]
        part_s = [2 * stage.forward_share * forward_s / micro_batches for stage in self.stages]
        sent_s = [2 * stage.passed_bytes / micro_batches / self.passed_bytes_per_s for stage in self.stages]
        visits = [(stage, 1.0, sent_s[stage]) for stage in range(num_stages - 1)]
        backward = 1 + BACKWARD_PER_FORWARD  # and forward, again
        visits += [(stage, backward, sent_s[stage - 1]) for stage in reversed(range(num_stages))]
        free_s, line_s, updated_s = [0.0, 0.0], [0.0, 0.0], [0.0] * num_stages
        over_s, ends_s = [0.0, 0.0], []
        for _ in range(_NUM_STEPS):
            arrived_s = [0.0] * micro_batches
            for stage, cost, message_s in visits:
                side, is_backward = stage % 2, cost == backward
                at_s = max(free_s[side], updated_s[stage])
                if is_backward and stage + 4 < num_stages:
                    at_s = max(at_s, updated_s[stage + 4])  # whose room it gets
                for micro in range(micro_batches):
                    at_s = max(at_s, arrived_s[micro]) + cost * part_s[stage]
                    line_s[side] = arrived_s[micro] = max(line_s[side], at_s) + message_s
                free_s[side] = at_s
                if is_backward:
                    over_s[side] = max(over_s[side], at_s) + updates_s * self.stages[stage].num_bytes / total[side]
                    updated_s[stage] = over_s[side]
            ends_s.append(max(free_s))
        return (ends_s[-1] - ends_s[1]) / (_NUM_STEPS - 2)


def plan_pairs(topology: Topology, stages: Sequence[StageShape]) -> PairMoves:
    """Predict what pairs move; raises :class:`ConfigurationError` for an odd number of ranks."""
    pairs, payload = pair_ranks(topology), CostModel().payload_share
    # Each boundary is crossed forward one way and backward the other, by what is computed for two batches.
    passed = 2 * sum(stage.passed_bytes for stage in stages[:-1])
    users = Counter(link for pair in pairs for way in (pair, pair[::-1]) for link in topology.route(*way))
    busy_s: defaultdict[DirectedLink, float] = defaultdict(float)
    times_s, owned = [0.0], [0.0]
    moved = {host.name: 2.0 * passed * len(host.ranks) for host in topology.hosts}
    for side in (0, 1) if len(pairs) > 1 else ():
        ranks = topology.restricted([pair[side] for pair in pairs])
        num_bytes = sum(stage.num_bytes for stage in stages[side::2])
        (scatter, _), prediction = draft_sharded_steps(ranks, num_bytes, slice_bytes=predicted_slice_bytes(ranks))[0]
        owned.append(max(scatter.shares))
        times_s.append(prediction.time_s)
        for half in (prediction.reduce_scatter, prediction.all_gather):
            for link, seconds in half.link_s.items():
                busy_s[link] += seconds
        for host in ranks.hosts:
            moved[host.name] += 4 * (len(host.ranks) - 1) * num_bytes
    updated = {link: seconds * topology.bytes_per_s(link) * payload for link, seconds in busy_s.items() if seconds}
    return PairMoves(
        stages=tuple(stages),
        passed_bytes_per_s=min(payload * topology.bytes_per_s(link) / number for link, number in users.items()),
        updates_s=max([*times_s, *busy_s.values()]),
        most_owned=max(owned) or 1.0,
        carried={link: updated.get(link, 0.0) + users[link] * passed for link in (*users, *updated)},
        moved={
            name: num_bytes + sum(updated.get(DirectedLink(name, way), 0.0) for way in ("up", "down"))
            for name, num_bytes in moved.items()
        },
    )
