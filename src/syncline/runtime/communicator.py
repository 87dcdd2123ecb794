"""The communicator: what other threads see of the engine, the fabric and the loop that both live on."""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from syncline.arguments import Count, checked
from syncline.errors import SynclineError
from syncline.fabric import (
    ABORTED,
    Fabric,
    FabricOptions,
    PeerStalls,
    Rendezvous,
    Store,
    connect_tcp,
)
from syncline.observe import Trace
from syncline.priorities.settings import Priorities
from syncline.runtime.call import BasicSettings, Call, CallSettings, CollectiveCall
from syncline.runtime.control import Failure, Tally
from syncline.runtime.direct import DirectCall, DirectKind, Messages
from syncline.runtime.engine import Engine
from syncline.runtime.failures import CRASH, LOSSES, PEER_LOST, reason_of
from syncline.runtime.flight_recorder import CallRecord, FlightRecorder
from syncline.runtime.loop import CommunicationLoop
from syncline.runtime.plans import Planner, Plans, Target
from syncline.runtime.port import Port
from syncline.runtime.reduction import Reduction, numpy_reduction
from syncline.runtime.relay import GroupFabric, Relay, place_in_job
from syncline.runtime.shared_memory import EngineLinks, KeptCall, SharedMemoryCollectives, open_together
from syncline.runtime.watching import ANSWER_S, Watching
from syncline.runtime.work import Work
from syncline.schedule import Collective, Layout, Schedule
from syncline.topology import Topology
from syncline.variables import behind_limit_s, live_place

if TYPE_CHECKING:
    from syncline.fabric import _native
    from syncline.runtime.statistics import FleetStatistics

DEFAULT_TIMEOUT_S = 300.0
BARRIER = "barrier"
"""The meaning of the sum that a barrier is, so that no other sum of a byte matches it."""
_OF_CALLS = BasicSettings.__optional_keys__ - {"is_awaited"}
"""What of the settings a call is made with."""
TOKEN_BYTES = 8
LINGER_S = 0.2
"""After a failure, the others have this long to read why before they see this rank go."""
VIEW_S = 5.0
MOST_PLANS = 32
"""Of which a trace tells; each takes the model some milliseconds."""
FLUSH_S = 1.0
"""A rank that is killed leaves a trace without its last second."""
LOOP_ANSWERS_S = 30.0
"""The fabric keeps its own deadlines; this is for a loop that does not answer."""


class Communicator:
    """Runs the collectives of one rank from any thread; a context manager that closes itself.

    ``loop`` must be running, and ``fabric`` live on it. ``planner`` decides which schedule a collective gets;
    ``slice_bytes`` and ``max_inflight_bytes`` follow the topology where they are None (see :class:`Plans`).
    ``on_close`` is called once when everything is released (it may stop the loop). Collectives take contiguous writable
    bytes of whole elements, alike on all ranks; a call that fails ends with :class:`MismatchError`,
    :class:`PeerLostError`, :class:`DeadlineError` (after ``timeout_s`` seconds) or :class:`FabricClosedError`.

    >>> first, second = communicators_in_memory(2)
    >>> work = first.barrier(); second.barrier().wait(); work.wait(); first.close(); second.close()
    """

    def __init__(
        self,
        loop: CommunicationLoop,
        fabric: Fabric,
        topology: Topology,
        *,
        trace: Trace | None = None,
        planner: Planner | None = None,
        slice_bytes: int | None = None,
        max_inflight_bytes: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        on_close: Callable[[], None] | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        topology.check_world_size(fabric.world_size)
        self.rank, self.world_size = fabric.rank, fabric.world_size
        self.members, self.user_stream = place_in_job(fabric)
        self.topology = topology
        self.trace = trace if trace is not None else Trace()
        self.timeout_s = timeout_s
        self.token = bytearray(secrets.token_bytes(TOKEN_BYTES) if self.rank == 0 else TOKEN_BYTES)
        """Rank 0's, on all ranks of a job from its start on: no other job in the same store has had it."""
        self._loop = loop
        self._fabric = fabric
        self._recorder = recorder or FlightRecorder()
        self.stalls: PeerStalls = fabric.stalls
        """Which ranks live, but do not train, as far as is known here; to be asked from any thread."""
        self.progress = fabric.progress
        """Where the training thread is; who waits in any other way than by a :class:`Work` says so here."""
        if self.trace.enabled:
            self.progress.on_span = self.trace.span
        self._plans = Plans(topology, planner, slice_bytes=slice_bytes)
        self.slice_bytes = self._plans.slice_bytes
        """About how large a slice is between machines."""
        self.connection_classes = ConnectionClasses(fabric, loop, timeout_s=timeout_s)
        self._on_close = on_close
        self._is_closed = self._is_interrupted = False
        self._told_plans: set[tuple[str, int]] = set()
        self._shared_memory: dict[int, SharedMemoryCollectives] = {}  # by the streams whose calls they take
        self._last_statistics: FleetStatistics | None = None
        self.max_inflight_bytes = max_inflight_bytes or self._plans.inflight_bytes
        self._engine = loop.call(partial(self._make_engine, self.max_inflight_bytes), LOOP_ANSWERS_S)
        self._engine.user_stream = self.user_stream
        self._watching = self._make_watching()
        loop.on_crash(self._engine.crash)
        if self.trace.enabled:
            loop.call_soon(self._flush_trace)

    @classmethod
    def connect(
        cls,
        *,
        rank: int,
        world_size: int,
        topology: Topology,
        store: Store,
        options: FabricOptions,
        trace: Trace | None = None,
        connect_s: float | None = None,
        **settings: Any,
    ) -> Communicator:
        """Start a loop and connect to the other ranks over TCP; ``settings`` are those of the constructor.

        The ranks find each other through ``store``, which is not needed afterwards, within ``connect_s`` (default: that
        of ``options``).
        """
        topology.check_world_size(world_size)
        limit_s = options.connect_s if connect_s is None else connect_s
        loop = CommunicationLoop()
        loop.start()
        try:
            connecting = connect_tcp(
                options,
                rank=rank,
                world_size=world_size,
                rendezvous=Rendezvous(store, job_id=options.job_id),
                topology=topology,
                trace=trace,
                timeout_s=limit_s,
            )
            fabric = loop.run(connecting, 2 * limit_s + LOOP_ANSWERS_S)
            return cls(loop, fabric, topology, trace=trace, on_close=loop.stop, **settings)
        except BaseException:
            loop.stop()
            raise

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.world_size}: {'closed' if self._is_closed else self._engine}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_of_parent(self) -> bool:
        """Whether this is a forked child of the rank, where all of this may be looked at but not used."""
        return self._loop.is_of_parent

    @property
    def failure(self) -> SynclineError | None:
        """The error that every call ends with from now on; None as long as all is well."""
        return self._engine.failure_error()

    @checked
    def is_lost(self, rank: int) -> bool:
        """Whether ``rank`` is lost, or has left; from any thread."""
        return self._fabric.is_lost(rank)

    @checked
    def plan(self, collective: Collective, num_bytes: int, *, target: Target = "balanced", root: int = 0) -> Schedule:
        """Return the schedule for a buffer of ``num_bytes`` (remembered; the same on every rank)."""
        return self._plans.schedule(collective, num_bytes, target=target, root=root)

    def plan_anew(self, topology: Topology) -> None:
        """Plan on ``topology`` from the next call on: the same ranks and hosts; all ranks call this alike."""
        topology.check_world_size(self.world_size)
        self.topology = topology
        self._plans = Plans(topology, self._plans.planner, slice_bytes=None)
        self.slice_bytes = self._plans.slice_bytes

    def bucket_slice_bytes(self, num_bytes: int) -> int:
        """About how large a slice is of a buffer of ``num_bytes`` that moves beside many others."""
        return self._plans.bucket_slice_bytes(num_bytes)

    @checked
    def layout(self, schedule: Schedule, num_elements: int, itemsize: int) -> Layout:
        """Return how a buffer of ``num_elements`` is cut in slices for ``schedule`` (remembered)."""
        return self._plans.layout(schedule, num_elements, itemsize)

    def submit(self, call: Call, *, is_awaited: bool = False) -> Work:
        """Begin ``call``; from any thread. Its buffer must not be touched until the work is done.

        With ``is_awaited`` this may take as long as the call itself: the caller would wait for it anyway.
        """
        self._loop.check_process()  # what is made in shared memory needs no loop
        work = self._work_of(call, self._note(call))
        is_awaited = is_awaited and not self._loop.is_current()
        if (segment := self._shared_memory.get(call.stream)) is not None:
            segment.submit(call, work, is_awaited=is_awaited)
        else:
            call.place_own_part(self.rank)
            clock = self._loop.clock
            try:
                clock.call_soon_threadsafe(self._engine.submit, call, work)
            except RuntimeError as error:
                raise self._loop.stopped(error) from error
        return work

    def _note(self, call: Call) -> CallRecord:
        if not self._loop.is_current():
            self.progress.touch()
        return self._recorder.note(call, self.members)

    def _work_of(self, call: Call, record: CallRecord) -> Work:
        work = Work(call.what, timeout_s=call.timeout_s, loop=self._loop, progress=self.progress)
        work.record = record
        return work

    def begin_work(self, label: str, timeout_s: float | None = None) -> Work:
        """Return a work for what several calls make, which whoever makes them ends (:meth:`Work.end`)."""
        return Work(label, timeout_s=timeout_s or self.timeout_s, loop=self._loop, progress=self.progress)

    def basic_settings(self, label: str, settings: BasicSettings) -> dict[str, Any]:
        """Return what any call here is made with: what ``settings`` say, else what is usual; it is called ``label``."""
        asked = {name: value for name, value in settings.items() if name in _OF_CALLS and value is not None}
        return {"stream": self.user_stream, "label": label, "timeout_s": self.timeout_s} | asked

    def start(
        self,
        schedule: Schedule,
        buffer: memoryview,
        reduction: Reduction,
        *,
        layout: Layout | None = None,
        parts: Sequence[int] = (),
        own_part: memoryview | None = None,
        **settings: Unpack[CallSettings],
    ) -> Work:
        """Begin the collective that ``schedule`` makes of ``buffer`` (writable bytes, until the work is done).

        ``layout`` says where its slices lie; by default as :meth:`layout` cuts them, and each rank's part in one range
        where parts are in rank order; ``parts`` are their elements, where they are not equal.
        """
        if layout is None:
            layout = self._plans.layout(
                schedule,
                buffer.nbytes // reduction.itemsize,
                reduction.itemsize,
                is_contiguous=schedule.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
                parts=tuple(parts),
            )
        if self.trace.enabled:
            self._tell_plan(schedule, buffer.nbytes)
        call = CollectiveCall(
            **self.basic_settings(schedule.collective.value, settings),
            schedule=schedule,
            layout=layout,
            buffer=buffer,
            reduction=reduction,
            parts=tuple(parts),
            own_part=own_part,
            op=settings.get("op", ""),
            elements=settings.get("elements", ""),
        )
        return self.submit(call, is_awaited=settings.get("is_awaited", False))

    def start_direct(
        self,
        direction: DirectKind,
        *,
        sends: Messages,
        receives: Messages,
        about: str,
        root: int | None = None,
        **settings: Unpack[BasicSettings],
    ) -> Work:
        """Begin a :class:`DirectCall`; from any thread, and in the order of the other calls."""
        call = DirectCall(
            **self.basic_settings(direction, settings),
            direction=direction,
            root=root,
            num_ranks=self.world_size,
            about=about,
            sends=sends,
            receives=receives,
        )
        return self.submit(call, is_awaited=settings.get("is_awaited", False))

    def keep(
        self,
        num_bytes: int,
        reduction: Reduction,
        *,
        view: Callable[[Any], memoryview],
        finish: Callable[[Any], object] | None = None,
        **settings: Unpack[CallSettings],
    ) -> KeptCall | None:
        """Prepare all-reduces of one kind, for threads that wait; None where they are not made in shared memory.

        ``view`` returns the bytes of what :meth:`KeptCall.make` is given; ``finish`` is told of it when it is a sum.
        """
        made = self._shared_memory.get(self.user_stream)
        if made is None:
            return None
        schedule, itemsize = self.plan(Collective.ALL_REDUCE, num_bytes), reduction.itemsize
        common = self.basic_settings(schedule.collective.value, settings)
        layout = self._plans.layout(schedule, num_bytes // itemsize, itemsize)
        op = settings.get("op", "")
        kind = partial(CollectiveCall, **common, schedule=schedule, layout=layout, reduction=reduction, op=op)
        return made.keep(kind, num_bytes, view=view, finish=finish)

    def _tell_plan(self, schedule: Schedule, num_bytes: int) -> None:
        """Let the trace have what the model says of a schedule, once for each size, and of what bounds it."""
        key = (schedule.digest, num_bytes)
        if self.rank or not self.topology.has_rates or key in self._told_plans or len(self._told_plans) >= MOST_PLANS:
            return
        from syncline.schedule import lower_bound, predict  # for traces alone

        self._told_plans.add(key)
        self.trace.about(
            "plan",
            collective=schedule.collective.value,
            bytes=num_bytes,
            planner=schedule.planner,
            predicted_s=predict(schedule, self.topology, num_bytes, self.slice_bytes).time_s,
            bound_s=lower_bound(self.topology, schedule.collective, num_bytes),
        )

    @checked
    def all_reduce(self, buffer: memoryview, reduction: Reduction, **settings: Unpack[CallSettings]) -> Work:
        """Sum ``buffer`` (or what ``reduction`` does) over all ranks, in place and on every rank."""
        return self.start(self.plan(Collective.ALL_REDUCE, buffer.nbytes), buffer, reduction, **settings)

    @checked
    def reduce_scatter(
        self, buffer: memoryview, reduction: Reduction, *, parts: Sequence[int] = (), **settings: Unpack[CallSettings]
    ) -> Work:
        """Sum ``buffer`` over all ranks; rank k's own part of it, elements [k n / N, (k + 1) n / N), holds the result.

        The rest holds partial sums afterwards. ``parts``: the elements of each rank's part, where they are not equal.
        """
        schedule = self.plan(Collective.REDUCE_SCATTER, buffer.nbytes, target="rank_order")
        return self.start(schedule, buffer, reduction, parts=parts, **settings)

    @checked
    def all_gather(
        self,
        buffer: memoryview,
        reduction: Reduction | None = None,
        *,
        parts: Sequence[int] = (),
        own_part: memoryview | None = None,
        **settings: Unpack[CallSettings],
    ) -> Work:
        """Give every rank the whole of ``buffer``, of which rank k holds the elements [k n / N, (k + 1) n / N).

        ``reduction`` says what an element is (default: a byte); ``parts`` are the elements of each rank's part, where
        they are not equal; ``own_part`` is this rank's, if it is not there yet.
        """
        schedule = self.plan(Collective.ALL_GATHER, buffer.nbytes, target="rank_order")
        kind = reduction or numpy_reduction("uint8")
        return self.start(schedule, buffer, kind, parts=parts, own_part=own_part, **settings)

    @checked
    def broadcast(self, buffer: memoryview, *, root: int = 0, **settings: Unpack[CallSettings]) -> Work:
        """Give every rank what ``root`` has in ``buffer``."""
        schedule = self.plan(Collective.BROADCAST, buffer.nbytes, root=root)
        return self.start(schedule, buffer, numpy_reduction("uint8"), **settings)

    def sum_bytes(self, numbers: bytearray, *, label: str) -> None:
        """Sum a few bytes over all ranks, and wait for it: by what is planned soonest, whatever is fastest."""
        self.start(self._plans.at_hand, memoryview(numbers), numpy_reduction("uint8"), label=label).wait()

    @checked
    def barrier(self, **settings: Unpack[CallSettings]) -> Work:
        """End when every rank has called it."""
        settings = {"label": "barrier", "op": BARRIER, **settings}
        return self.all_reduce(memoryview(bytearray(1)), numpy_reduction("uint8"), **settings)

    @property
    def has_segment(self) -> bool:
        """Whether small calls that are waited for are made in memory that the ranks share; alike on all of them."""
        return self.user_stream in self._shared_memory

    @property
    def inboxes(self) -> _native.Inboxes | None:
        """What small messages between ranks pass through that share memory; None on all ranks, or on none."""
        made = self._shared_memory.get(self.user_stream)
        return None if made is None else made.inboxes

    def open_segment(self, *, is_wanted: bool = True, stream: int | None = None) -> bool:
        """Let ranks of one machine make small calls that they wait for in memory that they share; return if they will.

        All ranks call this alike, once (for each ``stream``: for all its small calls, see :class:`Work`), and it ends
        when all have come. One that does not want it, or runs elsewhere, decides for all. A group has its own.
        """
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        is_able = is_wanted and all(map(self._fabric.is_local, others))
        sum_bytes = partial(self.sum_bytes, label="segment")
        segment = open_together(self.rank, self.world_size, is_able=is_able, sum_bytes=sum_bytes)
        if segment is not None:
            made = SharedMemoryCollectives(
                segment, self._link_engine(), trace=self.trace, is_for_all=stream is not None
            )
            self._shared_memory[self.user_stream if stream is None else stream] = made
            self._relay.handlers.append(made.on_lost)
        return segment is not None

    def _link_engine(self) -> EngineLinks:
        loop, engine = self._loop, self._engine
        return EngineLinks(
            note=self._note,
            begin=self._work_of,
            start=partial(loop.call_soon, engine.submit),
            has_failed=lambda: engine.failure is not None,
            late=lambda *about: loop.call_soon(engine.late, *about),
            crash=lambda error: loop.call_soon(engine.crash, error),
            stalls=self._fabric.stalls,
        )

    @checked
    def open_port(self, name: str) -> Port:
        """Return a port for messages beside the collectives; both ends of a message must give it the same ``name``."""
        return Port(self._loop, self._fabric, self._relay, signature=zlib.crc32(name.encode()))

    @checked
    def open_group(self, ranks: Sequence[int], *, streams: range) -> Communicator:
        """Return a communicator of some ranks, this among them (see :class:`GroupFabric`); close it before this one."""
        fabric = GroupFabric(self._fabric, self._relay, ranks, streams=streams)
        shape, planner = self.topology.restricted(fabric.members), self._plans.planner
        make = partial(Communicator, self._loop, fabric, shape, trace=self.trace, recorder=self._recorder)
        return make(planner=planner, timeout_s=self.timeout_s)

    def give_up(self, why: str | SynclineError) -> None:
        """End all calls, now and later, here and on the other ranks, for what went wrong beside them; from any thread.

        Elsewhere they end with :class:`PeerLostError`, which says that this rank gave up, and ``why``; where that is an
        error that names ranks at fault, with one of its kind that names them.
        """
        failure = Failure(reason=CRASH, text=str(why), rank=self.rank)
        if isinstance(why, SynclineError) and why.ranks_at_fault:
            accused = tuple(self.members.index(rank) for rank in why.ranks_at_fault)
            failure = Failure(reason=reason_of(why), text=str(why), rank=accused[0], accused=accused)
        self._loop.call_soon(self._engine.give_up, failure)

    def end_with(self, group: Communicator) -> None:
        """Let a loss that has ended the calls of ``group``, which was opened on this, end all calls of this one too."""
        if (loss := group.loss) is not None:
            accused = tuple(group.members[rank] for rank in loss.accused)
            failure = loss._replace(rank=group.members[loss.rank], accused=accused)
            self._loop.call(partial(self._engine.give_up, failure), LOOP_ANSWERS_S)

    def interrupt(self, why: str, *, lost: int | None = None) -> None:
        """End all calls here, now and later, because the members change: the others know; from any thread.

        They end with :class:`PeerLostError`; ``lost`` is the job's number of the rank that it names (default: this).
        The fabric is sound: a close says goodbye in good order; what is queued is of calls that are over.
        """
        self._is_interrupted = True
        member = self.members.index(lost) if lost in self.members else self.rank
        failure = Failure(reason=PEER_LOST, text=why, rank=member, is_hearsay=True)
        self._loop.call_soon(partial(self._engine.give_up, failure, tell=False))

    @property
    def loss(self) -> Failure | None:
        """Why calls have failed, if that is because a rank was lost or late; its rank is one of :attr:`members`."""
        failure = self._engine.failure
        return failure if failure is not None and failure.reason in LOSSES else None

    def wait_beside(self, awaited: Iterable[int], what: str) -> None:
        """Let errors of all ranks know whom this one waits for beside all calls; without ``what``: no more."""
        self._loop.call_soon(self._engine.wait_beside, awaited, what)

    def find_beside(self, rank: int) -> tuple[int, int, str] | None:
        """Return whom ``rank`` waits for in the end beside all calls, who waits for that one, and in what."""
        return self._engine.find_beside(rank)

    def watch_failure(self, handler: Callable[[SynclineError], None]) -> None:
        """Tell ``handler``, on the loop's thread, of the error that calls end with, once this has failed or closes."""
        self._loop.call_soon(self._engine.watch_failure, handler)

    def statistics(self) -> FleetStatistics:
        """Return a frozen record of all counters; after a close, the last one."""
        if self._last_statistics is not None:
            return self._last_statistics
        return self._loop.call(self._statistics, LOOP_ANSWERS_S)

    def close(self) -> None:
        """Say goodbye and release everything; calls under way fail. Nothing happens twice, nor in a forked child."""
        self._end(self._leave)

    @checked
    def abort(self, reason: str = "") -> None:
        """Release everything at once; the others see this rank as lost, and why. A second call does nothing."""
        self._end(partial(self._break_off, reason))

    def _end(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._is_closed or self.is_of_parent:
            return
        self._is_closed = True
        try:
            if self._loop.is_running():
                self._loop.run(end(), LOOP_ANSWERS_S)
        finally:
            self._shared_memory.clear()
            self.trace.flush()
            if self._on_close is not None:
                self._on_close()

    def watch_ranks(self) -> None:
        """Tell rank 0 every few seconds how this one fares; there, say on standard error who holds the others up."""
        self.progress.watcher = self._watching
        if self.trace.enabled:
            self._watching.tell_trace()
        live = live_place()
        if self.world_size > 1 or live:
            self._loop.call_soon(self._watching.begin, behind_limit_s(), live)

    def view(self) -> dict[str, Any] | None:
        """Return what is known of all ranks now (see :meth:`Lookout.view`); None but on rank 0 of several."""
        return self._loop.call(self._watching.view, VIEW_S)

    def examine(self, seconds: float) -> dict[str, Any]:
        """Ask all ranks what they do for some seconds (see :meth:`Watching.examine`); rank 0 calls this."""
        return self._loop.run(self._watching.examine(seconds), seconds + ANSWER_S + VIEW_S)

    def dump_flights(self) -> None:
        """Let all ranks write their last calls now, each to its own folder for them; rank 0 calls this."""
        self._loop.call_soon(self._watching.dump)

    def write_flight(self, folder: Path) -> None:
        """Write the last calls to ``folder`` when calls fail or this closes, on SIGUSR1, and when rank 0 says so."""
        number = self.members[self.rank]
        self._watching.on_dump = lambda: self._recorder.write(folder, number)
        self._recorder.write_in_time(folder, number)
        self.watch_failure(lambda _: self._recorder.write(folder, number))

    def _flush_trace(self) -> None:
        if not self._is_closed:
            self.trace.flush()
            self._loop.clock.call_later(FLUSH_S, self._flush_trace)

    def _make_engine(self, max_inflight_bytes: int) -> Engine:
        engine = Engine(
            self._fabric,
            topology=self.topology,
            clock=self._loop.clock,
            trace=self.trace,
            max_inflight_bytes=max_inflight_bytes,
        )
        self._relay = Relay(engine)
        self._fabric.set_listener(self._relay)
        return engine

    def _make_watching(self) -> Watching:
        watching = Watching(
            self._loop,
            self._fabric,
            self.topology,
            trace=self.trace,
            recorder=self._recorder,
            members=self.members,
            take=self._statistics,
            is_over=lambda: self._is_closed or self._engine.failure is not None,
        )
        self._engine.on_watching = watching.hear
        return watching

    def count_by(self, count: Callable[[], Tally | None]) -> None:
        """Tell others, when this rank leaves, how much it has made; ``count`` is called on the loop's thread."""
        self._engine.count = count

    def _statistics(self) -> FleetStatistics:
        from syncline.runtime.statistics import take_statistics  # a start counts nothing

        return take_statistics(
            self._fabric,
            self._engine,
            tuple(self._shared_memory.values()),
            topology=self.topology,
            progress=self.progress,
        )

    async def _leave(self) -> None:
        self._relay.end(self.rank)
        if self._engine.failure is not None and not self._is_interrupted:
            await asyncio.sleep(LINGER_S)
            await self._break_off()  # what is queued is of calls that failed, and no one will receive it
            return
        self._engine.leave()
        await self._fabric.close()
        self._last_statistics = self._statistics()
        if self.progress.watcher is self._watching:
            self._watching.count()

    async def _break_off(self, reason: str = "") -> None:
        self._relay.end(self.rank)
        self._last_statistics = self._statistics()
        if self.progress.watcher is self._watching:
            self._watching.count()
        self._fabric.abort(reason or ABORTED)
        self._engine.leave(tell=False)


class ConnectionClasses:
    """What all models of a job want of their connections; all ranks call its methods alike, on their training threads.

    Connections are opened once and stay. Messages, windows and grants have the sizes of several classes only while a
    model uses several: small ones let an urgent message overtake, and cost more of them.
    """

    def __init__(self, fabric: Fabric, loop: CommunicationLoop, *, timeout_s: float) -> None:
        self._fabric = fabric
        self._loop = loop
        self._timeout_s = timeout_s
        self._of_models: dict[int, tuple[int, ...]] = {}
        self._is_sized_for_several = False

    def open(self, priorities: Priorities, *, only_check: bool = False) -> None:
        """Open these connections to every peer, and wait for them; sizes are those of several classes then.

        Opens nothing that is open. Raises ``ConfigurationError`` where ranks differ, ``HandshakeError`` at the deadline
        and ``PeerLostError``, with who. ``only_check`` raises ``ConfigurationError`` if it can be seen now that these
        cannot be opened, and opens nothing.
        """
        opening = self._fabric.open_classes(priorities, timeout_s=self._timeout_s, only_check=only_check)
        self._loop.run(opening, self._timeout_s + LOOP_ANSWERS_S)
        self._is_sized_for_several |= priorities.is_on and not only_check

    def assign(self, stream: int, classes: Sequence[int], priorities: Priorities | None = None) -> None:
        """Note the class of each bucket of a model, the first of which has ``stream``.

        With ``priorities`` connections and sizes follow: several classes are opened as by :meth:`open`, and sizes are
        those of one class again once no model has several.
        """
        self._of_models[stream] = tuple(classes)
        if priorities is None:
            return
        if len(set(classes)) > 1:
            self.open(priorities)
        elif self._is_sized_for_several and all(len(set(each)) <= 1 for each in self._of_models.values()):
            self._is_sized_for_several = False
            self.open(Priorities.off())


@checked
def communicators_in_memory(
    num_ranks: Count, topology: Topology | None = None, *, seed: int | None = None, **options: Any
) -> tuple[Communicator, ...]:
    """Return ``num_ranks`` communicators on one loop; the thread ends when the last of them is closed.

    ``topology``: default one switch, one host for each rank; :class:`TopologyError` if it has another number of ranks.
    With a ``seed``, messages are delivered in a random order that the seed replays. ``options`` are those of
    :class:`Communicator`.

    >>> first, second = communicators_in_memory(2)
    >>> first.world_size
    2
    >>> first.abort(); second.abort()
    """
    from syncline.fabric import memory_fabrics  # where all ranks are in one process

    loop = CommunicationLoop("syncline memory")
    loop.start()
    open_ranks = list(range(num_ranks))

    def on_close() -> None:
        if open_ranks.pop() == 0:  # the last one that any thread takes
            loop.stop()

    try:
        fabrics = loop.call(partial(memory_fabrics, num_ranks, seed=seed), LOOP_ANSWERS_S)
        shape = topology if topology is not None else Topology.flat(num_ranks)
        return tuple(Communicator(loop, fabric, shape, on_close=on_close, **options) for fabric in fabrics)
    except BaseException:
        loop.stop()
        raise
