"""At the start each rank tells the others its host's name, and all number the topology as the job does.

The names go through the same meeting as addresses do later, so that no rank believes a name that an earlier attempt
left in the store, and a rank that does not come is named.
"""

from __future__ import annotations

import asyncio

from syncline.errors import TopologyError
from syncline.fabric import Rendezvous, Store
from syncline.fabric.rendezvous import LINGER_S, MAX_NAME_LENGTH, SILENCE_S, Member
from syncline.runtime.loop import CommunicationLoop
from syncline.schedule import with_gateways_chosen
from syncline.topology import Topology

_NOWHERE, _NO_PORT = "0.0.0.0", 1  # noqa: S104 - nothing listens: nobody connects by what is told here
_MARGIN_S = 10.0
"""The meeting keeps its own deadline; this is for a loop that does not answer."""


def match_topology(
    topology: Topology | None,
    *,
    rank: int,
    world_size: int,
    store: Store,
    host: str,
    timeout_s: float,
    job_id: str = "syncline",
    silence_s: float = SILENCE_S,
) -> Topology:
    """Tell the others ``host``, this rank's, and return the topology with the ranks where their hosts are.

    Gateways that it leaves open (``gateway: auto``) are chosen.

    Every rank of the job calls this, with the same topology and ``job_id``; None is one switch, without rates, for all
    hosts. It blocks until the last rank has come; one of which the store hears nothing for ``silence_s`` is gone. The
    store need not be kept.

    Raises ``RendezvousError`` after ``timeout_s`` (who did not come), and :class:`TopologyError` on all ranks if their
    number, or the hosts, or how many ranks each has, are not the topology's (see :meth:`.Topology.matched`).

    >>> match_topology(None, rank=0, world_size=1, store=None, host="a0", timeout_s=60.0).num_ranks  # one asks nobody
    1
    """
    if topology is not None:
        topology.check_world_size(world_size)
    name = "".join(letter for letter in host if letter.isprintable())[:MAX_NAME_LENGTH] or "unnamed"
    if world_size == 1:
        return _numbered(topology, (name,))
    loop = CommunicationLoop("syncline-hosts", native=False)
    loop.start()
    try:
        rendezvous = Rendezvous(store, job_id=f"{job_id}/hosts")
        member = Member(rank=rank, host=name, address=_NOWHERE, port=_NO_PORT)
        meeting = rendezvous.meet(member, world_size=world_size, timeout_s=timeout_s, silence_s=silence_s)
        hosts = tuple(other.host for other in loop.run(meeting, timeout_s + _MARGIN_S).members)
        try:
            return _numbered(topology, hosts)
        except TopologyError:
            if rank == 0:  # with this process its store may end, before the others have read the names
                loop.run(asyncio.sleep(LINGER_S), LINGER_S + _MARGIN_S)
            raise
    finally:
        loop.stop()


def _numbered(topology: Topology | None, hosts: tuple[str, ...]) -> Topology:
    if topology is not None:
        return with_gateways_chosen(topology.matched(hosts))
    return Topology.flat(len(hosts)) if len(set(hosts)) == 1 else Topology.flat_on(hosts)
