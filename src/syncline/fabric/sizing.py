"""Sizes that fit the links: how much to grant, and in what pieces to send.

Whatever is under way on a link delays an urgent message by the time that the link needs for it. So where the topology
gives rates, a window lasts about 10 ms on the link that it is for, and a chunk about 5 ms on its route. Where several
connection classes are open, someone cares for order: then the window is as much less as hosts are quick to answer, down
to 2 ms (``native/grant_window.hpp``), and grants are smaller.

Asking costs both ends a wake-up, and pays where the order among senders matters: on links between switches. Where none
of a known rate lies on the way, a message of up to a chunk comes unasked. What all such senders together may have on
their way lasts a window.

A link between switches is drawn over by all ranks on its far side. What they have under way on it together lasts about
SHARED_WINDOW_S: half of that stands in the queue while the other half are grants on their way back. Where the
queue is shorter than that, senders tell how much was lost, and less is granted (``native/link_share.hpp``).

From a grant to what it brings takes the latency of the route there and back. What the route carries in that time is
under way too, beside what lasts a window, and waits nowhere: where latency is high it is most of all. So it is what is
left to a receiver where much is lost: no queue is shorter for it, and shares grow back by round trips. Where nothing
but a few packets is lost, what stands behind one of them comes a round trip later, or two where the last or the resent
one was lost: so FAR_ROUND_TRIPS are under way, else the link would idle meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import takewhile
from typing import NamedTuple, TypedDict

from syncline.fabric.options import FabricOptions
from syncline.topology import DirectedLink, Switch, Topology
from syncline.topology.tree import num_ranks_below

DEFAULT_WINDOW_BYTES = 4 << 20
WINDOW_S, CHUNK_S = 0.010, 0.005
LEAST_WINDOW_S, LEAST_QUANTUM_S = 0.002, 0.00065
SHARED_WINDOW_S = 0.015
TARGET_S = 0.020
MIN_CHUNK_BYTES = 32 << 10
MIN_QUANTUM_BYTES = 16 << 10
LEAST_CREDIT_BYTES = 64 << 10
"""With less, short messages would wait for credit too often."""
CONGESTION_WITH_RATES, FAR_CONGESTION = "cubic", "bbr"
"""Where grants keep queues from overflowing, a control that heeds losses alone never holds back. BBR paces, and every
ten seconds it stops a connection for 0.2 s to look at the empty route. But it alone does not begin slowly again after
each pause, which takes several round trips: as much as a call does, where these are long."""
FAR_ROUND_TRIPS = 3
TOLERATED_SHARE, FAR_TOLERATED_SHARE = 0.02, 0.04
FAR_JUDGED_BYTES = 500 * 1448
"""Two links that lose 0.5 % each, and what is resent needlessly, which is known a round trip too late: 1.4 % seemed to
be lost. A share that falls grows back in hundreds of its lengths, so chance must hardly ever reach this."""
FAR_S = 0.004
"""There and back to a peer that is far, or longer."""


class GrantWindow(NamedTuple):
    """The bytes that may be granted to one rank and not yet here; it begins with the most.

    Equal bounds, or a link of unknown rate, keep it as it is; else it follows how quickly hosts answer.
    """

    most_bytes: int
    least_bytes: int
    bytes_per_s: float = math.inf

    @classmethod
    def fixed(cls, num_bytes: int) -> GrantWindow:
        """Return a window that stays as it is."""
        return cls(most_bytes=num_bytes, least_bytes=num_bytes)

    @property
    def is_fixed(self) -> bool:
        """Whether nothing can be learnt."""
        return self.least_bytes == self.most_bytes or math.isinf(self.bytes_per_s)


class LinkShare(NamedTuple):
    """What one receiver may have under way on a link that several draw over, but for one quantum.

    The same object stands for the link in the routes of all senders behind it.
    """

    part_bytes: int
    """Its part, if all receivers draw."""
    most_bytes: int
    """What no one may exceed."""
    least_bytes: int
    """What is left where much is lost."""
    target_s: float
    """How long an arrival may take, from its grant on, before the share shrinks."""
    tolerated_share: float = TOLERATED_SHARE
    """What may be lost of it before it falls below its part."""
    least_judged_bytes: int = 0
    """What is lost counts as a part of its length, or of so much if that is more."""


class WindowSizes(TypedDict):
    """How much a rank grants, in which pieces, and to each sender."""

    window: GrantWindow
    quantum_bytes: int
    sender_bytes: Mapping[int, int]


class GrantSizes(WindowSizes):
    """The same, and what a rank may have under way on the slow links of each sender's route."""

    shares: Mapping[int, Sequence[LinkShare]]


def fit_grants(options: FabricOptions, *, rank: int, world_size: int, topology: Topology | None) -> GrantSizes:
    """Size the grant window by what drains to this rank, and each sender's share by its route."""
    return {**fit_window_sizes(options, rank, world_size, topology), "shares": _shares(topology, rank)}


def fit_window_sizes(options: FabricOptions, rank: int, world_size: int, topology: Topology | None) -> WindowSizes:
    """Size the grant window alone: connection classes that are opened later change it, and not the links."""
    own_rate, routes = _own_rate(topology, rank), _routes(topology, world_size, target=rank)
    window = fit_window(own_rate, options, far_bytes=_far_bytes(routes.values(), own_rate))
    if window.is_fixed:
        quantum_bytes = max(_chunk(own_rate, options), window.most_bytes // 4)
    else:
        quantum_bytes = max(MIN_QUANTUM_BYTES, int(own_rate * LEAST_QUANTUM_S))
    return {
        "window": window,
        "quantum_bytes": quantum_bytes,
        "sender_bytes": {
            peer: min(window.most_bytes, _route_bytes(route.bytes_per_s, options) + route.far_bytes)
            for peer, route in routes.items()
        },
    }


def fit_options(
    options: FabricOptions, *, rank: int, world_size: int, topology: Topology | None
) -> Mapping[int, FabricOptions]:
    """Return the options for each peer: what is sent to it goes in chunks that its route carries soon, unpaced."""
    neighbour_credits = _neighbour_credits(options, topology, rank)
    own_credit_bytes = neighbour_credits.pop(rank, 0)

    @cache
    def fit(rate: float, least_credit_bytes: int, is_far: bool) -> FabricOptions:
        most_bytes = _soon_bytes(rate)
        eager_bytes = max(options.eager_bytes, min(_chunk(rate, options), least_credit_bytes))
        return replace(
            options,
            eager_bytes=eager_bytes,
            credit_bytes=own_credit_bytes if least_credit_bytes else options.credit_bytes,
            chunk_bytes=max(eager_bytes, min(options.chunk_bytes, most_bytes)),
            unsent_bytes=max(eager_bytes, min(options.unsent_bytes, most_bytes)),
            congestion=options.congestion or _congestion(rate, is_far=is_far),
        )

    return {
        peer: fit(route.bytes_per_s, min(own_credit_bytes, neighbour_credits.get(peer, 0)), route.round_trip_s >= FAR_S)
        for peer, route in _routes(topology, world_size, source=rank).items()
    }


def _congestion(rate: float, *, is_far: bool) -> str | None:
    """Return the control for a route; None is the system's."""
    if math.isinf(rate):
        return None
    return FAR_CONGESTION if is_far else CONGESTION_WITH_RATES


def _neighbour_credits(options: FabricOptions, topology: Topology | None, rank: int) -> dict[int, int]:
    """Return how much ``rank``, and each of its neighbours, lets each of their neighbours send unasked.

    That is 0 if it would be too little: then it and its neighbours ask. Nobody is in there if someone cares for order.
    """
    if topology is None or not topology.has_rates or options.num_classes > 1 or not options.eager_bytes:
        return {}
    own = topology.host_of(rank)
    switch = topology.parent_of(own.name)
    hosts = [host for host in topology.hosts if topology.parent_of(host.name) is switch]
    num_ranks = sum(len(host.ranks) for host in hosts)
    receivers = [(host, member.rank) for host in hosts for member in host.ranks if host is not own]
    return {
        receiver: _credit(options, _own_rate(topology, receiver), num_ranks - len(host.ranks))
        for host, receiver in [(own, rank), *receivers]
    }


def _credit(options: FabricOptions, own_rate: float, num_senders: int) -> int:
    """Return what each of so many neighbours may send unasked, if all together may have a window on their way."""
    if not num_senders or math.isinf(own_rate):
        return 0
    credit_bytes = min(options.credit_bytes, int(own_rate * WINDOW_S) // num_senders)
    return credit_bytes if credit_bytes >= max(options.eager_bytes, LEAST_CREDIT_BYTES) else 0


def _shares(topology: Topology | None, rank: int) -> dict[int, tuple[LinkShare, ...]]:
    """Return for each peer the links between switches on its route to ``rank``, with what this rank may use of them."""
    if topology is None or not topology.has_rates:
        return {}
    inner = {node.name: num_ranks_below(node) for node in topology.walk() if isinstance(node, Switch) and node.link}
    routes = {peer: topology.route(peer, rank) for peer in range(topology.num_ranks)}
    far_s: dict[DirectedLink, float] = {}
    for peer, route in routes.items():
        round_trip_s = topology.round_trip_s(peer, rank)
        far_s.update({directed: max(far_s.get(directed, 0.0), round_trip_s) for directed in route})

    def share_of(directed: DirectedLink) -> LinkShare | None:
        link = topology.node(directed.child).link
        if directed.child not in inner or link is None or math.isinf(link.bytes_per_s(directed.direction)):
            return None
        below = inner[directed.child]
        num_receivers = below if directed.direction == "down" else topology.num_ranks - below
        rate = link.bytes_per_s(directed.direction)
        window_bytes = int(rate * (SHARED_WINDOW_S + FAR_ROUND_TRIPS * far_s[directed]))
        part_bytes = max(MIN_CHUNK_BYTES, window_bytes // num_receivers)
        return LinkShare(
            part_bytes=part_bytes,
            most_bytes=max(part_bytes, window_bytes),
            least_bytes=max(MIN_QUANTUM_BYTES, int(rate * far_s[directed]) // num_receivers),
            target_s=TARGET_S + far_s[directed],
            tolerated_share=FAR_TOLERATED_SHARE if far_s[directed] else TOLERATED_SHARE,
            least_judged_bytes=FAR_JUDGED_BYTES if far_s[directed] else 0,
        )

    known = {directed: share_of(directed) for directed in far_s}
    return {
        peer: tuple(share for directed in route if (share := known[directed]) is not None)
        for peer, route in routes.items()
    }


def _own_rate(topology: Topology | None, rank: int) -> float:
    """Return what arrives at ``rank`` when all ranks of its host receive."""
    inside = () if topology is None else takewhile(lambda node: not isinstance(node, Switch), topology.path(rank))
    rates = [node.link.down_bytes_per_s / num_ranks_below(node) for node in inside if node.link is not None]
    return min(rates, default=math.inf)


class _Route(NamedTuple):
    """A way to or from a peer: the slowest link and its rate, and the time there and back."""

    slowest: DirectedLink | None = None
    bytes_per_s: float = math.inf
    round_trip_s: float = 0.0

    @property
    def far_bytes(self) -> int:
        """What it carries in some round trips; 0 where its rate is not known."""
        return 0 if self.slowest is None else int(self.bytes_per_s * FAR_ROUND_TRIPS * self.round_trip_s)


def _routes(
    topology: Topology | None, world_size: int, *, source: int | None = None, target: int | None = None
) -> dict[int, _Route]:
    """Return the ways from ``source`` to each rank, or from each rank to ``target``."""
    if topology is None or not topology.has_rates:
        return dict.fromkeys(range(world_size), _Route())
    routes = {}
    for peer in range(world_size):
        ends = (source if source is not None else peer, target if target is not None else peer)
        links = topology.route(*ends)
        slowest = min(links, key=topology.bytes_per_s, default=None)
        rate = math.inf if slowest is None else topology.bytes_per_s(slowest)
        limit = None if math.isinf(rate) else slowest
        routes[peer] = _Route(slowest=limit, bytes_per_s=rate, round_trip_s=topology.round_trip_s(*ends))
    return routes


def _far_bytes(routes: Iterable[_Route], own_rate: float) -> int:
    """Return what may be on its way to a rank beside its window: each slow link counts once, and all its own rate."""
    far = [route for route in routes if route.far_bytes]
    by_link: dict[DirectedLink | None, int] = {}
    for route in far:
        by_link[route.slowest] = max(by_link.get(route.slowest, 0), route.far_bytes)
    most_s = max((route.round_trip_s for route in far), default=0.0)
    return int(min(sum(by_link.values()), own_rate * FAR_ROUND_TRIPS * most_s)) if far else 0


def fit_window(own_rate: float, options: FabricOptions, *, far_bytes: int = 0) -> GrantWindow:
    """Return the window for a rank to which ``own_rate`` bytes come in a second, and ``far_bytes`` wait nowhere."""
    if options.grant_window_bytes:
        return GrantWindow.fixed(options.grant_window_bytes)
    most_bytes = _route_bytes(own_rate, options) + far_bytes
    if options.num_classes == 1 or math.isinf(own_rate):
        return GrantWindow.fixed(most_bytes)
    least_bytes = min(most_bytes, max(2 * MIN_QUANTUM_BYTES, int(own_rate * LEAST_WINDOW_S)))
    return GrantWindow(most_bytes=most_bytes, least_bytes=least_bytes, bytes_per_s=own_rate)


def _route_bytes(bytes_per_s: float, options: FabricOptions) -> int:
    """Return what one sender may have under way on a route of its own rate."""
    if math.isinf(bytes_per_s):
        return max(2 * options.chunk_bytes, DEFAULT_WINDOW_BYTES)
    return max(2 * _chunk(bytes_per_s, options), int(bytes_per_s * WINDOW_S))


def _chunk(bytes_per_s: float, options: FabricOptions) -> int:
    return min(options.chunk_bytes, _soon_bytes(bytes_per_s))


def _soon_bytes(bytes_per_s: float) -> int:
    """Return what a link carries soon enough for whatever waits behind it."""
    return DEFAULT_WINDOW_BYTES if math.isinf(bytes_per_s) else max(MIN_CHUNK_BYTES, int(bytes_per_s * CHUNK_S))
