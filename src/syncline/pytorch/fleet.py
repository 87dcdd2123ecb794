"""The fleet: all ranks of a job, connected, from ``syncline.init()`` to ``close()`` or the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from syncline.arguments import checked
from syncline.errors import ConfigurationError
from syncline.last_words import tell_end
from syncline.members import Epoch
from syncline.observe import Trace
from syncline.pytorch.epochs import FabricPlace, FleetGrowth
from syncline.pytorch.notices import Notice, Preemption
from syncline.pytorch.objects import ObjectCollectives
from syncline.runtime import Communicator
from syncline.runtime.call import CallSettings
from syncline.runtime.control import Tally
from syncline.runtime.failures import STEP
from syncline.tensors.collectives import BARRIER, TensorCollectives
from syncline.tensors.reductions import Operation
from syncline.tensors.work import PendingCalls, TensorWork
from syncline.topology import Topology

if TYPE_CHECKING:
    from syncline.runtime import FleetStatistics

_OF_THE_LIBRARY = frozenset({"add_update", "notice"})
_entering = threading.Lock()
_current: Fleet | None = None


class Fleet(FabricPlace):
    """All ranks of a job as this one sees them, made by :func:`syncline.init`; a context manager that closes itself.

    Every rank calls the same collectives in the same order, from one thread at a time. Each takes a tensor of any
    shape, number type, memory order and device, alike on all ranks; with ``async_op=True`` it returns at once with a
    work whose ``wait()`` ends it, else None when it is over. Those on objects pickle them, so they are refused where
    ``is_trusted`` is False: where strangers can join.

    Raises, in a collective: :class:`MismatchError` on all ranks if their calls differ, :class:`PeerLostError` if a rank
    is lost, :class:`DeadlineError` after :attr:`timeout_s`, :class:`ConfigurationError` for what it cannot take.

    >>> fleet
    <Fleet: rank 0 of 1, flat-1>
    >>> total = torch.arange(3.0)
    >>> fleet.all_reduce(total)
    """

    def __init__(self, communicator: Communicator, *, is_trusted: bool = True) -> None:
        members = communicator.members
        epoch = Epoch(number=0, members=members)
        super().__init__(base=communicator, communicator=communicator, epoch=epoch, numbers=members)
        self.growth: FleetGrowth | None = None
        """What lets newcomers in, or brings this rank into a running job."""
        self.is_elastic: bool | None = None
        """What distribute() was told first; None before it."""
        self.preemption: Preemption | None = None
        """What takes note of signals that tell of this process's end, if ``init(on_preemption=)`` asked for it."""
        self.replans = False
        """Whether trainings look after the rates of links, and plan again where they change."""
        self.is_replan_asked = False
        self.is_network_in_doubt = False
        """Whether the network was measured, and flows were far off what was found."""
        self.follower: Any = None
        """The :class:`~syncline.pytorch.following.RateFollower` of its trainings, if there is one."""
        self._is_trusted = is_trusted
        self._on_move()
        self._on_close: list[Callable[[bool], None]] = []
        self._count_steps: list[Callable[[], Tally]] = []
        self._count_updates: list[Callable[[], object | None]] = []
        self._is_closed = False
        self.error_in_flight: BaseException | None = None
        """With what the fleet closes, if with an exception."""
        self.is_error_shown = False
        """Whether the interpreter has printed it already."""

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else self.topology.name
        return f"<Fleet: rank {self.rank} of {self.world_size}, {state}>"

    def __dir__(self) -> list[str]:
        """List what is for users: what the class says in public but for :data:`_OF_THE_LIBRARY`."""
        return sorted(name for name in (*vars(Fleet), *vars(object)) if name not in _OF_THE_LIBRARY)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.error_in_flight = error
        self.close(is_failing=error is not None)

    @property
    def rank(self) -> int:
        """This process's rank, 0 to ``world_size`` - 1."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.communicator.world_size

    @property
    def members(self) -> tuple[int, ...]:
        """Who is in the job now, by the numbers at its start; this is ``members[rank]``. Who comes has the next number.

        >>> fleet.members
        (0,)
        """
        return self.numbers_of(self.epoch.members)

    @property
    def join_address(self) -> str | None:
        """Where this rank lets newcomers in (``init(join="host:port")``); None as long as it does not.

        It does from ``distribute(..., elastic=True)`` on, or from ``init(join_port=)``.

        >>> with syncline.init(join_port=0) as fleet:
        ...     fleet.join_address.startswith("127.0.0.1:")
        True
        """
        return self.growth.join_address if self.growth is not None else None

    def notice(self) -> Notice:
        """Return what this rank was told of its end."""
        return Notice.NONE if self.preemption is None else self.preemption.notice

    @property
    def topology(self) -> Topology:
        """The tree of switches, hosts and ranks that collectives are planned on."""
        return self.communicator.topology

    @property
    def trace(self) -> Trace:
        """Where this rank's events go; it is off unless ``init(trace=)`` named a file."""
        return self.communicator.trace

    @property
    def timeout_s(self) -> float:
        """How long a collective may take, in seconds (``init(timeout_s=)``)."""
        return self.communicator.timeout_s

    @checked
    def all_reduce(
        self, tensor: torch.Tensor, *, op: Operation = "sum", weight: float | None = None, async_op: bool = False
    ) -> TensorWork | None:
        """Replace ``tensor``, of any shape, by its sum, mean, max, min or product over all ranks, element by element.

        ``weight`` multiplies this rank's part of a sum or a mean, which is then divided by the sum of all weights. A
        mean needs a float type, max and min one that has an order; of bool, max is "any rank" and min "all ranks".

        >>> value = torch.tensor([1.0, 2.0])
        >>> fleet.all_reduce(value, op="mean", weight=3.0)  # three times the weight of a rank that gives 1.0
        >>> value
        tensor([1., 2.])
        """
        kept = self._collectives.find_kept(tensor, op) if weight is None and not async_op else None
        if kept is not None and kept.make(tensor):
            return None
        work = self._collectives.all_reduce(tensor, op, weight=weight, is_awaited=not async_op)
        return self._end(work, async_op=async_op)

    @checked
    def reduce(
        self,
        tensor: torch.Tensor,
        *,
        dst: int = 0,
        op: Operation = "sum",
        weight: float | None = None,
        async_op: bool = False,
    ) -> TensorWork | None:
        """Replace ``tensor`` of rank ``dst`` as :meth:`all_reduce` does; the other ranks keep theirs.

        It takes as long as an all-reduce.

        >>> value = torch.tensor([1.0, 2.0])
        >>> work = fleet.reduce(value, dst=0, op="max", async_op=True)
        >>> work.wait()
        """
        work = self._collectives.reduce(tensor, dst, op, weight=weight, is_awaited=not async_op)
        return self._end(work, async_op=async_op)

    @checked
    def reduce_scatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        *,
        op: Operation = "sum",
        weight: float | None = None,
        async_op: bool = False,
    ) -> TensorWork | None:
        """Let ``output`` be this rank's part of the sum (or mean, ...) of ``source``; part k is that of rank k.

        ``source`` has ``world_size`` times the elements of ``output``, in the same type; it stays as it is.

        >>> part = torch.empty(4)  # a part of a source of world_size * 4 elements
        >>> fleet.reduce_scatter(part, torch.ones(fleet.world_size * 4))
        >>> part
        tensor([1., 1., 1., 1.])
        """
        work = self._collectives.reduce_scatter_single(output, source, op, weight=weight, is_awaited=not async_op)
        return self._end(work, async_op=async_op)

    @checked
    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> TensorWork | None:
        """Let ``output`` be the ``source`` of all ranks, one after another, in rank order.

        ``output`` has ``world_size`` times the elements of ``source``, in the same type.

        >>> whole = torch.empty(fleet.world_size * 2)
        >>> fleet.all_gather(whole, torch.tensor([1.0, 2.0]))
        >>> whole
        tensor([1., 2.])
        """
        work = self._collectives.all_gather_single(output, source, is_awaited=not async_op)
        return self._end(work, async_op=async_op)

    @checked
    def gather(self, tensor: torch.Tensor, *, dst: int = 0) -> list[torch.Tensor] | None:
        """Return every rank's ``tensor`` in rank order on rank ``dst``, and None on the others.

        Shapes and types are the same on all ranks. It moves as much as an all-gather.

        >>> fleet.gather(torch.tensor([7]), dst=0)
        [tensor([7])]
        """
        self._collectives.check_rank(dst, "dst")
        whole = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype)
        how: CallSettings = {"is_awaited": True, "op": f"for rank {dst}", "label": "gather"}
        self._collectives.all_gather_single(whole, tensor, **how).wait()
        return list(whole.to(tensor.device).unbind()) if dst == self.rank else None

    @checked
    def broadcast(self, tensor: torch.Tensor, *, root: int = 0, async_op: bool = False) -> TensorWork | None:
        """Replace ``tensor``, of the same shape and type on all ranks, by that of rank ``root``.

        >>> value = torch.tensor([1.0])
        >>> fleet.broadcast(value, root=0)
        """
        return self._end(self._collectives.broadcast(tensor, root, is_awaited=not async_op), async_op=async_op)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, anything that can be pickled, in rank order.

        Raises :class:`ConfigurationError` on all ranks if that of one cannot, or if the job has neither a secret nor
        loopback alone (``insecure=True``). So do the other calls on objects.

        >>> fleet.all_gather_object({"loss": 0.5})
        [{'loss': 0.5}]
        """
        return self._objects.all_gather(value)

    @checked
    def gather_object(self, value: Any, *, dst: int = 0) -> list[Any] | None:
        """Return every rank's ``value`` in rank order on rank ``dst``, which alone unpickles them, else None.

        >>> fleet.gather_object("done", dst=0)
        ['done']
        """
        return self._objects.gather(value, dst=dst)

    @checked
    def broadcast_object(self, value: Any = None, *, root: int = 0) -> Any:
        """Return the ``value`` of rank ``root``; what the others give is ignored.

        >>> fleet.broadcast_object(["a plan"] if fleet.rank == 0 else None)
        ['a plan']
        """
        return self._objects.broadcast(value, root=root)

    def barrier(self) -> None:
        """Wait until every rank has come here, and each has ended its calls before that.

        :class:`DeadlineError` after :attr:`timeout_s` names who has not come.

        >>> fleet.barrier()
        """
        self._under_way.wait()
        kept = self._collectives.find_kept(BARRIER, "barrier")
        if kept is None or not kept.make(BARRIER):
            self.communicator.barrier(is_awaited=True).wait()

    def statistics(self) -> FleetStatistics:
        """Return a frozen record of what was moved, how long was waited, and what each model's update rule counts.

        Any thread may call it, and no other rank is asked. Bytes are this rank's own; sums over ranks are the fleet's.

        >>> fleet.barrier()
        >>> fleet.statistics().num_pending_calls
        0
        """
        counted = [count() for count in self._count_updates]
        updates = tuple(one for one in counted if one is not None)
        return replace(self.communicator.statistics(), epoch=self.epoch.number, updates=updates)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of :meth:`statistics` by name, as :func:`syncline.metrics` does.

        >>> fleet.metrics()["sent_bytes"]
        0.0
        """
        return self.statistics().metrics()

    @checked
    def add_update(self, count: Callable[[], object | None], *, steps: Callable[[], Tally] | None = None) -> None:
        """Let :meth:`statistics` also tell what ``count`` returns, unless it is None.

        ``steps`` counts those that were made, which others are told when this rank leaves.
        """
        self._count_updates.append(count)
        if steps is not None:
            self._count_steps.append(steps)

    def _end(self, work: TensorWork, *, async_op: bool) -> TensorWork | None:
        if async_op:
            self._under_way.add(work)
            return work
        work.wait()
        return None

    def _on_move(self) -> None:
        self._under_way = PendingCalls()
        self.communicator.count_by(self._tally)
        self.communicator.watch_ranks()
        self._collectives = TensorCollectives(self.communicator)
        self._objects = ObjectCollectives(
            self._collectives, rank=self.rank, world_size=self.world_size, is_trusted=self._is_trusted
        )

    def _tally(self) -> Tally | None:
        """Count the steps of all models."""
        tallies = [count() for count in self._count_steps]
        if not tallies:
            return None
        count, num_idle = sum(one.count for one in tallies), sum(one.num_idle for one in tallies)
        return Tally(count=count, unit=STEP, num_idle=num_idle)

    @checked
    def on_close(self, function: Callable[[bool], None]) -> None:
        """Call ``function`` before the connections end; it is told whether something has failed already.

        Raises :class:`ConfigurationError` once the fleet is closed.
        """
        with self._lock:
            if not self._is_closed:
                self._on_close.append(function)
                return
        raise ConfigurationError(
            f"on_close({function!r}) came after the fleet was closed, and nothing would call the function; register it "
            "before close(), or call it here"
        )

    def close(self, *, is_failing: bool = False) -> None:
        """Finish what models have under way, say goodbye and release everything; a second call does nothing.

        With ``is_failing`` nothing is waited for. Raises what went wrong since the last step, after the release. In a
        forked child, which ends with the same exit functions, nothing happens.

        >>> fleet.close()
        >>> fleet
        <Fleet: rank 0 of 1, closed>
        """
        if self.communicator.is_of_parent:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        leave_fleet(self)
        if self.preemption is not None:
            self.preemption.close()
        with contextlib.suppress(Exception):  # the interpreter may be ending already
            atexit.unregister(self._close_at_exit)
        with contextlib.ExitStack() as stack:
            # after a failure of the communicator itself, close() gives the others time to read why
            is_lost = is_failing and self.communicator.failure is None
            for communicator in dict.fromkeys((self.base, self.communicator)):
                stack.callback(
                    *((communicator.abort, tell_end(self.error_in_flight)) if is_lost else (communicator.close,))
                )
            for function in self._on_close:
                stack.callback(function, is_failing)

    def _close_at_exit(self) -> None:
        """After an exception, others must not wait for this rank, nor it for them."""
        self.error_in_flight = getattr(sys, "last_value", None)
        self.is_error_shown = self.error_in_flight is not None
        self.close(is_failing=self.is_error_shown)


def current_fleet() -> Fleet:
    """Return the fleet that ``syncline.init()`` made; :class:`ConfigurationError` if there is none, or it is closed.

    Any thread may ask. A process has at most one fleet at a time.

    >>> syncline.current_fleet().world_size
    1
    """
    if _current is None:
        raise ConfigurationError("There is no fleet; call syncline.init() first")
    return _current


def check_first() -> None:
    """Raise :class:`ConfigurationError` if a fleet is open."""
    if _current is not None:
        raise ConfigurationError(f"syncline.init() was called twice; {_current!r} is open: use it, or close() it")


def enter_fleet(fleet: Fleet) -> None:
    """Make ``fleet`` the one that ``distribute()`` finds, until the interpreter ends; there may be no other."""
    global _current  # noqa: PLW0603 - one process is one rank of one job
    with _entering:
        check_first()
        _current = fleet
        atexit.register(fleet._close_at_exit)


def leave_fleet(fleet: Fleet) -> None:
    """Forget ``fleet``, if it is the current one."""
    global _current  # noqa: PLW0603 - as above
    with _entering:
        if _current is fleet:
            _current = None
