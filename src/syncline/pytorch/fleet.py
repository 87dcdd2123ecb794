"""The fleet: all ranks of a job, connected, from ``syncline.init()`` to ``close()`` or the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch

from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp
from syncline.fabric.sockets import resolve_address
from syncline.observe import Trace
from syncline.pytorch.collectives import Operation, TensorCollectives, TensorWork
from syncline.pytorch.environment import Environment, own_address, read_environment
from syncline.pytorch.limits import Limits, choose_limits
from syncline.pytorch.objects import ObjectCollectives
from syncline.pytorch.stores import LocalStore, TorchStore, open_store
from syncline.pytorch.told_once import tell_once
from syncline.runtime import CommunicationLoop, Communicator, FleetStatistics
from syncline.topology import Topology

HANDSHAKE_S = 5.0
CONNECT_MARGIN_S = 30.0
"""The fabric keeps its own deadlines; this is for a loop that does not answer."""

_entering = threading.Lock()
_current: Fleet | None = None


class Fleet:
    """All ranks of a job as this one sees them; a context manager that closes itself.

    Collectives match by the order in which each rank calls them. Each takes a tensor of any number type, memory order
    and device; with ``async_op=True`` it returns at once with a work whose ``wait()`` ends it, else None when it is
    over. Those on objects pickle them, so they are refused where ``is_trusted`` is False: where strangers can join.
    """

    def __init__(self, communicator: Communicator, *, is_trusted: bool = True) -> None:
        self.communicator = communicator
        self._collectives = TensorCollectives(communicator)
        self._objects = ObjectCollectives(
            self._collectives, rank=self.rank, world_size=self.world_size, is_trusted=is_trusted
        )
        self._next_stream = 1
        self._on_close: list[Callable[[bool], None]] = []
        self._count_updates: list[Callable[[], object | None]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else self.topology.name
        return f"<Fleet: rank {self.rank} of {self.world_size}, {state}>"

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(is_failing=kind is not None)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.communicator.world_size

    @property
    def topology(self) -> Topology:
        """The tree of switches, hosts and ranks."""
        return self.communicator.topology

    @property
    def trace(self) -> Trace:
        """Where this rank's events go."""
        return self.communicator.trace

    @property
    def timeout_s(self) -> float:
        """How long a collective may take."""
        return self.communicator.timeout_s

    def all_reduce(
        self, tensor: torch.Tensor, *, op: Operation = "sum", weight: float | None = None, async_op: bool = False
    ) -> TensorWork | None:
        """Replace ``tensor`` by its sum, mean, max, min or product over all ranks.

        ``weight`` multiplies this rank's part of a sum or a mean, which is then divided by the sum of all weights. A
        mean needs a float type, max and min one that has an order; of bool, max is "any rank" and min "all ranks".
        """
        return _end(
            self._collectives.all_reduce(tensor, op=op, weight=weight, is_awaited=not async_op), async_op=async_op
        )

    def reduce(
        self,
        tensor: torch.Tensor,
        *,
        dst: int = 0,
        op: Operation = "sum",
        weight: float | None = None,
        async_op: bool = False,
    ) -> TensorWork | None:
        """Replace ``tensor`` of rank ``dst`` as :meth:`all_reduce` does, of which it costs the time.

        The other ranks keep theirs.
        """
        work = self._collectives.reduce(tensor, dst=dst, op=op, weight=weight, is_awaited=not async_op)
        return _end(work, async_op=async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        *,
        op: Operation = "sum",
        weight: float | None = None,
        async_op: bool = False,
    ) -> TensorWork | None:
        """Let ``output`` be this rank's part of the sum (or mean, ...) of ``source``; part k is that of rank k."""
        work = self._collectives.reduce_scatter(output, source, op=op, weight=weight, is_awaited=not async_op)
        return _end(work, async_op=async_op)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> TensorWork | None:
        """Let ``output`` be the ``source`` of all ranks, one after another."""
        return _end(self._collectives.all_gather(output, source, is_awaited=not async_op), async_op=async_op)

    def gather(self, tensor: torch.Tensor, *, dst: int = 0) -> list[torch.Tensor] | None:
        """Return every rank's ``tensor`` in rank order on rank ``dst``, and None on the others.

        Shapes and types are the same on all ranks. It moves as much as an all-gather.
        """
        return self._collectives.gather(tensor, dst=dst)

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0, async_op: bool = False) -> TensorWork | None:
        """Replace ``tensor`` by that of rank ``root``."""
        return _end(self._collectives.broadcast(tensor, root=root, is_awaited=not async_op), async_op=async_op)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, anything that can be pickled, in rank order.

        Raises :class:`ConfigurationError` on all ranks if that of one cannot, or if the job has neither a secret nor
        loopback alone (``insecure=True``). So do the other calls on objects.
        """
        return self._objects.all_gather(value)

    def gather_object(self, value: Any, *, dst: int = 0) -> list[Any] | None:
        """Return every rank's ``value`` in rank order on rank ``dst``, and None on the others."""
        return self._objects.gather(value, dst=dst)

    def broadcast_object(self, value: Any = None, *, root: int = 0) -> Any:
        """Return the ``value`` of rank ``root``; what the others give is ignored."""
        return self._objects.broadcast(value, root=root)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.communicator.barrier(is_awaited=True).wait()

    def statistics(self) -> FleetStatistics:
        """Return a frozen record of what was moved, how long was waited, and what each model's update rule counts."""
        counted = [count() for count in self._count_updates]
        return replace(self.communicator.statistics(), updates=tuple(one for one in counted if one is not None))

    def add_update(self, count: Callable[[], object | None]) -> None:
        """Let :meth:`statistics` also tell what ``count`` returns, unless it is None."""
        self._count_updates.append(count)

    def reserve_streams(self, number: int) -> range:
        """Take streams for the calls of a model; every rank takes as many, in the same order."""
        with self._lock:
            first = self._next_stream
            self._next_stream += number
        return range(first, first + number)

    def on_close(self, function: Callable[[bool], None]) -> None:
        """Call ``function`` before the connections end; it is told whether something has failed already."""
        self._on_close.append(function)

    def close(self, *, is_failing: bool = False) -> None:
        """Finish what models have under way, say goodbye and release everything; a second call does nothing.

        With ``is_failing`` nothing is waited for. Raises what went wrong since the last step, after the release. In a
        forked child, which ends with the same exit functions, nothing happens.
        """
        if self.communicator.is_of_parent:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        _leave(self)
        with contextlib.suppress(Exception):  # the interpreter may be ending already
            atexit.unregister(self._close_at_exit)
        with contextlib.ExitStack() as stack:
            # after a failure of the communicator itself, close() gives the others time to read why
            is_lost = is_failing and self.communicator.failure is None
            stack.callback(self.communicator.abort if is_lost else self.communicator.close)
            for function in self._on_close:
                stack.callback(function, is_failing)

    def close_at_exit(self) -> None:
        """Close the fleet when the interpreter ends, if nobody did before."""
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """After an exception, others must not wait for this rank, nor it for them."""
        self.close(is_failing=getattr(sys, "last_value", None) is not None)


def init(
    topology: str | Path | Topology | None = None,
    *,
    secret: bytes | str | None = None,
    timeout: float | None = None,
    connect_timeout: float | None = None,
    silence: float | None = None,
    stall: float | None = None,
    insecure: bool = False,
    authenticate_frames: bool | None = None,
    trace: str | Path | Trace | None = None,
) -> Fleet:
    """Join the job that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR ... as torchrun sets them).

    ``topology``: a file, the name of a shipped topology, or a :class:`Topology`; None takes ``SYNCLINE_TOPOLOGY``, else
    one switch for all. ``secret``: at least 32 bytes that all ranks share; None takes ``SYNCLINE_SECRET_FILE`` or
    ``SYNCLINE_SECRET``; without one only loopback is used, unless ``insecure``. ``trace``: where this rank writes its
    trace (``SYNCLINE_TRACE``). Collectives on objects load pickles of the other ranks, so ``insecure`` without a secret
    excludes them. ``authenticate_frames`` (``SYNCLINE_AUTHENTICATE_FRAMES``, off), alike on all ranks: every frame
    carries a code keyed by the secret, so that nobody on the way can change, repeat or leave out what is sent; slower.

    Seconds, alike on all ranks; None takes the variable, else the default. ``timeout`` (``SYNCLINE_TIMEOUT``, 300): how
    long a collective may take, and so how long a rank may validate or save by itself while the others wait.
    ``connect_timeout`` (``SYNCLINE_CONNECT_TIMEOUT``, 60): how long this call waits for the other ranks. ``silence``
    (``SYNCLINE_SILENCE``, 10): from when on a rank without a sign of life is lost. ``stall`` (``SYNCLINE_STALL``, as
    ``timeout``): from when on a rank that lives, but whose training thread makes no call, is not waited for any more.

    Raises :class:`ConfigurationError` (also if a fleet is open already), ``TopologyError``, ``RendezvousError`` and
    ``HandshakeError``, with who and what.
    """
    _check_first()
    limits = choose_limits(connect_timeout=connect_timeout, silence=silence, timeout=timeout, stall=stall)
    environment = read_environment()
    shape = _topology(topology, environment)
    options = _fabric_options(environment, limits, secret=secret, insecure=insecure, has_keys=authenticate_frames)
    recorder = _trace(trace, environment, shape)
    communicator = _connect(environment, shape, options, recorder, timeout_s=limits.timeout_s)
    fleet = Fleet(communicator, is_trusted=options.secret is not None or not _is_exposed(options))
    try:
        # No one leaves before rank 0's store is gone: the next init() must not meet at this one. So all meet here.
        fleet.communicator.open_segment(is_wanted=environment.uses_shared_memory)
        _enter(fleet)
    except BaseException:
        fleet.close(is_failing=True)
        raise
    fleet.close_at_exit()
    return fleet


def current_fleet() -> Fleet:
    """Return the fleet that ``syncline.init()`` made; :class:`ConfigurationError` if there is none, or it is closed."""
    if _current is None:
        raise ConfigurationError("There is no fleet; call syncline.init() first")
    return _current


def _check_first() -> None:
    if _current is not None:
        raise ConfigurationError(f"syncline.init() was called twice; {_current!r} is open: use it, or close() it")


def _enter(fleet: Fleet) -> None:
    """Make ``fleet`` the one that ``distribute()`` finds; there may be no other."""
    global _current  # noqa: PLW0603 - one process is one rank of one job
    with _entering:
        _check_first()
        _current = fleet


def _leave(fleet: Fleet) -> None:
    """Forget ``fleet``, if it is the current one."""
    global _current  # noqa: PLW0603 - as above
    with _entering:
        if _current is fleet:
            _current = None


def _end(work: TensorWork, *, async_op: bool) -> TensorWork | None:
    if async_op:
        return work
    work.wait()
    return None


def _topology(given: str | Path | Topology | None, environment: Environment) -> Topology:
    chosen = given if given is not None else environment.topology
    if chosen is None:
        return Topology.flat(environment.world_size)
    topology = chosen if isinstance(chosen, Topology) else Topology.load(chosen)
    topology.check_world_size(environment.world_size)
    return topology


def _fabric_options(
    environment: Environment,
    limits: Limits,
    *,
    secret: bytes | str | None,
    insecure: bool,
    has_keys: bool | None,
) -> FabricOptions:
    given = secret.encode() if isinstance(secret, str) else secret
    address = environment.interface
    if address is None and environment.world_size > 1:
        address = own_address(environment.master_address)
    options = FabricOptions(
        job_id=environment.job_id,
        secret=given or environment.secret,
        insecure=insecure,
        authenticate_frames=environment.authenticates_frames if has_keys is None else has_keys,
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


def _trace(given: str | Path | Trace | None, environment: Environment, topology: Topology) -> Trace | None:
    if isinstance(given, Trace):
        return given
    path = Path(given) if given is not None else environment.trace
    if path is None:
        return None
    return Trace(rank=environment.rank, host=topology.host_of(environment.rank).name, path=path)


def _connect(
    environment: Environment, topology: Topology, options: FabricOptions, trace: Trace | None, *, timeout_s: float
) -> Communicator:
    """Start the loop and connect; the store is dropped as soon as the ranks have found each other."""
    began_s = time.monotonic()
    assert options.address is not None, "resolved when the options were made"
    store: TorchStore | LocalStore = open_store(environment, options, address=options.address)
    left_s = max(options.connect_s - (time.monotonic() - began_s), options.handshake_s)
    loop = CommunicationLoop()
    loop.start()
    try:
        connecting = connect_tcp(
            options,
            rank=environment.rank,
            world_size=environment.world_size,
            rendezvous=Rendezvous(store, job_id=options.job_id),
            topology=topology,
            trace=trace,
            timeout_s=left_s,
        )
        fabric = loop.run(connecting, left_s + CONNECT_MARGIN_S)
        return Communicator(loop, fabric, topology, trace=trace, timeout_s=timeout_s, on_close=loop.stop)
    except BaseException:
        loop.stop()
        raise
