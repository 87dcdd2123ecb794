"""``init()``: from arguments and the environment to a fleet whose ranks are connected."""

from __future__ import annotations

import time
from ipaddress import ip_address
from pathlib import Path

from syncline.errors import ConfigurationError, TopologyError
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp
from syncline.fabric.sockets import resolve_address
from syncline.observe import Trace
from syncline.pytorch.environment import Arguments, Environment, own_address, read_environment
from syncline.pytorch.fleet import Fleet, check_first, enter_fleet
from syncline.pytorch.stores import LocalStore, TorchStore, open_store
from syncline.pytorch.told_once import tell_once
from syncline.runtime import CommunicationLoop, Communicator, match_topology
from syncline.topology import Topology

HANDSHAKE_S = 5.0
CONNECT_MARGIN_S = 30.0
"""The fabric keeps its own deadlines; this is for a loop that does not answer."""


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
    host: str | None = None,
    timeout_s: float | None = None,
    connect_timeout_s: float | None = None,
    silence_s: float | None = None,
    stall_s: float | None = None,
    trace: str | Path | Trace | None = None,
    native: bool | None = None,
    shared_memory: bool | None = None,
    bind_thread: bool | None = None,
) -> Fleet:
    """Join the job, and return its fleet when all ranks are connected; every rank calls it once.

    Each argument that is given goes before its variable, which stands in brackets; then comes the default. ``topology``
    (``SYNCLINE_TOPOLOGY``): a file, the name of a shipped topology, or a :class:`Topology`; default: one switch for
    all. ``host`` (``SYNCLINE_HOST``, the machine's name): what the topology calls the host of this rank; ranks take
    their places in the topology by it. ``rank`` and ``world_size``, both or neither (``RANK`` and ``WORLD_SIZE``, or
    what another launcher says; default: a job of one rank). ``master`` (``MASTER_ADDR`` and ``MASTER_PORT``, or from
    the launcher): ``"host:port"`` of rank 0. ``job_id`` (``TORCHELASTIC_RUN_ID``): ranks of another job are refused.

    ``secret`` (``SYNCLINE_SECRET_FILE``, ``SYNCLINE_SECRET``): at least 32 bytes that all ranks share; without one only
    loopback is used, unless ``insecure``, which excludes collectives on objects: they load pickles of other ranks.
    ``authenticate_frames`` (``SYNCLINE_AUTHENTICATE_FRAMES``, off), alike on all ranks: every frame carries a code
    keyed by the secret, so that nobody on the way can change, repeat or leave out what is sent; slower. ``interface``
    (``SYNCLINE_INTERFACE``): the address, or the interface's name, that the other ranks reach.

    Seconds, alike on all ranks: ``timeout_s`` (``SYNCLINE_TIMEOUT``, 300): how long a collective may take, and so how
    long a rank may validate or save by itself while the others wait. ``connect_timeout_s``
    (``SYNCLINE_CONNECT_TIMEOUT``, 60): how long this call waits for the other ranks. ``silence_s``
    (``SYNCLINE_SILENCE``, 10): from when on a rank without a sign of life is lost. ``stall_s`` (``SYNCLINE_STALL``, as
    the timeout): from when on a rank that lives, but whose training thread makes no call, is not waited for any more.

    ``trace`` (``SYNCLINE_TRACE``): where this rank writes its trace. ``native`` (``SYNCLINE_NATIVE``): False moves
    messages in Python, True insists on compiled code. ``shared_memory`` (``SYNCLINE_SHARED_MEMORY``): whether small
    collectives may go through memory that the ranks of one machine share. ``bind_thread`` (``SYNCLINE_BIND_THREAD``):
    whether the communication thread may be bound to cores.

    Raises :class:`ConfigurationError` (also if a fleet is open already), ``TopologyError``, ``RendezvousError`` and
    ``HandshakeError``, with who and what.

    >>> with syncline.init() as fleet:  # no launcher: a job of one rank
    ...     print(fleet.rank, fleet.world_size)
    0 1
    """
    check_first()
    given = Arguments(
        topology=topology,
        rank=rank,
        world_size=world_size,
        master=master,
        job_id=job_id,
        secret=secret,
        insecure=insecure,
        authenticate_frames=authenticate_frames,
        interface=interface,
        host=host,
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
        silence_s=silence_s,
        stall_s=stall_s,
        trace=trace,
        native=native,
        shared_memory=shared_memory,
        bind_thread=bind_thread,
    )
    return _open_fleet(read_environment(given=given))


def _open_fleet(environment: Environment) -> Fleet:
    topology = _load_topology(environment)
    options = _fabric_options(environment)
    communicator = _connect(environment, topology, options)
    fleet = Fleet(communicator, is_trusted=options.secret is not None or not _is_exposed(options))
    try:
        # No one leaves before rank 0's store is gone: the next init() must not meet at this one. So all meet here.
        fleet.communicator.open_segment(is_wanted=environment.uses_shared_memory)
        enter_fleet(fleet)
    except BaseException:
        fleet.close(is_failing=True)
        raise
    fleet.close_at_exit()
    return fleet


def _load_topology(environment: Environment) -> Topology | None:
    chosen = environment.topology
    if chosen is None:
        return None
    topology = chosen if isinstance(chosen, Topology) else Topology.load(chosen)
    topology.check_world_size(environment.world_size)
    return topology


def _fabric_options(environment: Environment) -> FabricOptions:
    address, limits = environment.interface, environment.limits
    if address is None and environment.world_size > 1:
        address = own_address(environment.master_address)
    options = FabricOptions(
        job_id=environment.job_id,
        secret=environment.secret,
        insecure=environment.insecure,
        authenticate_frames=environment.authenticates_frames,
        native=environment.native,
        address=resolve_address(address),
        binds_thread=environment.binds_thread,
        heartbeat_s=limits.heartbeat_s,
        suspect_s=0.3 * limits.silence_s,
        dead_s=limits.silence_s,
        stall_s=limits.stall_s,
        held_s=limits.timeout_s,
        handshake_s=min(HANDSHAKE_S, limits.connect_timeout_s),
        connect_s=limits.connect_timeout_s,
    )
    try:
        options.check_exposure(options.address or "127.0.0.1")
    except ConfigurationError as error:
        tell_once(error, rank=environment.rank)
        raise
    return options


def _is_exposed(options: FabricOptions) -> bool:
    """Whether other machines can reach this rank: the fabric refuses that without a secret, unless it is insecure."""
    if not options.insecure or options.address is None:
        return False
    try:
        return not ip_address(options.address).is_loopback
    except ValueError:  # the name of an interface or host, which may be any
        return True


def _trace(environment: Environment, topology: Topology) -> Trace | None:
    given = environment.trace
    if given is None or isinstance(given, Trace):
        return given
    return Trace(rank=environment.rank, host=topology.host_of(environment.rank).name, path=given)


def _connect(environment: Environment, topology: Topology | None, options: FabricOptions) -> Communicator:
    """Meet, start the loop and connect; the store is dropped as soon as the ranks have found each other."""
    began_s = time.monotonic()

    def left_s() -> float:
        return max(options.connect_s - (time.monotonic() - began_s), options.handshake_s)

    assert options.address is not None, "resolved when the options were made"
    store: TorchStore | LocalStore = open_store(environment, options, address=options.address)
    shape = _match(environment, topology, options, store, timeout_s=left_s())
    trace = _trace(environment, shape)
    loop = CommunicationLoop(native=environment.native)
    loop.start()
    try:
        connecting = connect_tcp(
            options,
            rank=environment.rank,
            world_size=environment.world_size,
            rendezvous=Rendezvous(store, job_id=options.job_id),
            topology=shape,
            trace=trace,
            timeout_s=left_s(),
        )
        fabric = loop.run(connecting, left_s() + CONNECT_MARGIN_S)
        return Communicator(
            loop, fabric, shape, trace=trace, timeout_s=environment.limits.timeout_s, on_close=loop.stop
        )
    except BaseException:
        loop.stop()
        raise


def _match(
    environment: Environment,
    topology: Topology | None,
    options: FabricOptions,
    store: TorchStore | LocalStore,
    *,
    timeout_s: float,
) -> Topology:
    """Return the topology as this job numbers it."""
    try:
        return match_topology(
            topology,
            rank=environment.rank,
            world_size=environment.world_size,
            store=store,
            host=environment.host,
            timeout_s=timeout_s,
            job_id=options.job_id,
            silence_s=options.dead_s,
        )
    except TopologyError as error:
        tell_once(error, rank=environment.rank)
        raise
