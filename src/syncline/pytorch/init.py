"""``init()``: from arguments and the environment to a fleet whose ranks are connected.

It also opens the ways into a job that runs: where this rank listens for newcomers, and how it comes in if it is one.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from syncline.arguments import Seconds, checked
from syncline.errors import ConfigurationError
from syncline.late_imports import without_collections
from syncline.observe import Trace
from syncline.pytorch.connecting import choose_interface, connect, is_exposed, with_address, with_secret
from syncline.pytorch.environment import (
    MEASURE,
    UNWRITTEN,
    Arguments,
    Environment,
    find_group,
    read_environment,
)
from syncline.pytorch.epochs import FleetGrowth
from syncline.pytorch.fleet import Fleet, check_first, enter_fleet
from syncline.pytorch.metrics import publish
from syncline.pytorch.notices import Notice, OnPreemption, Preemption
from syncline.pytorch.stores import open_store, store_of_group
from syncline.runtime import CommunicationLoop, joining
from syncline.topology import Topology
from syncline.updates.private_torch import default_store

_TIMES = ("heartbeat_s", "suspect_s", "dead_s", "stall_s", "held_s", "handshake_s", "connect_s")
_TAKEN_OVER = ("authenticate_frames", *_TIMES)
"""What a newcomer's fabric has from the job, whatever it was told itself."""


@checked
def init(
    topology: str | Path | Topology | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master: str | None = None,
    job_id: str | None = None,
    secret: bytes | str | None = None,
    insecure: bool = False,
    authenticate_frames: bool | None = None,
    interface: str | None = None,
    ports: str | None = None,
    advertise: str | None = None,
    host: str | None = None,
    timeout_s: Seconds | None = None,
    connect_timeout_s: Seconds | None = None,
    silence_s: Seconds | None = None,
    stall_s: Seconds | None = None,
    trace: str | Path | Trace | None = None,
    shared_memory: bool | None = None,
    bind_thread: bool | None = None,
    congestion: str | None = None,
    join: str | None = None,
    join_port: int | None = None,
    on_preemption: OnPreemption | None = None,
    replan: bool | None = None,
) -> Fleet:
    """Join the job, and return its fleet when all ranks are connected; every rank calls it once.

    Each argument that is given goes before its variable, which stands in brackets; then comes the default. ``topology``
    (``SYNCLINE_TOPOLOGY``): a file, the name of a shipped topology, a :class:`Topology`, or one of three words. "auto",
    the default: where there are several machines, the network is measured, or what was measured before between these
    is taken if it still holds. "measure": it is measured in any case. "flat": one switch for all, of no known rate.
    ``host`` (``SYNCLINE_HOST``, the machine's name): what the topology calls the host of this rank; ranks take
    their places in the topology by it. ``rank`` and ``world_size``, both or neither (``RANK`` and ``WORLD_SIZE``, or
    what another launcher says; default: a job of one rank). Where a process group of ``torch.distributed`` exists
    already, its ranks and its store are those of the job, and it is an error if the arguments, ``RANK`` or
    ``WORLD_SIZE`` say otherwise. ``master`` (``MASTER_ADDR`` and ``MASTER_PORT``, or from the launcher):
    ``"host:port"`` of rank 0. ``job_id`` (``TORCHELASTIC_RUN_ID``): ranks of another job are refused.

    ``secret`` (``SYNCLINE_SECRET_FILE``, ``SYNCLINE_SECRET``): at least 32 bytes that all ranks share. On one
    machine it may be left out: the ranks use their user's own, which is made when it is first needed. On several it is
    needed, unless ``insecure``, which excludes collectives on objects: they load pickles of other ranks.
    ``authenticate_frames`` (``SYNCLINE_AUTHENTICATE_FRAMES``; default: where ranks with a secret are on several
    machines), alike on all ranks: every frame carries a code keyed by the secret, so that nobody on the way can change,
    repeat or leave out what is sent. ``interface`` (``SYNCLINE_INTERFACE``): the address, or the interface's name, that
    the other ranks reach; ``"none"`` where this process has no network, and ranks of its host lend it theirs.
    ``ports`` (``SYNCLINE_PORTS``), as ``"29600-29631"``: on which of them this rank listens,
    for the job, for its process groups and for newcomers, and rank 0 for the store too, where no ``MASTER_PORT`` is set
    (default: any); one alone, ``"29600"``, all ranks of a host share. ``advertise`` (``SYNCLINE_ADVERTISE``), as
    ``"address"`` or ``"address:port"``: where other ranks reach this one, if not where it listens, as behind a router
    that hands a port on; ``"none"`` where ranks of other hosts cannot dial it, as behind one that does not: it connects
    to them, or meets them at a third rank.

    Seconds, alike on all ranks: ``timeout_s`` (``SYNCLINE_TIMEOUT``, 300): how long a collective may take, and so how
    long a rank may validate or save by itself while the others wait. ``connect_timeout_s``
    (``SYNCLINE_CONNECT_TIMEOUT``, 60): how long this call waits for the other ranks. ``silence_s``
    (``SYNCLINE_SILENCE``, 10): from when on a rank without a sign of life is lost. ``stall_s`` (``SYNCLINE_STALL``, as
    the timeout): from when on a rank that lives, but whose training thread makes no call, is not waited for any more.

    ``trace`` (``SYNCLINE_TRACE``): a file for this rank's trace, or a folder for those of all. ``shared_memory``
    (``SYNCLINE_SHARED_MEMORY``): whether small collectives may go through memory that the ranks of one machine share.
    ``bind_thread`` (``SYNCLINE_BIND_THREAD``): whether the communication thread may be bound to cores. ``congestion``
    (``SYNCLINE_CONGESTION``): TCP's congestion control, as ``"bbr"``; default: cubic within a machine and where the
    topology has rates, bbr (if the kernel has it) where a round trip takes 4 ms as well, else the system's.

    ``join`` (``SYNCLINE_JOIN``): come into an elastic job that runs, by ``"host:port"`` of any member's
    :attr:`Fleet.join_address` (several: with commas). This process is a job of one rank then, until its
    ``distribute(..., elastic=True)`` has brought it in. ``join_port`` (``SYNCLINE_JOIN_PORT``): where this rank listens
    for newcomers, at this port or the first free one of the next 63 (0: any; default: any, from ``distribute()`` on).
    ``on_preemption`` (``SYNCLINE_ON_PREEMPTION``): what SIGTERM or SIGUSR2 means, with which machines tell that they
    are about to be taken away. "leave": this rank leaves an elastic job at the end of a step, in which nothing is lost,
    and ends with status 0. "checkpoint": at the end of a step all ranks save what ``save_checkpoint`` or ``resume`` was
    given last, and end with status 143. A second signal acts as without this. In the main thread alone.

    ``replan`` (``SYNCLINE_REPLAN``; default: where the topology was measured): training with ``AllReduce`` or
    ``Sharded`` looks after the rates of links, and where one has been a third slower or faster for half a minute, the
    ranks measure them for some seconds at the end of a step, say what has changed, and plan again. Where the network
    was measured in doubt, they first try in turn the plan for what was found and that for one switch, on real steps.

    Raises :class:`ConfigurationError` (also if a fleet is open already), ``TopologyError``, ``RendezvousError`` and
    ``HandshakeError``, with who and what.

    >>> with syncline.init() as fleet:  # no launcher: a job of one rank
    ...     print(fleet.rank, fleet.world_size)
    0 1
    """
    given = Arguments(**locals())  # by name, as they are
    check_first()
    with without_collections():
        return open_fleet(read_environment(given=given, group=find_group()))


def open_fleet(environment: Environment, *, is_current: bool = True) -> Fleet:
    """Connect as ``environment`` says; a fleet that is not the current one is its owner's to close."""
    if environment.interface is None and environment.master_address is None and environment.world_size > 1:
        # Only a process group that met in a file or in memory names nobody: its machines find out in that store.
        environment = choose_interface(environment, store_of_group(), default_store())
    with ExitStack() as stack:
        environment, service, entry = _open_ways(with_address(environment), stack)
        options = environment.fabric
        communicator, is_in_doubt = connect(environment, open_store)
        stack.callback(communicator.abort)  # its loop must not outlive what could not be begun
        fleet = Fleet(communicator, is_trusted=options.secret is not None or not is_exposed(options))
        stack.callback(fleet.close, is_failing=True)
        is_measured = environment.topology in (None, MEASURE) and communicator.topology.has_rates
        fleet.replans = is_measured if environment.replan is None else environment.replan
        fleet.is_replan_asked = environment.replan is True
        fleet.is_network_in_doubt = is_in_doubt
        fleet.growth = growth = FleetGrowth(
            fleet, machine=environment.host, listen=partial(_listen, environment), service=service, entry=entry
        )
        fleet.on_close(lambda is_failing: growth.close(is_over=not is_failing))
        # No one leaves before rank 0's store is gone: the next init() must not meet at this one. So all meet here.
        fleet.communicator.open_segment(is_wanted=environment.uses_shared_memory)
        if is_current:
            enter_fleet(fleet)
            stop = publish(fleet.statistics, lambda: fleet.communicator)
            fleet.on_close(lambda _: stop())
            if environment.on_preemption is not None:
                fleet.preemption = Preemption(Notice[environment.on_preemption.upper()])
                fleet.preemption.begin()
        stack.pop_all()
    return fleet


def _open_ways(
    environment: Environment, stack: ExitStack
) -> tuple[Environment, joining.Growth | None, joining.Entry | None]:
    """Listen, if a port was asked for, and ask to come in, if a member was named; ``stack`` undoes it.

    A newcomer asks before it connects, and takes over how the job behaves. Raises ``HandshakeError`` with the reason
    where it is refused.
    """
    if not environment.join and environment.join_port is None:
        return environment, None, None
    service = _listen(environment)
    stack.callback(service.close)
    if not environment.join:
        return environment, service, None
    loop = CommunicationLoop()
    loop.start()
    stack.callback(loop.stop)
    address, _ = service.join_address
    entry = joining.Entry(
        loop=loop,
        options=environment.fabric,
        own_address=address,
        machine=environment.host,
        join_address=service.join_address,
        addresses=list(environment.join),
        topology=_text_of(environment.topology),
    )
    terms = entry.ask()
    fabric = replace(environment.fabric, **{name: terms[name] for name in _TAKEN_OVER})
    environment = with_address(environment._replace(topology=None, fabric=fabric))
    service.adopt(environment.fabric, terms)
    entry.options = environment.fabric
    return environment, service, entry


def _listen(environment: Environment) -> joining.Growth:
    return joining.Growth(
        with_secret(environment.fabric),
        terms={name: getattr(environment.fabric, name) for name in _TAKEN_OVER},
        port=environment.join_port or 0,
    )


def _text_of(topology: Any) -> str | None:
    """Return the tree that a newcomer brings for the larger job, as text."""
    if topology in UNWRITTEN:
        return None
    chosen = topology if isinstance(topology, Topology) else Topology.load(topology)
    if chosen.helpers:
        raise ConfigurationError("A job with helpers does not grow; write 'gateway: one' in the topology")
    return chosen.to_yaml()
