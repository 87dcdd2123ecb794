"""One rank of a pair at work: does what its :class:`Phases` say, and tells them what has happened.

The training thread computes; a storage thread reads and writes; an update thread steps; messages come on the loop's
thread. Each tells the machine under one lock what it has done, and does what follows from that; nothing that is done
there waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from syncline.errors import DeadlineError, PeerLostError, UpdateError
from syncline.fabric import PeerLeftError
from syncline.updates.membership import Membership
from syncline.updates.memory import bytes_of
from syncline.updates.messaging.driver import Driver
from syncline.updates.messaging.mailbox import Mailbox, MessageStream
from syncline.updates.phased.batch_check import BatchCheck
from syncline.updates.phased.buffer_pool import BufferPool
from syncline.updates.phased.messages import Message, decode
from syncline.updates.phased.phase_work import CurrentPass, PhaseWork
from syncline.updates.phased.phases import (
    Compute,
    Drop,
    Instruction,
    Kind,
    Load,
    LoadState,
    Pass,
    Phase,
    Phases,
    Reduce,
    Send,
    Store,
    Update,
)
from syncline.updates.phased.setting import PhasedSetting
from syncline.updates.phased.stage_store import StageStore
from syncline.updates.phased.statistics import PhasedStatistics
from syncline.updates.phased.updating import StageUpdater


class PairDriver(Driver):
    """Runs passes; made and closed on the training thread, which also calls :meth:`run`."""

    def __init__(self, setting: PhasedSetting) -> None:
        super().__init__(
            setting.port,
            Membership((setting.port.rank, setting.partner)),
            timeout_s=setting.collectives.timeout_s,
            progress=setting.collectives.communicator.progress,
        )
        self._setting = setting
        self._stages = setting.stages
        self._trace = setting.collectives.trace
        self._phases = Phases(num_stages=setting.num_stages, side=setting.side, max_stages=setting.max_stages)
        self._next: Phase | None = None
        self._message: Message | None = None
        self._outgoing: Message | None = None
        self._pass: CurrentPass | None = None
        self._num_passes = self._num_steps = 0
        self._computing_s = 0.0
        self._waiting_s = {"input": 0.0, "parameters": 0.0, "update": 0.0}
        largest = max(stage.plan.num_bytes for stage in self._stages.values())
        self._buffers = BufferPool(num_buffers=setting.max_stages, num_bytes=largest)
        self._placed: dict[int, torch.Tensor] = {}
        rank = setting.port.rank
        name = f"syncline-phased-storage-{rank}"
        self._stage_store = StageStore(
            setting.storage, self._stages, trace=self._trace, name=name, on_failure=self.fail
        )
        self._updater = StageUpdater(
            setting.collectives, setting.optimizer, whole_parameters=setting.whole_parameters, on_failure=self.fail
        )
        self._work = PhaseWork(setting, self._updater)
        messages = MessageStream(setting.port, setting.stream, urgency=-1)
        self._mailbox = Mailbox(messages, messages, decode=decode, on_message=self._on_message, on_lost=self._lose)
        self._num_unsent = 0
        """Messages that are on their way, whose memory is not to be used for something else."""
        self._batches = BatchCheck(
            setting.port,
            partner=setting.partner,
            stream=setting.stream,
            on_equal=self._wake,
            on_mismatch=self.fail,
        )

    def __repr__(self) -> str:
        return f"<PairDriver with {self._partner}: {self._phases!r}>"

    def start(self) -> None:
        """Load what the first pass needs first, and listen to the partner."""
        self._port.call_soon(self._watch)
        self._listen()
        with self._changed:
            self._obey(self._phases.start())

    def run(self, kind: Pass, inputs: Any, targets: Any, *, num_samples: float) -> CurrentPass:
        """Run a pass to the end of this rank's part of it."""
        self.raise_failure()
        try:
            self._wait_sent()
            self._begin(kind, inputs, targets, num_samples)
            while (phase := self._wait_phase()) is not None:
                self._compute(phase)
        except BaseException as error:
            self.fail(error)
            raise
        done, self._pass = self._pass, None
        assert done is not None, "a pass was begun"
        return done

    def synchronize(self) -> None:
        """Wait until every update is over, and stored."""
        with self._progress.waiting():
            is_over = self._wait_for(lambda: self._phases.is_settled, self._timeout_s)
        self.raise_failure()
        if not is_over:
            raise DeadlineError(
                f"Updates of stages were not stored in {self._stage_store.storage.place} within {self._timeout_s:g} s; "
                "the disk or the network is too slow, or hangs: give syncline.init() a longer timeout"
            )

    def statistics(self) -> PhasedStatistics:
        """Return a frozen record of all counters."""
        stage_store = self._stage_store
        return PhasedStatistics(
            side=self._setting.side,
            partner=self._setting.partner,
            num_steps=self._num_steps,
            computing_s=self._computing_s,
            waiting_s=dict(self._waiting_s),
            measurement_s=stage_store.measurement_s,
            writing_s=stage_store.writing_s,
            read_bytes=stage_store.read_bytes,
            written_bytes=stage_store.written_bytes,
            sent_bytes=self._mailbox.sent_bytes.total(),
            num_loads=stage_store.num_loads,
            largest_stage_bytes=self._buffers.num_bytes,
            peak_parameter_bytes=self._buffers.ledger.peak_bytes,
            peak_gradient_bytes=self._work.buffers.ledger.peak_bytes,
            peak_state_bytes=stage_store.state_ledger.peak_bytes,
        )

    def close(self, *, is_failing: bool) -> None:
        """Release threads and memory; without ``is_failing`` everything is stored before."""
        try:
            if not is_failing:
                self.synchronize()
                self._wait_sent()
        finally:
            self._stage_store.close(is_failing=is_failing or self._failure is not None)
            self._updater.close()
            for stage in self._stages.values():
                stage.leave()
                stage.close()

    # --- the training thread -------------------------------------------------------------------------------------

    def _begin(self, kind: Pass, inputs: Any, targets: Any, num_samples: float) -> None:
        self._num_passes += 1
        self._num_steps += kind is Pass.TRAIN
        current = CurrentPass(
            kind=kind, number=self._num_passes, inputs=inputs, targets=targets, num_samples=num_samples
        )
        self._batches.begin(kind, inputs, targets)
        self._work.begin(current)
        with self._changed:
            self._pass = current
            self._obey(self._phases.begin(kind))

    def _wait_phase(self) -> Phase | None:
        """Return the next phase, once it can be computed; None if this rank's part of the pass is over."""
        start_ns = time.monotonic_ns()
        with self._progress.waiting(), self._changed:
            last = self._phases.awaited()

            def can_go_on() -> bool:
                nonlocal last
                last = self._phases.awaited() or last
                return self._can_compute() or self._phases.is_idle or self._is_left_alone()

            is_over = self._wait_for(can_go_on, self._timeout_s)
            self.raise_failure()
            if not self._can_compute() and not self._phases.is_idle:
                raise self._wait_error(is_over)
            phase, self._next = self._next, None
        if last:
            self._note_wait(last[0], start_ns)
        return phase

    def _can_compute(self) -> bool:
        """Whether a phase is to be computed; on what the partner sent, only when it was given the same batch."""
        is_first = self._next == Phase(Kind.FORWARD, 0)
        return self._next is not None and (is_first or self._batches.num_compared == self._num_passes)

    def _is_left_alone(self) -> bool:
        self._check_message()
        return self._left is not None and "input" in self._phases.awaited()

    def _check_message(self) -> None:
        """Refuse a message of another call; every call of the partner has its counterpart here."""
        message, current = self._message, self._pass
        if message is None or current is None or (message.kind, message.number) == (current.kind, self._num_passes):
            return
        raise UpdateError(
            f"Both ranks of a pair make the same calls in the same order, but {self._partner} called "
            f"{message.kind.value}() as call {message.number} and this rank {current.kind.value}() as call "
            f"{self._num_passes}"
        )

    def _wait_error(self, is_left: bool) -> Exception:
        phase, reasons = self._phases.next_phase, self._phases.awaited()
        if is_left and isinstance(self._left, PeerLeftError):
            return PeerLostError(
                f"{self._partner} closed its fleet, but the {phase} needs its part; both ranks of a pair make the same "
                "number of steps",
                rank=self._left.rank,
                host=self._left.host,
            )
        limit = f"within {self._timeout_s:g} s"
        if "input" in reasons or self._next is not None:
            return DeadlineError(f"{self._partner} sent nothing for the {phase} {limit}; it is far behind, or hangs")
        what = "read" if "parameters" in reasons else "updated and stored"
        return DeadlineError(
            f"Stage {phase and phase.stage} was not {what} {limit} ({self._stage_store.storage.place})"
        )

    def _compute(self, phase: Phase) -> None:
        assert self._pass is not None, "phases are computed within a pass"
        message = None if phase == Phase(Kind.FORWARD, 0) else self._take_message(phase)
        start_ns = time.monotonic_ns()
        self._outgoing = self._work.compute(phase, self._pass, message)
        end_ns = time.monotonic_ns()
        self._computing_s += (end_ns - start_ns) / 1e9
        self._trace.span(str(phase), "compute", start_ns, end_ns, step=self._pass.number)
        with self._changed:
            self._obey(self._phases.computed(phase, self._pass.kind))

    def _take_message(self, phase: Phase) -> Message:
        with self._changed:
            self._check_message()
            message, self._message = self._message, None
        assert message is not None, "a phase is computed once its input is there"
        assert message.phase == phase, f"the partner sent what the {message.phase} needs, not the {phase}"
        self._listen()
        return message

    def _listen(self) -> None:
        """Receive the next message: the last one was taken."""
        self._port.call_soon(self._mailbox.listen, self._setting.partner)

    def _wait_sent(self) -> None:
        """Wait until everything has left, so that no rank runs ahead of its partner without bounds."""
        with self._progress.waiting():
            is_over = self._wait_for(lambda: not self._num_unsent, self._timeout_s)
        self.raise_failure()
        if not is_over:
            raise DeadlineError(
                f"{self._partner} took nothing for {self._timeout_s:g} s: {self._num_unsent} messages to it have not "
                "left; it is far behind, or does not call step()"
            )

    def _note_wait(self, reason: str, start_ns: int) -> None:
        end_ns = time.monotonic_ns()
        seconds = (end_ns - start_ns) / 1e9
        self._waiting_s[reason] += seconds
        self._setting.note_wait(f"stage's {reason}", seconds)
        self._trace.span(f"stage's {reason}", "wait", start_ns, end_ns)

    # --- any thread ----------------------------------------------------------------------------------------------

    @property
    def _partner(self) -> str:
        return self._setting.port.describe_peer(self._setting.partner)

    def _tell(self, event: Callable[[int], list[Instruction]], stage: int) -> None:
        """Tell the machine what has happened with a stage, and do what follows from it."""
        with self._changed:
            if self._failure is None:
                self._obey(event(stage))

    def _send(self, message: Message) -> None:
        """Send what was computed, which nobody changes any more; with the lock held."""
        self._num_unsent += 1
        payloads = [bytes_of(tensor) for tensor in message.tensors if tensor is not None]
        sent = partial(self._on_sent, message, self._trace.now_ns())
        self._port.call_soon(self._mailbox.send, self._setting.partner, message.encode(), payloads, sent)

    def _on_sent(self, message: Message, start_ns: int) -> None:
        with self._changed:
            self._num_unsent -= 1
            self._changed.notify_all()
        self._trace.span(f"send for {message.phase}", "communication", start_ns, self._trace.now_ns())

    def _on_message(self, _: int, message: Message) -> None:
        with self._changed:
            self._message = message
            if self._failure is None:
                self._obey(self._phases.arrived(message.phase))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_lost(self, peer: int, error: Exception) -> None:
        has_left = isinstance(error, PeerLeftError)
        self.membership.lose(peer, error, has_left=has_left)
        if peer == self._setting.partner:
            self._batches.partner_is_lost()
        if not has_left:
            self.fail(error)
        self._wake()

    @property
    def _left(self) -> Exception | None:
        """Why the partner is not there any more, if it has left by itself."""
        loss = self.membership.losses.get(self._setting.partner)
        return loss.error if loss is not None and loss.has_left else None

    def _obey(self, instructions: list[Instruction]) -> None:
        """Do what follows from an event; with the lock held. Who waits looks again: the machine is in another state."""
        self._changed.notify_all()
        for instruction in instructions:
            match instruction:
                case Load(number) | Drop(number):
                    self._place(number, is_coming=isinstance(instruction, Load))
                case LoadState(number):
                    self._stage_store.load_state(number, partial(self._tell, self._phases.state_loaded, number))
                case Compute(phase):
                    self._next = phase
                case Send():
                    assert self._outgoing is not None, "what is sent was computed just before"
                    self._send(self._outgoing)
                case Reduce(number):
                    then = partial(self._tell, self._phases.reduced, number)
                    self._updater.reduce(self._work.gradients[number], number, then)
                case Update(number):
                    self._work.gradients[number].state = self._stage_store.take_state(number)
                    self._updater.update(self._work.gradients[number], number, partial(self._on_updated, number))
                case Store(number):
                    self._store(number)

    def _place(self, number: int, *, is_coming: bool) -> None:
        stage = self._stages[number]
        if is_coming:
            room = self._placed[number] = self._buffers.take(stage.plan.num_bytes)
            stage.place(room)
            self._stage_store.load(number, partial(self._tell, self._phases.loaded, number))
        else:
            stage.leave()
            self._buffers.give_back(self._placed.pop(number))

    def _on_updated(self, number: int) -> None:
        self._work.give_back(self._work.gradients[number])
        self._tell(self._phases.updated, number)

    def _store(self, number: int) -> None:
        gradients = self._work.gradients.pop(number)
        state = gradients.state if gradients.buckets else None
        then = partial(self._tell, self._phases.stored, number)
        self._stage_store.store(number, state, then, step=gradients.pass_number)
