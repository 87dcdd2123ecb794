"""All planners by name, and the choice among them by predicted time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from syncline.arguments import checked
from syncline.errors import ScheduleError
from syncline.schedule.binomial import draft_binomial
from syncline.schedule.cost import DEFAULT_SLICE_BYTES, CostModel, fastest, predict, safest, supposed_network
from syncline.schedule.draft import MAX_PLANNED_RANKS, Collective, Draft, check_plannable
from syncline.schedule.outline import Outline
from syncline.schedule.ownership import Target, is_bound_to_gateways, with_gateway
from syncline.schedule.recursive_doubling import draft_recursive_doubling
from syncline.schedule.ring import draft_ring
from syncline.schedule.schedule import Schedule
from syncline.schedule.tree import draft_tree, outline_tree
from syncline.schedule.verifier import verify
from syncline.schedule.weighted_tree import draft_weighted_tree, outline_weighted_tree
from syncline.topology import Link, Topology

BUCKET_BYTES = 4 << 20
"""A training bucket of the usual size."""


@checked
def with_gateways_chosen(topology: Topology, num_bytes: int = BUCKET_BYTES) -> Topology:
    """Return the topology with ``every`` or ``one`` in place of ``auto``: one answer for all hosts that leave it open.

    Both ways are planned and predicted for an all-reduce of ``num_bytes``, and every rank speaks unless one for each
    host is faster. All ranks of a job come to the same answer. A topology without ``auto`` is returned as it is.

    >>> hosts = "{host: 'h[0-2]', uplink: 1 Gbit/s, ranks: 3, gateway: auto}"
    >>> topology = Topology.parse(f"{{switch: s, children: [{hosts}]}}")
    >>> [with_gateways_chosen(topology, num_bytes).hosts[0].gateway for num_bytes in (64 << 10, 64 << 20)]
    ['one', 'every']
    """
    if all(host.gateway != "auto" for host in topology.hosts):
        return topology
    every, one = (with_gateway(topology, gateway, of=("auto",)) for gateway in ("every", "one"))
    return one if _time_s(one, num_bytes) < _time_s(every, num_bytes) else every


def _time_s(topology: Topology, num_bytes: int) -> float:
    return predict(choose(topology, Collective.ALL_REDUCE, num_bytes), topology, num_bytes).time_s


_MOST_RANKS_FOR_LONG_SCHEDULES = 256
"""Beyond it a ring's N steps lose to anything, and drawing it costs more than all other planners together."""
DRAWN_RANKS = 256
"""Beyond it what can be is planned in outline, where nothing is to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """A way to draw schedules, and the collectives that it knows.

    ``draft(topology, collective, *, target, root)`` returns a :class:`Draft`. ``knows_gateways``: whether it keeps
    ranks behind a gateway from speaking to other hosts; one that does not is no choice where there are gateways.
    ``most_ranks``: beyond it, it cannot win. ``outline(topology, collective)`` plans without drawing, if it can, what
    is no broadcast and has the target "balanced".

    >>> PLANNERS["binomial"].collectives == {Collective.BROADCAST}
    True
    """

    name: str
    draft: Callable[..., Draft]
    collectives: frozenset[Collective]
    knows_gateways: bool = False
    most_ranks: int = MAX_PLANNED_RANKS
    outline: Callable[[Topology, Collective], Outline] | None = None

    def outlines(self, topology: Topology, collective: Collective, target: Target) -> bool:
        """Whether what it plans for so many ranks is better not drawn, and need not be.

        >>> PLANNERS["tree"].outlines(Topology.flat(4), Collective.ALL_REDUCE, "balanced")
        False
        """
        is_able = self.outline is not None and collective is not Collective.BROADCAST and target == "balanced"
        return is_able and topology.num_ranks > DRAWN_RANKS

    def serves(self, topology: Topology, collective: Collective, target: Target = "balanced") -> bool:
        """Whether it can plan ``collective`` as ``topology`` wants it.

        >>> PLANNERS["ring"].serves(Topology.parse("{host: a, ranks: 2, gateway: one}"), Collective.ALL_REDUCE)
        False
        """
        is_able = self.knows_gateways or not is_bound_to_gateways(topology, collective, target)
        return is_able and collective in self.collectives

    @checked
    def plan(
        self, topology: Topology, collective: Collective, *, target: Target = "balanced", root: int = 0
    ) -> Schedule:
        """Draw a schedule and prove it; :class:`ScheduleError` for what it does not serve.

        ``target`` and ``root`` as in :func:`plan_tree`.

        >>> topology = Topology.load("three-racks-uneven-uplinks")
        >>> plans = [PLANNERS[name].plan(topology, Collective.ALL_REDUCE) for name in ("weighted_tree", "ring", "tree")]
        >>> sorted((predict(plan, topology, 64 << 20).time_s, plan.planner) for plan in plans)[0][1]
        'weighted_tree'
        """
        check_plannable(topology)
        if collective not in self.collectives:
            known = ", ".join(sorted(self.collectives))
            raise ScheduleError(f"planner {self.name!r} plans {known}, not {collective}; take another planner")
        if not self.serves(topology, collective, target):
            able = ", ".join(planner.name for planner in PLANNERS.values() if planner.knows_gateways)
            raise ScheduleError(
                f"planner {self.name!r} lets every rank speak to other hosts, and topology {topology.name!r} has "
                f"gateways; take one of {able}, or write 'gateway: every'"
            )
        return verify(self.draft(topology, collective, target=target, root=root))


_ALL = frozenset(Collective)
_BROADCAST = frozenset({Collective.BROADCAST})

PLANNERS: Mapping[str, Planner] = MappingProxyType(
    {
        planner.name: planner
        for planner in (
            Planner(name="tree", draft=draft_tree, collectives=_ALL, knows_gateways=True, outline=outline_tree),
            Planner(
                name="weighted_tree",
                draft=draft_weighted_tree,
                collectives=_ALL,
                knows_gateways=True,
                outline=outline_weighted_tree,
            ),
            Planner(name="ring", draft=draft_ring, collectives=_ALL, most_ranks=_MOST_RANKS_FOR_LONG_SCHEDULES),
            Planner(name="recursive_doubling", draft=draft_recursive_doubling, collectives=_ALL - _BROADCAST),
            Planner(name="binomial", draft=draft_binomial, collectives=_BROADCAST),
        )
    }
)
"""Planners by name; of two that are equally fast, the first is taken."""

HOST_RING = Planner(
    name="host_ring",
    draft=partial(draft_tree, planner="host_ring", ring_at_root=True),
    collectives=_ALL - _BROADCAST,
    knows_gateways=True,
    most_ranks=_MOST_RANKS_FOR_LONG_SCHEDULES,
)
"""For networks of which nothing is known; on one that is known, it gains nothing over the tree."""


@checked
def choose(
    topology: Topology,
    collective: Collective,
    num_bytes: int,
    *,
    target: Target = "balanced",
    root: int = 0,
    slice_bytes: int = DEFAULT_SLICE_BYTES,
    cost: CostModel | None = None,
) -> Schedule:
    """Return the schedule that is predicted to be the fastest for ``num_bytes``; only that one is proved.

    Every planner of :data:`PLANNERS` that serves the collective draws one (rings only up to 256 ranks), and
    :func:`predict` costs them in slices of ``slice_bytes``; ``cost`` as there.
    Where nothing is known of the network (:attr:`.Topology.is_unknown`) it is the safest of those about as fast.

    >>> topology = Topology.load("two-racks-5-3")
    >>> choose(topology, Collective.ALL_REDUCE, 64 << 20).planner
    'tree'
    """
    drafts = draft_all(topology, collective, target=target, root=root)
    return verify(best_of(drafts, topology, num_bytes, slice_bytes=slice_bytes, cost=cost))


def draft_all(topology: Topology, collective: Collective, *, target: Target, root: int) -> list[Draft]:
    """Return what :func:`choose` compares; it is the same for all sizes."""
    check_plannable(topology)
    return [
        planner.draft(topology, collective, target=target, root=root)
        for planner in planners_for(topology)
        if planner.serves(topology, collective, target)
    ]


def best_of(
    drafts: Sequence[Draft],
    topology: Topology,
    num_bytes: int,
    *,
    slice_bytes: int,
    cost: CostModel | None = None,
) -> Draft:
    """Return that of ``drafts`` that :func:`choose` takes for ``num_bytes``."""
    supposed = supposed_network(topology)
    predicted = [(draft, predict(draft, supposed, num_bytes, slice_bytes, cost=cost)) for draft in drafts]
    return safest(predicted, topology) if topology.is_unknown else fastest(predicted)


def planners_for(topology: Topology) -> list[Planner]:
    """Return those that can win, and draw in good time, on a topology of so many ranks."""
    able = [*PLANNERS.values(), *([HOST_RING] if topology.is_unknown else [])]
    hopeless = {planner.name for planner in able if topology.num_ranks > planner.most_ranks}
    if not topology.is_unknown and all(link == Link.unlimited() for _, link in topology.links()):
        hopeless.add("weighted_tree")  # there is nothing that it could weigh
    return [planner for planner in able if planner.name not in hopeless]
