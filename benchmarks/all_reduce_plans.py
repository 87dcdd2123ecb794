"""How near all-reduces are planned to the bound, and whether rings at levels of the tree would be nearer.

The shipped topologies, uneven racks, and random trees of 24 ranks whose links have rates of their own in each
direction, up to 4 and up to 200 times apart. Three ways are predicted: what is chosen, what would be chosen without
in-trees for each owner, and the best of all trees in which some levels exchange in rings. Nothing is measured.

    python benchmarks/all_reduce_plans.py    the table, as Markdown
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Set
from statistics import median

from planning import uneven_racks

from syncline.schedule import Collective, Draft, lower_bound, predict, weighted_tree
from syncline.schedule.cost import predicted_slice_bytes
from syncline.schedule.draft import lowest_terms
from syncline.schedule.ownership import Fractions, TreeDivision, draw_exchanges
from syncline.schedule.planners import draft_all
from syncline.schedule.portions import best_fractions
from syncline.schedule.transfers import Transfers
from syncline.topology import Host, Link, Node, Rank, Switch, Topology
from syncline.topology.document import shipped_names

SIZES = (1 << 20, 16 << 20, 256 << 20)
NUM_TREES, NUM_RANKS, SLOWEST = 40, 24, 5e6


def random_tree(draw: random.Random, spread: float) -> Topology:
    """Draw switches of 2 to 6 children, down to hosts of one rank."""
    ranks, names = itertools.count(), itertools.count()

    def link() -> Link:
        up, down = (SLOWEST * spread ** draw.random() for _ in range(2))
        return Link(up_bytes_per_s=up, down_bytes_per_s=down)

    def build(num_ranks: int, above: Link | None) -> Switch | Host:
        if num_ranks == 1:
            return Host(name=f"n{next(names)}", link=above, ranks=(Rank(rank=next(ranks)),))
        num_children = min(num_ranks, draw.randint(2, 6))
        cuts = [0, *sorted(draw.sample(range(1, num_ranks), num_children - 1)), num_ranks]
        children = tuple(build(stop - start, link()) for start, stop in itertools.pairwise(cuts))
        return Switch(name=f"n{next(names)}", link=above, children=children)

    return Topology(name=f"random, {spread:g} times", root=build(NUM_RANKS, None))


def with_rings(topology: Topology, fractions: Fractions, parents: Set[str]) -> Draft:
    """Draw an all-reduce along the tree in which the children of ``parents`` exchange in rings."""
    division = TreeDivision(topology.root, num_ranks=topology.num_ranks, fractions=fractions)
    cuts = sorted(division.cuts())
    rows, step = [], 0
    for height in range(1, division.height + 1):
        level = [exchange for exchange in division.exchanges if exchange.height == height]
        drawn = [
            draw_exchanges([one], cuts, ring_at=one.parent if one.parent in parents else None).shifted(
                step + 1 - height
            )
            for one in level
        ]
        rows += drawn
        step = max(int(one.step[-1]) for one in drawn) + 1
    scatter = Transfers.concatenate(rows).in_order().merged()
    return Draft(
        collective=Collective.ALL_REDUCE,
        num_ranks=topology.num_ranks,
        cuts=lowest_terms(cuts),
        transfers=Transfers.concatenate([scatter, scatter.reversed().shifted(step)]),
        owners=division.own.lookup(cuts),
        planner="rings",
    )


def all_with_rings(topology: Topology) -> Iterator[Draft]:
    """Yield all that have rings at some levels, with equal portions and with the best."""
    level_of = {node.name: len(topology.path(_first_rank(node))) - _height(node) for node in topology.walk()}
    wide = [node.name for node in topology.walk() if len(node.children) > 2]
    levels = sorted({level_of[name] for name in wide})
    fractions = best_fractions(topology, Collective.ALL_REDUCE)
    for count in range(1, len(levels) + 1):
        for chosen in itertools.combinations(levels, count):
            parents = {name for name in wide if level_of[name] in chosen}
            yield from (with_rings(topology, each, parents) for each in ([{}, fractions] if fractions else [{}]))


def _first_rank(node: Node) -> int:
    return node.rank if isinstance(node, Rank) else _first_rank(node.children[0])


def _height(node: Node) -> int:
    return 1 + _height(node.children[0]) if node.children else 0


def predicted_s(drafts: list[Draft], topology: Topology, num_bytes: int) -> float:
    """Return the least predicted time."""
    slice_bytes = predicted_slice_bytes(topology)
    return min((predict(draft, topology, num_bytes, slice_bytes).time_s for draft in drafts), default=math.inf)


def drafts_of(topology: Topology, *, has_in_trees: bool) -> list[Draft]:
    """Return what is compared, with in-trees for each owner or without."""
    before = weighted_tree.FAR
    weighted_tree.FAR = before if has_in_trees else math.inf
    try:
        return draft_all(topology, Collective.ALL_REDUCE, target="balanced", root=0)
    finally:
        weighted_tree.FAR = before


def main() -> None:
    """Print one row for each kind of tree and size."""
    draw = random.Random(7)
    kinds = {name: [Topology.load(name)] for name in shipped_names()}
    kinds |= {f"racks of 64 ranks, {each} on a host": [uneven_racks(64, each)] for each in (8, 1)}
    for spread in (4, 200):
        kinds[f"random, up to {spread} times"] = [random_tree(draw, spread) for _ in range(NUM_TREES)]
    print("| tree | MiB | trees | chosen: x bound, median and most | without in-trees | with rings, beside that |")
    print("|---|---|---|---|---|---|")
    for name, topologies in kinds.items():
        rows = [[judge(topology, num_bytes) for num_bytes in SIZES] for topology in topologies]
        for num_bytes, row in zip(SIZES, zip(*rows, strict=True), strict=True):
            now, before, gains = zip(*row, strict=True)
            print(
                f"| {name} | {num_bytes >> 20} | {len(row)} | {median(now):.3f}, {max(now):.3f} "
                f"| {median(before):.3f}, {max(before):.3f} | at best {max(gains):.3f} times as fast |",
                flush=True,
            )


def judge(topology: Topology, num_bytes: int) -> tuple[float, float, float]:
    """Return what is chosen over the bound, the same without in-trees, and that over the best with rings."""
    bound_s = lower_bound(topology, Collective.ALL_REDUCE, num_bytes)
    now, before = (drafts_of(topology, has_in_trees=each) for each in (True, False))
    now_s, before_s, rings_s = (
        predicted_s(each, topology, num_bytes) for each in (now, before, list(all_with_rings(topology)))
    )
    return now_s / bound_s, before_s / bound_s, before_s / rings_s


if __name__ == "__main__":
    main()
