"""The engine: runs verified schedules on any fabric, many calls and many slices at once.

It lives on the communication loop's thread and is made of callbacks. A call is cut into slices by its layout; each
slice runs through the dataflow of its schedule by itself, so all links are busy at once. An executor begins slices and
bounds how many are under way (:mod:`syncline.fabric.slice_executor`). Results are reproducible to the bit:
contributions are added in rank order, not in order of arrival.

A call that goes wrong ends all calls, here and on the other ranks: after that the ranks no longer agree on what was
done. No failed call leaves a posted receive behind that could write to its buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from syncline.errors import ConfigurationError, FabricError, SynclineError
from syncline.fabric import PeerLeftError, Transport
from syncline.fabric.slice_executor import NUMBER_MASK, Execution, SlicedCall, check_tags_fit, first_tag
from syncline.observe import Trace
from syncline.runtime import control, failures
from syncline.runtime.call import Call, CollectiveCall, Description, trace_call
from syncline.runtime.control import ControlError, ControlKind, Failure, Tally
from syncline.runtime.dataflow import Dataflows
from syncline.runtime.direct import DirectCall, DirectExecution
from syncline.runtime.plans import MOST_INFLIGHT_BYTES
from syncline.runtime.python_slice_executor import PythonSliceExecutor
from syncline.runtime.same_calls import CallKey, Disagreement, EarlyQuota, EarlyWaits, SameCalls
from syncline.runtime.work import Work
from syncline.topology import Topology

SOON = 1 / 16
"""Part of a call's time after which a rank tells whom it waits for, if others wait in another call; else it is half."""


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveCall:
    """What the engine knows of one call. ``number`` is its running number in its stream."""

    call: Call
    number: int
    peers: frozenset[int]
    """All ranks that this one exchanges messages with."""
    description: Description
    work: Work
    started_s: float
    started_ns: int
    is_agreed: bool
    """Whether the rank before is known to have made the same call."""
    execution: Execution | None = None
    """Its slices or messages; None if there is nothing to move."""
    timer: asyncio.TimerHandle | None = None
    awaited: dict[int, frozenset[int]] = field(default_factory=dict)
    """For each rank that said so, whom it waits for."""
    has_told: bool = False
    """Whether this rank has said so itself."""
    unmet: Callable[[], Set[int]] = frozenset
    """To whom connections are being opened before the call's slices begin."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do or to learn."""
        return self.is_agreed and (self.execution is None or self.execution.is_over)

    def needs(self, peer: int, predecessor: int) -> bool:
        """Whether anything is still to be exchanged with ``peer``."""
        if peer == predecessor and not self.is_agreed:
            return True
        if self.execution is None or self.execution.is_over:
            return False
        return (self.execution.has_more and peer in self.peers) or peer in self.execution.open_peers()

    def awaited_peers(self, predecessor: int) -> frozenset[int]:
        """Return who has not delivered: data, or else the memory of what was sent, or else the agreement.

        Before that, who is not connected.
        """
        if unmet := self.unmet():
            return frozenset(unmet)
        peers = (
            set() if self.execution is None else self.execution.awaited_peers() or self.execution.open_peers() - {-1}
        )
        if not self.is_agreed:
            peers.add(predecessor)
        return frozenset(peers)

    def stop(self) -> None:
        """Withdraw every slice, so that nothing is written to the buffer any more."""
        if self.timer is not None:
            self.timer.cancel()
        if self.execution is not None:
            self.execution.stop()


class Engine:
    """Runs the collectives of one rank; every method is called on the clock's thread.

    ``max_inflight_bytes`` bounds the slices under way in a connection class, and so the temporaries, which need at most
    that much for each class and level of a schedule.
    """

    def __init__(
        self,
        fabric: Transport,
        *,
        topology: Topology | None,
        clock: asyncio.AbstractEventLoop,
        trace: Trace | None = None,
        max_inflight_bytes: int = MOST_INFLIGHT_BYTES,
    ) -> None:
        self._fabric = fabric
        self._numbers = fabric.numbers
        self._topology = topology
        self._clock = clock
        self._trace = trace if trace is not None else Trace()
        self._rank, self._world_size = fabric.rank, fabric.world_size
        self._unconnected = fabric.unconnected
        self._others = [rank for rank in range(fabric.world_size) if rank != fabric.rank]
        self._predecessor = (fabric.rank - 1) % fabric.world_size
        quota = EarlyQuota()
        self._same_calls = SameCalls(self._predecessor, quota)
        self._early_waits = EarlyWaits(quota)
        reference = PythonSliceExecutor(fabric, clock, on_crash=self.crash)
        self._executor = fabric.open_executor(reference, max_inflight_bytes)
        self._dataflows = Dataflows(fabric.rank)
        self._num_sliced = 0
        self._calls: dict[CallKey, ActiveCall] = {}
        self._next_numbers: dict[int, int] = {}
        self._lost: dict[int, Failure] = {}
        self._beside: dict[int, tuple[frozenset[int], str]] = {}
        """For each rank that waits beside all calls, whom it waits for, and in what."""
        self._completed_by: dict[int, dict[int, int]] = {}
        self._parted: dict[int, Tally] = {}
        self.count: Callable[[], Tally | None] = lambda: None
        """How much this rank has made, which others are told when it leaves."""
        self.on_watching: Callable[[int, ControlKind, int, bytes], None] = lambda *_: None
        """Takes what another rank tells for who watches the job: who it is, the kind, the number, and the body."""
        self.user_stream = 0
        self.num_calls: dict[str, int] = {}
        self.call_bytes: dict[str, int] = {}
        self.failure: Failure | None = None
        """Why the engine gave up, if it did."""
        self._cause: BaseException | None = None
        self._failure_handlers: list[Callable[[SynclineError], None]] = []
        self._stall_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = f"failed ({self.failure.reason})" if self.failure else f"{len(self._calls)} calls"
        return f"<Engine rank {self._rank} of {self._world_size}: {state}>"

    def failure_error(self) -> SynclineError | None:
        """Return why the engine gave up as an error, if it did."""
        return None if self.failure is None else self._error(self.failure, None)

    @property
    def num_pending_calls(self) -> int:
        """Calls under way, now."""
        return len(self._calls)

    def submit(self, call: Call, work: Work, num_skipped: int = 0) -> None:
        """Begin ``call``; ``work`` ends with it, or with what went wrong.

        ``num_skipped`` calls of its stream were made elsewhere since the last one here.
        """
        try:
            active = self._activate(call, work, num_skipped)
            if active is None or not self._announce(active):
                return
            if active.execution is None:
                self._end(active)
            elif active.peers.isdisjoint(self._unconnected):
                active.execution.start()
            else:
                active.unmet = lambda: active.peers & self._fabric.unconnected
                self._fabric.when_connected(active.peers, partial(self._start, active))
        except Exception as error:  # a bug of ours must not leave a caller waiting
            self.crash(error)
            if not work.done():
                work.finish(FabricError(f"{call.what} could not begin: {error!r}"))

    def _start(self, active: ActiveCall) -> None:
        """Let a call's slices move, unless it has ended while its connections were opened."""
        active.unmet = frozenset
        key = (active.call.stream, active.number & NUMBER_MASK)
        if self._calls.get(key) is active and active.execution is not None:
            active.execution.start()

    def leave(self, *, tell: bool = True) -> None:
        """Tell the others which calls are complete, then end those that are not."""
        if tell and self.failure is None:
            oldest: dict[int, int] = dict(self._next_numbers)
            for (stream, _), active in self._calls.items():
                oldest[stream] = min(oldest[stream], active.number)
            if (tally := self.count()) is not None:
                self._tell_all(control.encode_parting(tally))
            for payload in control.encode_leaving(oldest):
                self._tell_all(payload)
        text = f"the communicator of rank {self._rank} is closed"
        self._fail(Failure(reason=failures.CLOSED, text=text, rank=self._rank), tell=False)

    def give_up(self, failure: Failure, *, tell: bool = True) -> None:
        """End all calls, here and on the other ranks (which know, without ``tell``), for what was found elsewhere."""
        self._fail(failure, tell=tell)

    def wait_beside(self, awaited: Iterable[int], what: str) -> None:
        """Tell everyone whom this rank waits for beside all calls, and in what; with no text, that it does no more."""
        peers = frozenset(awaited)
        self._note_beside(self._rank, peers, what)
        self._tell_all(control.encode_beside(peers, what))

    def find_beside(self, rank: int) -> tuple[int, int, str] | None:
        """Return whom ``rank`` waits for in the end, beside all calls, who waits for that one, and in what."""
        beside = dict(self._beside)  # any thread may ask
        awaited = {peer: peers for peer, (peers, _) in beside.items()}
        for culprit, waiters in failures.find_culprits(awaited, rank).items():
            return culprit, waiters[0], beside[waiters[0]][1]
        return None

    def watch_failure(self, handler: Callable[[SynclineError], None]) -> None:
        """Tell ``handler`` once this has given up, with or without a call under way; at once if it has."""
        self._failure_handlers.append(handler)
        if self.failure is not None:
            handler(self._error(self.failure, None))

    def crash(self, error: BaseException) -> None:
        """End all calls because our own code failed."""
        text = f"the communication loop of {self._fabric.describe_peer(self._rank)} failed: {error!r}"
        self._cause = self._cause or error
        self._fail(Failure(reason=failures.CRASH, text=text, rank=self._rank))

    # What the fabric tells.

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """End what still needs ``peer``; what it has completed, or needs no more, goes on.

        A rank that leaves tells before which calls it has completed. One that has not, such as a member that closes the
        job's fabric and never opened this group, will complete none.
        """
        failure = Failure(reason=failures.PEER_LOST, text=str(error).rstrip("."), rank=peer)
        self._lost[peer] = failure
        has_told = isinstance(error, PeerLeftError) and peer in self._completed_by
        if self.failure is not None or has_told:
            return
        needing = next((one for one in self._calls.values() if one.needs(peer, self._predecessor)), None)
        if needing is not None:
            self._cause = error
            self._fail(self._compared(failure, needing.call))

    def on_control(self, peer: int, payload: bytes) -> None:
        """Take what another engine tells; what no engine tells ends all calls, and the error says who told it."""
        try:
            self._take_control(peer, payload)
        except ControlError as error:
            text = f"{self._fabric.describe_peer(peer)} broke the protocol: it told {error}"
            self._fail(Failure(reason=failures.VIOLATION, text=text, rank=peer))

    def on_stall(self) -> None:
        """End what has waited too long for a rank that is stalled now."""
        self._look_for_stalls()

    def _take_control(self, peer: int, payload: bytes) -> None:
        kind, stream, number, body = control.decode_head(payload)
        key = (stream, number & NUMBER_MASK)
        if kind is ControlKind.DESCRIBE:
            self._judge(key, *self._same_calls.heard(key, peer, control.decode_description(body)))
        elif kind is ControlKind.WAITING:
            self._note_waiting(key, number, peer, *control.decode_waiting(body, self._world_size))
        elif kind is ControlKind.BESIDE:
            self._note_beside(peer, *control.decode_waiting(body, self._world_size))
        elif kind is ControlKind.FAILED:
            failure = control.decode_failure(body, self._world_size)
            here = failures.heard_from(failure, peer, self._fabric.describe_peer)
            self._fail(here, tell=False)
        elif kind in control.WATCHING:
            self.on_watching(peer, kind, number, body)
        elif kind is ControlKind.PARTING:
            self._parted[peer] = control.decode_parting(number, body)
        else:
            self._completed_by.setdefault(peer, {}).update(control.decode_leaving(body))
            if not number:
                self._peer_leaves(peer)

    def _mismatched(self, active: ActiveCall, peer: int, tag: int, received: int) -> None:
        """Tell ``peer`` what was called here: it made another call, so it will find out and tell everyone."""
        if received == active.description.signature and isinstance(active.call, DirectCall):
            ranks = f"{self._fabric.describe_peer(peer)} and {self._fabric.describe_peer(self._rank)}"
            text = f"{ranks} disagree on how many bytes the first sends the second in {active.call.what}"
            reason = f"{text}; what a rank sends must be what its receiver expects"
            self._fail(Failure(reason=failures.MISMATCH, text=reason, rank=peer))
            return
        if received == active.description.signature:
            self.crash(AssertionError(f"message {tag:#x} of rank {peer} has another size than its receive"))
            return
        payload = control.encode_description(active.call.stream, active.number, active.description)
        self._fabric.send_control(peer, payload)

    def _note_beside(self, rank: int, awaited: frozenset[int], what: str) -> None:
        if what:
            self._beside[rank] = awaited, what
        else:
            self._beside.pop(rank, None)

    def _note_waiting(self, key: CallKey, number: int, peer: int, awaited: frozenset[int], what: str) -> None:
        active = self._calls.get(key)
        if active is not None:
            active.awaited[peer] = awaited
        elif number >= self._next_numbers.get(key[0], 0):
            self._early_waits.note(key, peer, awaited, what)
            self._answer_wait(peer)

    def _answer_wait(self, peer: int) -> None:
        """Tell in which calls this rank waits for ``peer``, which waits in one that is not made here.

        Of two calls that do not meet, the older one's time is over first, and who made it must know of the other by
        then, however much later that was made.
        """
        calls = self._calls.values()
        if any(not active.has_told and peer in active.awaited_peers(self._predecessor) for active in calls):
            self._tell_waits()

    def _peer_leaves(self, peer: int) -> None:
        num_completed = self._completed_by[peer]
        for active in self._calls.values():
            if active.number >= num_completed.get(active.call.stream, 0):
                text = f"{self._fabric.describe_peer(peer)} closed its communicator before {active.call.what} was done"
                failure = Failure(reason=failures.PEER_LOST, text=text, rank=peer)
                self._fail(self._compared(failure, active.call))
                return
        text = f"{self._fabric.describe_peer(peer)} closed its communicator"
        self._lost[peer] = Failure(reason=failures.PEER_LOST, text=text, rank=peer)

    def _loss_that_matters(self, stream: int, number: int) -> Failure | None:
        """Return why a new call cannot be done; a rank that left may have done its part of it before."""
        for peer, failure in self._lost.items():
            if number >= self._completed_by.get(peer, {}).get(stream, 0):
                return failure
        return None

    def _activate(self, call: Call, work: Work, num_skipped: int) -> ActiveCall | None:
        """Give a call its number; None if it cannot be done, and then ``work`` says why."""
        number = self._next_numbers.get(call.stream, 0) + num_skipped
        self._next_numbers[call.stream] = number + 1
        try:
            self._check(call)
        except SynclineError as error:
            work.finish(error)
            return None
        loss = self._loss_that_matters(call.stream, number)
        if loss is not None:
            # the others may wait for this rank's part of the call, so they must know
            self._fail(self._compared(loss, call))
        if self.failure is not None:
            work.finish(self._error(self.failure, call))
            return None
        active = ActiveCall(
            call=call,
            number=number,
            peers=self._peers(call),
            description=call.describe(),
            work=work,
            started_s=self._clock.time(),
            started_ns=self._trace.now_ns(),
            is_agreed=self._world_size == 1,
        )
        active.execution = self._open(active)
        return active

    def _check(self, call: Call) -> None:
        """Raise :class:`ConfigurationError` if ``call`` is not for these ranks, or its messages cannot be numbered."""
        num_slices = num_messages = 1
        if isinstance(call, CollectiveCall):
            self._check_ranks(call)
            num_slices, num_messages = call.num_slices, self._dataflows.facts(call.schedule).num_indices
        check_tags_fit(label=call.what, stream=call.stream, num_slices=num_slices, num_messages=num_messages)

    def _check_ranks(self, call: CollectiveCall) -> None:
        if call.schedule.num_ranks != self._world_size:
            raise ConfigurationError(
                f"{call.what}: the schedule is for {call.schedule.num_ranks} ranks but the job has "
                f"{self._world_size}; plan on the job's own topology"
            )

    def _peers(self, call: Call) -> frozenset[int]:
        """Return all ranks that this one exchanges messages with in ``call``."""
        if isinstance(call, CollectiveCall):
            return self._dataflows.facts(call.schedule).peers
        assert isinstance(call, DirectCall), f"{call.what} is of no kind that can be run"
        return call.peers

    def _open(self, active: ActiveCall) -> Execution | None:
        """Return what moves the bytes of a call, not begun yet; None if there is nothing to move."""
        call = active.call
        tag, signature = first_tag(call.stream, active.number, 0), active.description.signature
        on_over, on_mismatch = partial(self._end, active), partial(self._mismatched, active)
        if not active.peers:
            return None
        if isinstance(call, DirectCall):
            return DirectExecution(
                self._fabric, call, tag=tag, signature=signature, on_over=on_over, on_mismatch=on_mismatch
            )
        assert isinstance(call, CollectiveCall), f"{call.what} is of no kind that can be run"
        if not call.num_slices:
            return None
        self._num_sliced += 1
        sliced = SlicedCall(
            slices=self._dataflows.slices(call.schedule, call.layout),
            buffer=call.buffer,
            reduction=call.reduction,
            urgency=call.urgency,
            connection_class=call.connection_class,
            number=self._num_sliced,
            tag=tag,
            signature=signature,
            on_over=on_over,
            on_mismatch=on_mismatch,
        )
        return self._executor.open(sliced)

    def _announce(self, active: ActiveCall) -> bool:
        """Tell the next rank of a call, and hear what the one before told; return whether there is more to do."""
        key = (active.call.stream, active.number & NUMBER_MASK)
        self._calls[key] = active
        active.awaited = self._early_waits.take(key)
        if self._early_waits.is_any:  # some ranks wait in another call: see _answer_wait
            active.timer = self._clock.call_later(active.call.timeout_s * SOON, self._tell_soon, active)
        else:
            active.timer = self._clock.call_later(active.call.timeout_s / 2, self._half_time, active)
        if self._fabric.stalls.stalled:
            self._look_for_stalls()
        if self._world_size > 1:
            payload = control.encode_description(active.call.stream, active.number, active.description)
            self._fabric.send_control((self._rank + 1) % self._world_size, payload)
            self._judge(key, *self._same_calls.made(key, active.description))
        return key in self._calls

    def _end(self, active: ActiveCall) -> None:
        """End a call if nothing is left to do or to learn."""
        if not active.is_complete:
            return
        call = active.call
        key = (call.stream, active.number & NUMBER_MASK)
        del self._calls[key]
        self._same_calls.ended(key)
        if active.timer is not None:
            active.timer.cancel()
        self.num_calls[call.kind] = self.num_calls.get(call.kind, 0) + 1
        self.call_bytes[call.kind] = self.call_bytes.get(call.kind, 0) + call.num_bytes
        trace_call(self._trace, call, active.started_ns)
        active.work.finish(None)

    def _judge(self, key: CallKey, is_agreed: bool, disagreement: Disagreement | None) -> None:
        active = self._calls.get(key)
        if disagreement is not None:
            self._disagree(key, disagreement)
        elif is_agreed and active is not None:
            active.is_agreed = True
            self._end(active)

    def _disagree(self, key: CallKey, disagreement: Disagreement) -> None:
        texts = {self._rank: disagreement.ours.text, disagreement.peer: disagreement.theirs.text}
        place = f"call {key[1]} of stream {key[0]}"
        text, accused = failures.disagreement(texts, self._fabric.describe_peer, place)
        self._fail(Failure(reason=failures.MISMATCH, text=text, rank=accused[0], accused=accused))

    def _tell_waits(self, again: ActiveCall | None = None) -> None:
        """Tell everyone whom this rank waits for, so that each can name the culprit when time is over.

        In all calls of which it has not told, and ``again`` in one: who heard of a call that it has not made, and not
        of the one that both wait in, would take this rank for one that makes other calls.
        """
        for active in list(self._calls.values()):
            if active is again or not active.has_told:
                active.has_told = True
                peers = active.awaited_peers(self._predecessor)
                self._tell_all(control.encode_waiting(active.call.stream, active.number, peers, active.call.what))

    def _tell_soon(self, active: ActiveCall) -> None:
        self._tell_waits()
        active.timer = self._clock.call_later(active.call.timeout_s * (1 / 2 - SOON), self._half_time, active)

    def _half_time(self, active: ActiveCall) -> None:
        self._tell_waits(again=active)
        due_s = self._clock.time() + active.call.timeout_s / 2
        active.timer = self._clock.call_later(active.call.timeout_s / 2, self._time_over, active, due_s)

    def _time_over(self, active: ActiveCall, due_s: float) -> None:
        late_s = self._clock.time() - due_s
        if late_s > failures.LATE_S:  # the others may have sent long ago what this rank has not read yet
            text = failures.was_away(self._fabric.describe_peer(self._rank), late_s, active.call)
            self._fail(Failure(reason=failures.DEADLINE, text=text, rank=self._rank))
            return
        active.awaited[self._rank] = active.awaited_peers(self._predecessor)
        waiting = [rank for rank, awaited in active.awaited.items() if awaited]
        culprits = failures.find_culprits(active.awaited, self._rank)
        self._be_late(active.call, culprits, waiting, since_s=active.started_s)

    def _look_for_stalls(self) -> None:
        """End the calls if one has waited too long for a stalled rank; else look again when one will have.

        A rank may do something else for long before others begin to wait for it, so the waiting counts as well: a call
        is overdue once it has waited for the limit, for ranks that have been still for the limit.
        """
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        stalls = self._fabric.stalls
        waiting = [one for one in self._calls.values() if one.awaited_peers(self._predecessor) & stalls.stalled]
        first = min(waiting, key=lambda one: one.started_s, default=None)
        if first is None:
            return
        in_s = first.started_s + stalls.limit_s - self._clock.time()
        if in_s > 0:
            self._stall_timer = self._clock.call_later(in_s, self._look_for_stalls)
            return
        culprits = {peer: [self._rank] for peer in first.awaited_peers(self._predecessor) & stalls.stalled}
        self._be_late(first.call, culprits, [self._rank], since_s=first.started_s)

    def late(self, call: Call, absent: Sequence[int], present: Sequence[int], waited_s: float) -> None:
        """End all calls, as ``absent`` ranks did not come to one in which ``present`` ones wait beside the engine."""
        culprits = {rank: list(present) for rank in absent}
        self._be_late(call, culprits, present, since_s=self._clock.time() - waited_s)

    def _be_late(
        self, call: Call, culprits: Mapping[int, list[int]], waiting: Sequence[int], *, since_s: float
    ) -> None:
        """End all calls, as ``call``, in which ``waiting`` ranks wait, was not done; ``culprits`` have who waits."""
        elsewhere = {peer: self._other_calls(peer) for peer in culprits}
        if any(elsewhere.values()):  # who is odd shows by what all others do
            others = set(range(self._world_size)) - {*waiting} - culprits.keys()
            elsewhere |= {peer: self._other_calls(peer) for peer in others}
        sentences = []
        for peer, waiters in sorted(culprits.items()):
            silent_s = self._clock.time() - max(self._executor.heard_s(peer), since_s)
            names, whom = [self._numbers[waiter] for waiter in waiters], self._fabric.describe_peer(peer)
            still_s = self._fabric.stalls.still_s(peer)
            sentences.append(failures.accuse(whom, silent_s, call, names, elsewhere[peer], still_s=still_s))
        other_calls = {peer: calls[0] for peer, calls in elsewhere.items() if calls}
        odd = failures.find_odd(call.what, waiting, other_calls)
        odd_call = other_calls.get(odd[0], call.what) if odd else call.what
        whom = " and ".join(map(self._fabric.describe_peer, odd or sorted(waiting)))
        remedy = failures.SAME_ORDER if other_calls else failures.LOOK
        if name := failures.common_call(odd_call):
            remedy = ""  # the rule says what to do
            sentences = [failures.called_alone(name, whom, "; ".join(sentences))]
        elif odd and odd_call == call.what:
            sentences.insert(0, f"{whom} called {call.what}, and the others did not")
        accused = odd or sorted(culprits) or [self._rank]
        self._fail(failures.late(call, sentences, accused=accused, remedy=remedy))

    def _other_calls(self, peer: int) -> list[str]:
        """Return in what ``peer`` waits that was not called here."""
        beside = [self._beside[peer][1]] if peer in self._beside else []
        return self._early_waits.calls_of(peer) + beside

    def _compared(self, loss: Failure, call: Call) -> Failure:
        """Say of a rank that has left how far it had come, and how far this one is, which makes ``call``."""
        name, us = failures.common_call(call.what), self._fabric.describe_peer(self._rank)
        theirs, ours = self._parted.get(loss.rank), self.count()
        if theirs is None or ours is None or theirs.unit != ours.unit:
            return loss
        is_step = ours.unit in failures.SAME_COUNTS
        # a sharded step counts as made while its collectives are still under way
        is_counted = call.step is not None and call.step < ours.count
        is_next = is_step and name is None and call.stream != self.user_stream and not is_counted
        whom = self._fabric.describe_peer(loss.rank)
        text = failures.parted(whom, theirs, us, ours, is_next=is_next)
        if name is not None:
            return loss._replace(text=failures.called_alone(name, us, text), accused=(self._rank,))
        if ours.count + is_next <= theirs.count:
            return loss._replace(text=text)
        if is_step and ours.count + is_next - ours.num_idle <= theirs.count:
            idle = failures.made_idle(us, ours.num_idle)
            return loss._replace(text=f"{idle}; {text}", accused=(self._rank,), remedy=failures.SAME_STEPS)
        remedy = failures.SAME_COUNTS.get(ours.unit, failures.SAME_CALLS)
        if ours.unit == failures.STEP:  # the engine knows neither of notices nor whether the job goes on
            remedy = f"unless it was told to leave, {remedy}"
        return loss._replace(text=text, remedy=remedy)

    def _fail(self, failure: Failure, *, tell: bool = True) -> None:
        """End every call, now and later; the first failure counts."""
        if self.failure is not None:
            return
        self.failure = failure
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        if tell:
            self._tell_all(control.encode_failure(failure))
        if failure.reason != failures.CLOSED:
            self._trace.instant(f"failed: {failure.reason}", "communication", text=failure.text)
        calls = list(self._calls.values())
        self._calls.clear()
        for active in calls:
            active.stop()
            trace_call(self._trace, active.call, active.started_ns, failed=failure.reason)
        for active in calls:
            active.work.finish(self._error(failure, active.call))
        for handler in self._failure_handlers:
            handler(self._error(failure, None))

    def _error(self, failure: Failure, call: Call | None) -> SynclineError:
        error = failures.error_for(failure, call, self._numbers, host=self._host(failure.rank))
        error.__cause__ = self._cause
        return error

    def _tell_all(self, payload: bytes) -> None:
        self._fabric.tell(self._others, payload)

    def _host(self, rank: int) -> str:
        return self._topology.host_of(rank).name if self._topology is not None else ""
