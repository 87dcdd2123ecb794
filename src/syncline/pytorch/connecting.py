"""From settings to a communicator: what ``init()`` and the backend for ``torch.distributed`` do alike.

Where nobody says on which address a rank listens, and no master is known, it is loopback if all ranks share one
machine. They tell each other theirs in a first meeting in the store, by the same rules as in the one that follows: what
an earlier attempt left in the store is not believed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

from syncline import discovery, schedule
from syncline.endpoints import LOOPBACK, own_address
from syncline.errors import ConfigurationError, RendezvousError, SynclineError, TopologyError
from syncline.fabric import FabricOptions, Rendezvous, Store
from syncline.fabric.lending import NO_NETWORK, find_network
from syncline.fabric.rendezvous import Member
from syncline.fabric.shared_port import lending
from syncline.fabric.sockets import resolve_address
from syncline.last_words import leave_at_exit, tell
from syncline.observe import Trace, say, tell_if_long
from syncline.pytorch.environment import FLAT, MEASURE, Environment, address_of
from syncline.pytorch.secret import user_secret
from syncline.runtime import Communicator, match_topology
from syncline.topology import Topology
from syncline.units import format_duration
from syncline.variables import FLIGHT, REPORT, process_variables

UNTOLD_S = 0.005
"""By so much a round trip may be longer than the topology says."""
NAME_PAUSE_S = 0.5
"""Between two questions for the master's name."""
NO_PORT = 1
"""A meeting wants a port of each rank; in this one nobody listens yet."""


def with_address(environment: Environment) -> Environment:
    """Return the address and secret of this rank's fabric too; :class:`ConfigurationError` if strangers could join.

    Where nobody gave a secret, and other users of this machine alone could reach this rank, it is this user's own.
    """
    if environment.interface == NO_NETWORK:
        with tell_if_long(f"waiting for a rank of host {environment.host} that lends this one its network"):
            options = find_network(environment.host, environment.fabric)
    else:
        options = replace(environment.fabric, address=resolve_address(_own_address(environment)))
    # a job of one rank has nobody to meet, and needs a secret only when it listens for newcomers
    if environment.world_size > 1 or environment.join or options.authenticate_frames:
        options = with_secret(options)
    try:
        options.check_exposure(options.address or LOOPBACK)
    except ConfigurationError as error:
        tell_once(error, rank=environment.rank)
        raise
    return environment._replace(fabric=options)


def _own_address(environment: Environment) -> str | None:
    """Return the address or interface that this rank was given, or from which it reaches the others."""
    if environment.interface is None and environment.world_size > 1:
        return _address_to(environment.master_address, environment.fabric.connect_s)
    if environment.interface is None and environment.join:
        return own_address(environment.join[0][0])
    return environment.interface


def _address_to(master: str | None, timeout_s: float) -> str | None:
    """Return the address from which this rank reaches the master, once that has a name: a pod's comes with the pod."""
    end_s = time.monotonic() + timeout_s
    with tell_if_long(f"waiting until MASTER_ADDR {master!r} can be resolved; check that it is rank 0's host"):
        while _is_unknown(master) and time.monotonic() < end_s:
            time.sleep(NAME_PAUSE_S)
    return own_address(master)


def _is_unknown(name: str | None) -> bool:
    try:
        socket.getaddrinfo(name, 9)
    except socket.gaierror:
        return True
    except UnicodeError:  # it is no name at all
        return False
    return False


def with_secret(options: FabricOptions) -> FabricOptions:
    """Return ``options``, the address of which is known, with the secret of a rank that is not alone any more."""
    assert options.address is not None, "resolved when the options were made"
    if options.secret is not None or not ip_address(options.address).is_loopback:
        return options
    return replace(options, secret=user_secret(process_variables()))


def is_exposed(options: FabricOptions) -> bool:
    """Whether other machines can reach this rank: the fabric refuses that without a secret, unless it is insecure."""
    return options.insecure and not ip_address(options.address or LOOPBACK).is_loopback


def connect(environment: Environment, open_store: Callable[[Environment], Store]) -> tuple[Communicator, bool]:
    """Meet, start the loop and connect; the store is dropped as soon as all ranks are connected to each other.

    Also return whether the network was measured, and that is in doubt.
    """
    with lending(environment.fabric, environment.host):
        return _connect(environment, open_store)


def _connect(environment: Environment, open_store: Callable[[Environment], Store]) -> tuple[Communicator, bool]:
    leave_at_exit()
    options = environment.fabric
    chosen = _load_topology(environment)
    if isinstance(chosen, TopologyError):
        _refuse_topology(environment, chosen, open_store)
    end_s = time.monotonic() + options.connect_s

    def left_s() -> float:
        return max(end_s - time.monotonic(), options.handshake_s)

    store = open_store(environment)
    topology, is_in_doubt = _match(environment, chosen, store, timeout_s=left_s()), False
    if chosen is None and is_discoverable(topology, options.address):
        if len(topology.hosts) <= discovery.MOST_HOSTS:
            topology, is_in_doubt = _discover(environment, topology, store, timeout_s=left_s())
            end_s = time.monotonic() + options.connect_s  # all are here, and have the time once more
        elif environment.rank == 0:
            say(
                f"more than {discovery.MOST_HOSTS} hosts are not measured, and one switch is taken for their network, "
                "which is slow on uneven racks; give a topology"
            )
    trace = _open_trace(environment, topology)
    communicator = _open(environment, topology, store, trace=trace, timeout_s=left_s())
    try:
        if environment.world_size > 1:  # whoever still looks into rank 0's store when it ends prints pages of that
            communicator.sum_bytes(communicator.token, label="start")
        _tell_untold(communicator, chosen)
        if not environment.join:
            tell(met=True)  # from here on, who dies comes in as a newcomer
        if folder := process_variables().get(FLIGHT):
            communicator.write_flight(Path(folder).absolute())
    except BaseException:
        communicator.abort()
        raise
    return communicator, is_in_doubt


def _tell_untold(communicator: Communicator, chosen: Topology | Literal["flat"] | None) -> None:
    """Warn, on rank 0, where the topology that was given leaves latency out, of the rank where it is the most."""
    own, topology = communicator.rank, communicator.topology
    if own or not isinstance(chosen, Topology):
        return
    trips = communicator.statistics().fabric.round_trips()
    told = {peer: topology.round_trip_s(own, peer) for peer in trips}
    peer = max(trips, key=lambda peer: trips[peer] - told[peer], default=own)
    if peer != own and trips[peer] > told[peer] + UNTOLD_S:
        say(
            f"from rank {own} to rank {peer} (host {topology.host_of(peer).name}) and back it takes "
            f"{format_duration(trips[peer])}, but {format_duration(told[peer])} by the topology, so slow links idle in "
            "large calls; write the latency of these links into it, or give none: then it is measured"
        )


def is_discoverable(flat: Topology, address: str | None) -> bool:
    """Whether there is anything to measure between the hosts of ``flat``: not where all ranks share a machine."""
    return len(flat.hosts) > 1 and not ip_address(address or LOOPBACK).is_loopback


def _discover(environment: Environment, flat: Topology, store: Store, *, timeout_s: float) -> tuple[Topology, bool]:
    """Return what the ranks, all at one switch for now, find by measuring, and whether it is in doubt."""
    options = replace(  # kernels tell of the way to whom there is a connection
        environment.fabric,
        job_id=f"{environment.fabric.job_id}/discovery",
        most_connected=environment.world_size,
    )
    brief = environment._replace(fabric=options)
    told = tell_if_long(f"measuring the network of {len(flat.hosts)} hosts", is_told=environment.rank == 0)
    with told, _open(brief, flat, store, trace=None, timeout_s=timeout_s) as communicator:
        folder = discovery.discovery_folder(process_variables())
        found = discovery.discover_network(communicator, folder=folder, recalls=environment.topology != MEASURE)
    if environment.rank == 0:
        say(str(found))
    return schedule.with_gateways_chosen(found.topology), found.is_in_doubt


def _open(
    environment: Environment, topology: Topology, store: Store, *, trace: Trace | None, timeout_s: float
) -> Communicator:
    return Communicator.connect(
        rank=environment.rank,
        world_size=environment.world_size,
        topology=topology,
        store=store,
        options=environment.fabric,
        trace=trace,
        connect_s=timeout_s,
        timeout_s=environment.timeout_s,
    )


def _load_topology(environment: Environment) -> Topology | TopologyError | Literal["flat"] | None:
    """Return the topology that this rank was given, or what is wrong with it."""
    chosen = environment.topology
    if chosen == FLAT:
        return "flat"
    if chosen is None or chosen == MEASURE:
        return None
    try:
        topology = chosen if isinstance(chosen, Topology) else Topology.load(chosen)
        topology.check_world_size(environment.world_size)
    except TopologyError as error:
        return error
    return topology


def _refuse_topology(
    environment: Environment, error: TopologyError, open_store: Callable[[Environment], Store]
) -> NoReturn:
    """Raise what is wrong with this rank's topology when the others know of it, or do not come."""
    if environment.world_size > 1:
        try:
            _match(environment, error, open_store(environment), timeout_s=environment.fabric.connect_s)
        except RendezvousError:
            raise error from None
    tell_once(error, rank=environment.rank)
    raise error


def _match(
    environment: Environment,
    topology: Topology | TopologyError | Literal["flat"] | None,
    store: Store,
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
            job_id=environment.fabric.job_id,
            silence_s=environment.fabric.dead_s,
            hint=_loopback_hint(environment),
        )
    except TopologyError as error:
        tell_once(error, rank=environment.rank)
        raise


def _loopback_hint(environment: Environment) -> str:
    """Say, of a master's name that is this machine's own loopback, that other machines do not reach rank 0 there."""
    name, address = environment.master_address or "", environment.fabric.address
    if address is None or not ip_address(address).is_loopback or "localhost" in name or not name.strip("0123456789.:"):
        return ""
    return (
        f"{name} means loopback on this host, where ranks of other hosts do not reach rank 0: if there are any, let "
        "SYNCLINE_INTERFACE name its interface"
    )


def _open_trace(environment: Environment, topology: Topology) -> Trace | None:
    given = environment.trace
    if isinstance(given, Trace):
        return given
    if not environment.join and (target := process_variables().get(REPORT)):
        from syncline.report.page import trace_folder  # nobody else needs what makes pages

        given = trace_folder(Path(target), given, rank=environment.rank, world_size=environment.world_size)
    if given is None:
        return None
    path = given / f"trace-{environment.rank}.json" if given.is_dir() else given
    return Trace(rank=environment.rank, host=topology.host_of(environment.rank).name, path=path)


def tell_once(error: SynclineError, *, rank: int) -> None:
    """Let the interpreter, if it ends with ``error``, print its message alone, once on each host; the status stays 1.

    Every rank of a host has the error alike, and N tracebacks say no more than one line. Other hosts have terminals of
    their own, and may be the only ones that have it. Whoever catches it sees it as ever.
    """
    from syncline.machines.nvml import LOCAL_RANKS  # nobody else needs it here

    known = process_variables()
    local_rank = next((known[name] for name in LOCAL_RANKS if known.get(name)), "0")
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is not error:
            before(kind, value, traceback)
        elif rank == 0 or local_rank == "0":
            print(f"{kind.__name__}: {value}", file=sys.stderr)

    sys.excepthook = hook


def machine_name() -> str:
    """Return what is equal for two processes exactly if they reach each other over loopback.

    That is the boot of the kernel and the network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    network = Path("/proc/self/ns/net").readlink()
    return hashlib.sha256(f"{boot} {network}".encode()).hexdigest()[:32]


def share_a_machine(store: Store, *, rank: int, world_size: int, job_id: str, timeout_s: float) -> bool:
    """Whether all ranks run on one machine; all must ask. :class:`RendezvousError` names who does not come."""
    meeting = Rendezvous(store, job_id=f"{job_id} machines")
    own = Member(rank=rank, host=machine_name(), address=LOOPBACK, port=NO_PORT)
    generation = meeting.meet_blocking(own, world_size=world_size, timeout_s=timeout_s)
    return len({member.host for member in generation.members}) == 1


def choose_interface(environment: Environment, store: Store, torch_store: Any) -> Environment:
    """Return ``environment`` with an interface, where nobody says one; all ranks, more than one, must ask.

    ``store`` is where they meet, in a part of ``torch_store``. Raises as the two functions that it consists of.
    """
    together = share_a_machine(
        store,
        rank=environment.rank,
        world_size=environment.world_size,
        job_id=environment.fabric.job_id,
        timeout_s=environment.fabric.connect_s,
    )
    if environment.interface is not None:
        return environment
    return environment._replace(interface=LOOPBACK if together else reachable_address(torch_store))


def reachable_address(torch_store: Any) -> str:
    """Return the address of this machine that the ranks of other machines reach, as far as it can be known.

    That is the one from which it reaches the host that serves the store; of a file, that of the host's own name.
    """
    host = address_of(torch_store) or socket.gethostname()
    address = own_address(host)
    if address is None or ipaddress.ip_address(address).is_loopback:
        raise ConfigurationError(
            f"The ranks run on several machines, and the one way to them that is known here, {host!r}, is this "
            "machine's loopback; give each rank init(interface=), BackendOptions(interface=) or SYNCLINE_INTERFACE: "
            "the address that the other ranks reach"
        )
    return address
