"""Replicas: parts of the topology in which the ranks own everything among them, so that no part needs another's.

A *replica* is all that is below one node: a host, a rack, a site. What a tree all-reduce does is known level by level:
reduce-scatters up to the root, then all-gathers in reverse. Cut in the middle (:func:`syncline.schedule.split`), each
range has one owner, and the all-gather crosses every link. Cut later, after the all-gathers *between* replicas, each
range has an owner in every replica; what is left stays inside them:

    first part    all reduce-scatters, and the all-gathers above the replicas   (under the backward pass)
    second part   the all-gathers inside each replica                           (after the step)

Both cuts move the same bytes. The second one costs memory: a rank owns its share of a replica in place of one of the
whole job. The first part is a reduce-scatter with one owner in each replica, the second an all-gather from these.

After Zhang et al., "MiCS: Near-linear scaling for training gigantic model on public cloud" (VLDB 2022), and PyTorch's
hybrid sharding, for replicas of any shape and unequal size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from syncline.errors import ScheduleError, TopologyError
from syncline.schedule.draft import Collective, Draft
from syncline.schedule.transfers import IntArray, Transfers
from syncline.schedule.verifier import split_at_owners
from syncline.topology import Host, Node, Topology
from syncline.topology.tree import ranks_below

Replicate = str | int | Sequence[str | Sequence[int]]
"""How a user names replicas; :func:`find_replicas` says what each form means."""
_MAX_NAMED = 16
Replicas = tuple[tuple[int, ...], ...]
"""The ranks of each replica."""


def find_replicas(topology: Topology, replicate: Replicate) -> Replicas:
    """Return the ranks of each replica, in the topology's order.

    ``replicate``: ``"host"``, each host is a replica; a number, each node so many levels below the root is one (the
    root's level is 0); names of switches or hosts; or groups of ranks. Each rank is in one of them. Raises
    :class:`~syncline.errors.TopologyError` for anything else, and for groups that are not all ranks below one node.

    >>> topology = Topology.load("two-racks-5-3")
    >>> find_replicas(topology, ["rack-a", "rack-b"]) == find_replicas(topology, 1)
    True
    >>> find_replicas(topology, 1)
    ((0, 1, 2, 3, 4), (5, 6, 7))
    """
    if isinstance(replicate, str) and replicate != "host":
        raise _refusal(topology, f"not {replicate!r}")
    if isinstance(replicate, str):
        nodes: list[Node] = [node for node in topology.walk() if isinstance(node, Host)]
    elif isinstance(replicate, int):
        if isinstance(replicate, bool) or not 0 <= replicate < _height(topology.root):
            raise _refusal(topology, f"not {replicate!r}")
        nodes = list(_at_level(topology.root, replicate))
    else:
        nodes = _named(topology, replicate)
    replicas = tuple(_ranks_of(node) for node in nodes)
    counted = sorted(rank for ranks in replicas for rank in ranks)
    if counted != list(range(topology.num_ranks)):
        counts = {rank: counted.count(rank) for rank in range(topology.num_ranks)}
        wrong = ", ".join(f"rank {rank} is in {count}" for rank, count in counts.items() if count != 1)
        raise _refusal(topology, f"each rank is in one of them, but {wrong}")
    return replicas


def find_parties(topology: Topology, parties: Replicate | None) -> Replicas:
    """Return the ranks that make local steps together: replicas, or for None each rank alone.

    ``"auto"``: what is below the first switch that divides the network, as sites, racks, or hosts of several ranks; on
    one host each rank is alone.

    >>> find_parties(Topology.load("two-racks-5-3"), "auto")
    ((0, 1, 2, 3, 4), (5, 6, 7))
    """
    if parties == "auto" and len(topology.hosts) > 1:
        return next(level for level in levels_of(topology) if len(level) > 1)
    if parties is None or parties == "auto":
        return tuple((rank,) for rank in range(topology.num_ranks))
    return find_replicas(topology, parties)


def draft_in_replicas(whole: Draft, replicas: Sequence[Sequence[int]]) -> tuple[Draft, Draft]:
    """Split an all-reduce in a reduce-scatter to an owner in each replica, and an all-gather inside each replica.

    One replica is :func:`split`. Both have the same cuts and owners (int32, [replicas, atoms]). Raises
    :class:`~syncline.errors.ScheduleError` for what is no all-reduce with owners, and where its all-gather enters a
    replica at several ranks, as a ring's may, or leaves it from another than its owner, as a weighted tree's may where
    links differ by direction; that of a tree whose nodes are the replicas enters and leaves at one.

    >>> topology = Topology.load("two-racks-5-3")
    >>> whole = plan_tree(topology, Collective.ALL_REDUCE)
    >>> first, second = map(verify, draft_in_replicas(whole.draft, find_replicas(topology, 1)))
    >>> [first.link_bytes(topology, 960)[link] for link in topology.route(0, 7)[2:4]]  # up rack-a, down rack-b
    [960, 960]
    >>> [second.link_bytes(topology, 960)[link] for link in topology.route(0, 7)[2:4]]
    [0, 0]
    """
    halves = split_at_owners(whole)
    if halves is None:
        raise ScheduleError(
            f"only an all_reduce with owners can be split, not the {whole.planner}'s {whole.collective}; plan the two "
            "collectives one by one"
        )
    scatter, gather = halves
    if len(replicas) < 2:
        return halves
    number = np.empty(whole.num_ranks, dtype=np.int32)
    for replica, ranks in enumerate(replicas):
        number[list(ranks)] = replica
    rows = gather.transfers
    is_inside = number[rows.src] == number[rows.dst]
    between, inside = rows.take(~is_inside), rows.take(is_inside)
    first = Transfers.concatenate([scatter.transfers, between.shifted(scatter.num_steps)])
    start = int(inside.step[0]) if len(inside) else 0
    draft = replace(scatter, owners=_owners(scatter, between, number, len(replicas)), transfers=first)
    return draft, replace(draft, collective=Collective.ALL_GATHER, transfers=inside.shifted(-start))


def levels_of(topology: Topology) -> list[Replicas]:
    """Return the replicas of each level from the root down, but for those that divide as the one above does."""
    levels = [find_replicas(topology, level) for level in range(_height(topology.root))]
    return [one for one, above in zip(levels, [(), *levels], strict=False) if one != above]


def _owners(draft: Draft, between: Transfers, number: IntArray, num_replicas: int) -> IntArray:
    """Return who has each atom in each replica, once it was sent to all of them."""
    owners: IntArray = np.full((num_replicas, draft.num_atoms), -1, dtype=np.int32)
    times: IntArray = np.zeros((num_replicas, draft.num_atoms), dtype=np.int32)
    owner = draft.owners[0]
    owners[number[owner], np.arange(draft.num_atoms)] = owner
    times[number[owner], np.arange(draft.num_atoms)] = 1
    for row in between:
        owners[number[row.dst], row.first : row.last] = row.dst
        times[number[row.dst], row.first : row.last] += 1
    if (times != 1).any():
        raise ScheduleError(
            f"replicas are entered once by each range, but the {draft.planner}'s all-gather enters one "
            f"{times.max()} times; take a tree's, whose nodes the replicas are"
        )
    for row in between:
        if (owners[number[row.src], row.first : row.last] != row.src).any():
            raise ScheduleError(
                f"replicas are left from the rank that owns a range there, but the {draft.planner}'s all-gather leaves "
                f"one from rank {row.src}, which owns it not; take a tree's whose sums come the same way"
            )
    return owners


def _at_level(node: Node, level: int) -> Iterator[Node]:
    """Yield the nodes so many levels below, and the leaves before that."""
    if level <= 0 or not node.children:
        yield node
        return
    for child in node.children:
        yield from _at_level(child, level - 1)


def _height(node: Node) -> int:
    return 1 + max((_height(child) for child in node.children), default=0)


def _named(topology: Topology, replicate: Sequence[str | Sequence[int]]) -> list[Node]:
    by_ranks = {_ranks_of(node): node for node in topology.walk()}
    nodes = []
    for each in replicate:
        if isinstance(each, str):
            nodes.append(topology.node(each))
        elif (ranks := tuple(sorted(each))) in by_ranks:
            nodes.append(by_ranks[ranks])
        else:
            raise _refusal(topology, f"but ranks {list(ranks)} are not all ranks below one node")
    return nodes


def _ranks_of(node: Node) -> tuple[int, ...]:
    return tuple(sorted(ranks_below(node)))


def _refusal(topology: Topology, reason: str) -> TopologyError:
    names = [node.name for node in topology.walk() if node.children]
    return TopologyError(
        f'Topology {(topology.source or topology.name)!r}: replicate, or parties, is "host", a level of the tree from '
        f"0 (the root) to {_height(topology.root) - 1}, names of switches or hosts ({', '.join(names[:_MAX_NAMED])}"
        f"{', ...' if len(names) > _MAX_NAMED else ''}), or groups of ranks, each all ranks below one of them; {reason}"
    )
