"""The time below which no schedule can be, whatever it is: what must cross each link and each group of links.

Three arguments, of which the largest counts; S is the size, latencies are left out.

*One link.* It parts the ranks in two. For an all-reduce each side must learn of the other's sum: S up and S down. A
broadcast must carry S towards the side without the root. In a reduce-scatter whoever owns x of the data below the
link must be told of it by the others, x S down, and the rest must go up, (1 - x) S; an all-gather is the reverse. x
may be chosen for each rank, so the bound is the smallest T for which shares exist that fit on all links at once.

*Several links.* Any connected set of switches is a hub with k branches. For every element, at least k - 1 messages
must enter the hub, else a branch's contribution was not counted (or a branch was not told); for an all-reduce 2 (k -
1): at the moment when a branch first holds the sum, each other branch has sent something, and each must still be
told. Hence T >= (k - 1) S / (sum of the rates into the hub), twice that for an all-reduce, and the same with the
rates out of it. The best of all connected sets is found by Dinkelbach's method on the tree: a branch is kept whole or
opened, whichever gives more.

Siblings that are alike are looked at once, and counted (:func:`condensed`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from syncline.arguments import checked
from syncline.errors import ScheduleError
from syncline.schedule.draft import Collective
from syncline.schedule.ownership import Target
from syncline.topology import Node, Topology

_NO_TIME_S = 1e-30
_FAR_ABOVE = 1e6


@dataclass(slots=True)
class Branch:
    """A node seen from its parent, for bounds: its rates (0-free, maybe infinite) and the ranks below it.

    ``is_whole``: all ranks are below, so that nothing need ever cross its link.
    """

    name: str
    up: float
    down: float
    ranks: tuple[int, ...]
    is_whole: bool
    children: tuple[Branch, ...]
    count: int = 1
    """How many siblings it stands for, itself included."""
    order: tuple[int, ...] = ()
    """Where some children stand for others: which of :attr:`children` each child in the file's order is like."""

    @property
    def all_children(self) -> tuple[Branch, ...]:
        """The children in the file's order, those that stand for others as often as they do."""
        return tuple(self.children[place] for place in self.order) or self.children

    def walk(self) -> Iterator[Branch]:
        """Yield this branch and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def parents(self) -> Iterator[Branch]:
        """Yield all that have children, parents before children."""
        return (branch for branch in self.walk() if branch.children)


def branch_of(topology: Topology, *, swapped: bool = False) -> Branch:
    """Return the topology as branches; ``swapped`` exchanges up and down, which turns gathering into scattering."""

    def build(node: Node) -> Branch:
        children = tuple(build(child) for child in node.children)
        ranks = tuple(rank for child in children for rank in child.ranks) or (node.rank,)  # type: ignore[union-attr]
        up, down = (node.link.up_bytes_per_s, node.link.down_bytes_per_s) if node.link else (math.inf, math.inf)
        up, down = (down, up) if swapped else (up, down)
        is_whole = len(ranks) == topology.num_ranks
        return Branch(name=node.name, up=up, down=down, ranks=ranks, is_whole=is_whole, children=children)

    return build(topology.root)


def condensed(tree: Branch, limits: Sequence[object] = ()) -> Branch:
    """Return the tree with the first of siblings that are alike in place of all of them.

    Alike are those with the same rates, with the same below in the same order and, at the ranks, the same ``limits``.
    Whatever is best for all can be the same for them: the mean over all ways to exchange them is as good.
    """
    kinds = dict[object, int]()

    def condense(branch: Branch) -> tuple[int, Branch]:
        below = [condense(child) for child in branch.children]
        counts = Counter(kind for kind, _ in below)
        place = {kind: number for number, kind in enumerate(counts)}
        firsts = dict(reversed(below))
        for kind, count in counts.items():
            firsts[kind].count = count
        order = tuple(place[kind] for kind, _ in below)
        limit = limits[branch.ranks[0]] if limits and not below else None
        kind = kinds.setdefault((branch.up, branch.down, limit, tuple(kind for kind, _ in below)), len(kinds))
        children = tuple(firsts[kind] for kind in counts)
        return kind, Branch(branch.name, branch.up, branch.down, branch.ranks, branch.is_whole, children, 1, order)

    return condense(tree)[1]


def with_finite_rates(tree: Branch) -> Branch:
    """Replace infinite rates by ones that are far above all others."""
    rates = [rate for branch in tree.walk() for rate in (branch.up, branch.down) if rate < math.inf]
    ceiling = max(rates, default=1.0) * _FAR_ABOVE

    def bounded(branch: Branch) -> Branch:
        children = tuple(bounded(child) for child in branch.children)
        return replace(branch, up=min(branch.up, ceiling), down=min(branch.down, ceiling), children=children)

    return bounded(tree)


@checked
def lower_bound(
    topology: Topology, collective: Collective, num_bytes: int, *, target: Target = "balanced", root: int = 0
) -> float:
    """Return the seconds below which no schedule can bring the collective about, whatever its kind.

    With target "balanced" ranks may own whatever is fastest; with "rank_order" 1/N each. Latencies and the cost of
    messages are left out, so the bound is that of large sizes. Raises :class:`ScheduleError` for a negative size. Where
    a reduce-scatter and an all-gather have the same owners, :func:`sharded_step_bound` says more than their sum.

    >>> round(lower_bound(Topology.load("two-racks-5-3"), Collective.ALL_REDUCE, 64 << 20), 2)
    2.68
    """
    if num_bytes < 0:
        raise ScheduleError(f"a collective moves at least 0 bytes, not {num_bytes}")
    tree = branch_of(topology, swapped=collective is Collective.ALL_GATHER)
    if collective is not Collective.BROADCAST:  # which has a rank that is not like others
        tree = condensed(tree)
    return bound_of(tree, collective, target=target, root=root) * num_bytes


def bound_of(tree: Branch, collective: Collective, *, target: Target = "balanced", root: int = 0) -> float:
    """Return the bound in seconds per byte; for an all-gather the tree is ``swapped``."""
    if len(tree.ranks) == 1:
        return 0.0
    seconds_per_byte = _link_bound(tree, collective, target, root)
    times = 2 if collective is Collective.ALL_REDUCE else 1
    for into in (True, False):
        seconds_per_byte = _hub_bound(tree, times, seconds_per_byte, into=into)
    return seconds_per_byte


def _link_bound(tree: Branch, collective: Collective, target: Target, root: int) -> float:
    links = [branch for branch in tree.walk() if not branch.is_whole]
    if collective is Collective.ALL_REDUCE:
        return max(1 / min(branch.up, branch.down) for branch in links)
    if collective is Collective.BROADCAST:
        return max(1 / (branch.up if root in branch.ranks else branch.down) for branch in links)
    if target == "rank_order":
        shares = [len(branch.ranks) / len(tree.ranks) for branch in links]
        return max(max((1 - x) / branch.up, x / branch.down) for x, branch in zip(shares, links, strict=True))
    too_short, _ = bisect_time(lambda seconds: _has_shares(tree, seconds), _fastest(links))
    return too_short


def _fastest(links: list[Branch]) -> float:
    rates = [rate for branch in links for rate in (branch.up, branch.down) if rate < math.inf]
    return 1 / max(rates) if rates else 0.0


def bisect_time(is_enough: Callable[[float], bool], start: float, *, num_bisections: int = 60) -> tuple[float, float]:
    """Return a time that is not enough and one that is, close together; ``start`` gives the magnitude.

    Both are zero where any time is enough.
    """
    if start == 0 or is_enough(start * 1e-9):
        return 0.0, 0.0
    low, high = 0.0, start
    while not is_enough(high):
        low, high = high, high * 2
    for _ in range(num_bisections):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low, high


def _has_shares(tree: Branch, seconds: float) -> bool:
    """Whether shares of the ranks exist such that every link carries (1 - x) up and x down in time."""
    possible = True

    def limits(branch: Branch) -> tuple[float, float]:
        nonlocal possible
        below = [limits(child) for child in branch.children]
        counts = [child.count for child in branch.children]
        low = sum(part[0] * count for part, count in zip(below, counts, strict=True)) if below else 0.0
        high = min(1.0, sum(part[1] * count for part, count in zip(below, counts, strict=True))) if below else 1.0
        if not branch.is_whole:
            low, high = max(low, 1 - seconds * branch.up), min(high, seconds * branch.down)
        possible = possible and low <= high
        return low, high

    low, high = limits(tree)
    return possible and low <= 1 <= high


@dataclass(frozen=True, slots=True)
class _Hub:
    """A partial hub: how many branches it has and the sum of their rates."""

    num_branches: int
    rate: float

    def gain(self, times: int, seconds: float) -> float:
        return times * self.num_branches - seconds * self.rate

    def __add__(self, other: _Hub) -> _Hub:
        return _Hub(self.num_branches + other.num_branches, self.rate + other.rate)

    def __mul__(self, count: int) -> _Hub:
        return _Hub(self.num_branches * count, self.rate * count)


def _hub_bound(tree: Branch, times: int, seconds: float, *, into: bool) -> float:
    """Raise ``seconds`` (per byte) to the best bound that any hub gives."""
    seconds = max(seconds, _NO_TIME_S)
    while True:
        hub = _best_hub(tree, times, seconds, into=into)
        bound = times * (hub.num_branches - 1) / hub.rate if hub.rate > 0 else 0.0
        if bound <= seconds * (1 + 1e-12):
            return seconds if seconds > _NO_TIME_S else 0.0
        seconds = bound


def _best_hub(tree: Branch, times: int, seconds: float, *, into: bool) -> _Hub:
    best: list[_Hub] = []

    def open_branch(branch: Branch) -> _Hub:
        hub = sum((choose(child) * child.count for child in branch.children), _Hub(0, 0.0))
        above = _Hub(0, 0.0) if branch.is_whole else _Hub(1, branch.down if into else branch.up)
        best.append(hub + above)
        return hub

    def choose(branch: Branch) -> _Hub:
        closed = _Hub(1, branch.up if into else branch.down)
        if not branch.children:
            return closed
        opened = open_branch(branch)
        return max(closed, opened, key=lambda hub: hub.gain(times, seconds))

    open_branch(tree)
    return max(best, key=lambda hub: hub.gain(times, seconds))
