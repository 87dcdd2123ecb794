"""At the start each rank tells the others its host's name, and all number the topology as the job does.

Each also tells which topology it was given: ranks with different ones would plan different schedules, and one that can
do nothing with its own would leave the others waiting. All this goes through the same meeting as addresses do later, so
that no rank believes what an earlier attempt left in the store, and a rank that does not come is named.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from syncline import schedule
from syncline.errors import RendezvousError, TopologyError, accusing, escape_text, name_ranks
from syncline.fabric import Rendezvous, Store
from syncline.fabric.rendezvous import LINGER_S, MAX_NAME_LENGTH, MAX_TOPOLOGY_LENGTH, SILENCE_S, Member
from syncline.runtime.loop import CommunicationLoop
from syncline.topology import Topology
from syncline.topology.host_matching import same_host

_NOWHERE, _NO_PORT = "0.0.0.0", 1  # noqa: S104 - nothing listens: nobody connects by what is told here
MAX_TOLD = 4
"""So many different topologies are told of."""
_OF_NO_USE = "one of no use"
_MARGIN_S = 10.0
"""The meeting keeps its own deadline; this is for a loop that does not answer."""


def match_topology(
    topology: Topology | TopologyError | Literal["flat"] | None,
    *,
    rank: int,
    world_size: int,
    store: Store,
    host: str,
    timeout_s: float,
    job_id: str = "syncline",
    silence_s: float = SILENCE_S,
    hint: str = "",
) -> Topology:
    """Tell the others ``host``, this rank's, and return the topology with the ranks where their hosts are.

    Gateways that it leaves open (``gateway: auto``) are chosen.

    Every rank of the job calls this, with the same topology and ``job_id``; "flat" is one switch, without rates, for
    all hosts, and so is None, with which the job measures its network afterwards. With the error that a topology ended
    in, the other ranks are told of it, and it is raised. It blocks until the last rank has come; one of which the store
    hears nothing for ``silence_s`` is gone. The store need not be kept. ``hint``: why others may not reach rank 0.

    Raises ``RendezvousError`` after ``timeout_s`` (who did not come), and :class:`TopologyError` on all ranks if their
    number, or the hosts, or how many ranks each has, are not the topology's (see :meth:`.Topology.matched`), or if
    ranks have different ones.

    >>> match_topology(None, rank=0, world_size=1, store=None, host="a0", timeout_s=60.0).num_ranks  # one asks nobody
    1
    """
    if isinstance(topology, Topology):
        topology.check_world_size(world_size)
    name = "".join(letter for letter in host if letter.isprintable())[:MAX_NAME_LENGTH] or "unnamed"
    if world_size == 1:
        return _numbered(topology, (name,))
    loop = CommunicationLoop("syncline-hosts")
    loop.start()
    try:
        rendezvous = Rendezvous(
            store,
            job_id=f"{job_id}/hosts",
            awaited=_awaited(topology),
            trouble=str(topology) if isinstance(topology, TopologyError) else "",
            hint=hint,
        )
        member = Member(rank=rank, host=name, address=_NOWHERE, port=_NO_PORT, topology=_describe(topology))
        meeting = rendezvous.meet(member, world_size=world_size, timeout_s=timeout_s, silence_s=silence_s)
        try:
            members = loop.run(meeting, timeout_s + _MARGIN_S).members
        except RendezvousError:
            if isinstance(topology, TopologyError):  # nobody came to be told
                raise topology from None
            raise
        try:
            _check_alike(members)
            return _numbered(topology, tuple(other.host for other in members))
        except TopologyError:
            if rank == 0:  # with this process its store may end, before the others have read the names
                loop.run(asyncio.sleep(LINGER_S), LINGER_S + _MARGIN_S)
            raise
    finally:
        loop.stop()


def _awaited(topology: Topology | TopologyError | Literal["flat"] | None) -> Callable[[Sequence[str]], Sequence[str]]:
    """Return what tells which hosts of ``topology`` have ranks beside those on the hosts that it is given."""
    hosts = topology.hosts if isinstance(topology, Topology) else ()

    def awaited(names: Sequence[str]) -> Sequence[str]:
        here = Counter(host.name for name in names for host in same_host(name, hosts))
        return [host.name for host in hosts if here[host.name] < len(host.ranks)]

    return awaited


def _describe(topology: Topology | TopologyError | Literal["flat"] | None) -> str:
    """Say which topology it is, so that two that differ are told apart and found."""
    if topology is None:
        return "none: what is measured"
    if isinstance(topology, str):
        return "flat: one switch for all"
    if isinstance(topology, TopologyError):
        return escape_text(f"{_OF_NO_USE}: {topology}", max_chars=MAX_TOPOLOGY_LENGTH)
    name = escape_text(repr(topology.source or topology.name), max_chars=200)
    return f"digest {topology.digest[:12]}: {name}, {topology.num_ranks} ranks on {len(topology.hosts)} hosts"


def _check_alike(members: Sequence[Member]) -> None:
    """Raise :class:`TopologyError`, the same on every rank, where ranks were given different topologies."""
    having: dict[str, list[Member]] = {}
    for member in members:
        kind, _, _ = member.topology.partition(":")  # equal trees may be in files of different names
        having.setdefault(kind, []).append(member)
    if len(having) == 1:
        return
    groups = sorted(having.values(), key=lambda group: (group is having.get(_OF_NO_USE), -len(group), group[0].rank))
    told = "; ".join(
        f"{name_ranks(member.rank for member in group)} {'has' if len(group) == 1 else 'have'} {group[0].topology}"
        for group in groups[:MAX_TOLD]
    )
    odd = groups[-1][0]
    error = TopologyError(
        f"All ranks must be given the same topology, but they differ ({told}); give every rank the same file in "
        f"init(topology=...) or SYNCLINE_TOPOLOGY, and look first at rank {odd.rank} (host {odd.host})"
    )
    raise accusing(error, *(member.rank for member in groups[-1]))


def _numbered(topology: Topology | TopologyError | Literal["flat"] | None, hosts: tuple[str, ...]) -> Topology:
    if isinstance(topology, TopologyError):
        raise topology
    if isinstance(topology, Topology):
        return schedule.with_gateways_chosen(topology.matched(hosts))
    return Topology.flat(len(hosts)) if len(set(hosts)) == 1 else Topology.flat_on(hosts)
