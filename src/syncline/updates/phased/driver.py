"""One rank of a pair at work: does what its :class:`Phases` say, and tells them what has happened.

The training thread computes; a storage thread reads and writes; an update thread steps; messages come on the loop's
thread. Each tells the machine under one lock what it has done, and does what follows from that; nothing that is done
there waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from syncline.errors import DeadlineError, PeerLostError, SynclineError, UpdateError, accusing
from syncline.fabric import PeerLeftError
from syncline.members import Membership
from syncline.runtime.failures import LOOK
from syncline.tensors.memory import bytes_of
from syncline.updates.messaging import Driver, Mailbox, MessageStream
from syncline.updates.phased.batch_check import Found, describe_given, find_difference
from syncline.updates.phased.instructions import Compute, Instruction, Pass, Phase, Send
from syncline.updates.phased.kept_inputs import Message, decode
from syncline.updates.phased.micro_batches import MicroBatch
from syncline.updates.phased.phase_work import CurrentPass, PhasedSetting
from syncline.updates.phased.phases import Phases
from syncline.updates.phased.stage_driver import StageDriver

MAX_UNSENT = 2
"""Messages that wait to leave: a rank computes no further while its partner has no room for what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedStatistics:
    """Counters of one rank since its model was set up; times in seconds."""

    side: int
    """Which stages it computes: 0 those of even number, 1 the others."""
    partner: int
    num_steps: int
    computing_s: float
    sent_bytes: int
    """Activations and their gradients, to the partner."""
    spilled_bytes: int
    """Inputs of stages that were written to storage, because memory was to have no more than their budget."""
    num_loads: int
    gradient_norm: float | None
    """Of the last step whose norm is known, before it was clipped; None without clipping."""
    largest_stage_bytes: int
    peak_parameter_bytes: int
    """Most bytes of parameters that had memory at once."""
    peak_gradient_bytes: int
    peak_input_bytes: int
    """Most bytes of inputs that waited in memory for their phase."""
    peak_state_bytes: int
    """Most bytes of optimizer state in memory at once."""


class PairDriver(Driver):
    """Runs passes; made and closed on the training thread, which also calls :meth:`run`."""

    kinds_of_notes = (Found,)

    def __init__(self, setting: PhasedSetting) -> None:
        super().__init__(
            setting.port,
            Membership((setting.port.rank, setting.partner)),
            timeout_s=setting.collectives.timeout_s,
        )
        self._setting = setting
        self._trace = setting.collectives.trace
        self._phases = Phases(
            num_stages=setting.num_stages,
            side=setting.side,
            max_stages=setting.options.max_stages,
            input_budget_bytes=setting.options.input_budget_bytes,
            defers_updates=setting.clipping is not None,
            keeps_versions=setting.keeps_versions,
            step=setting.manifest.step if setting.manifest is not None else 0,
        )
        self._next: Phase | None = None
        self._is_listening = False
        """A receive is posted."""
        self._is_silent = False
        """The partner has left by itself, and all that it sent before has been received."""
        self._early: Message | None = None
        """What was sent for a pass that has not begun here."""
        self._outgoing: Message | None = None
        self._pass: CurrentPass | None = None
        self._num_passes = self._num_steps = 0
        self._computing_s = 0.0
        self._stage_driver = StageDriver(setting, tell=self._tell, on_failure=self.fail)
        self._storage = setting.storage
        messages = MessageStream(setting.port, setting.stream, urgency=-1, even_if_lost=True)
        self._mailbox = Mailbox(messages, messages, decode=decode, on_message=self._on_message, on_lost=self._lose)
        self._num_heard = 0
        self._num_unsent = 0
        """Messages that are on their way, whose memory is not to be used for something else."""
        self._difference: Found | None = None
        """Between the batches of the two ranks."""

    def __repr__(self) -> str:
        return f"<PairDriver with {self._partner}: {self._phases!r}>"

    @property
    def step(self) -> int:
        """How many steps were made, those before a crash included."""
        return self._phases.step

    @property
    def num_over(self) -> int:
        """How many steps are over: without the one that is under way."""
        current = self._pass
        return self.step - (current is not None and current.kind is Pass.TRAIN)

    def start(self) -> None:
        """Load what the first pass needs first, and listen to the partner."""
        self._port.call_soon(self._watch, self._setting.stream)
        self._setting.job.watch_failure(self.fail)
        with self._changed:
            self._obey(self._phases.start())

    def run(self, kind: Pass, micros: Sequence[MicroBatch], whole: tuple[Any, Any]) -> CurrentPass:
        """Run a pass to the end of this rank's part of it; ``whole`` are all its inputs, and all its targets."""
        self.raise_failure()
        try:
            self._wait_for_last()
            self._begin(kind, micros, whole)
            while (phase := self._wait_phase()) is not None:
                self._compute(phase)
        except BaseException as error:
            self.fail(error)
            if isinstance(error, PeerLostError | DeadlineError):
                self.raise_failure()  # which says, besides, where this rank was, or who was waited for in the end
            raise
        done, self._pass = self._pass, None
        assert done is not None, "a pass was begun"
        return done

    def read_parameters(self, number: int) -> dict[str, torch.Tensor]:
        """Return the parameters of a stage as they are stored; all updates are over."""
        found: list[dict[str, torch.Tensor]] = []

        def take(tensors: dict[str, torch.Tensor]) -> None:
            with self._changed:
                found.append(tensors)
                self._changed.notify_all()

        self._stage_driver.store.read_parameters(number, take)
        late = f"Stage {number} was not read within {self._timeout_s:g} s ({self._storage.place})"
        self._wait_until(lambda: bool(found), lambda: DeadlineError(late))
        return found[0]

    def synchronize(self) -> None:
        """Wait until every update is over, and stored."""
        late = (
            f"Updates of stages were not stored in {self._storage.place} within {self._timeout_s:g} s; "
            "the disk or the network is too slow, or hangs: give syncline.init() a longer timeout"
        )
        self._wait_until(lambda: self._phases.is_settled, lambda: DeadlineError(late))

    def statistics(self) -> PhasedStatistics:
        """Return a frozen record of all counters."""
        stage_store, buffers = self._stage_driver.store, self._stage_driver.buffers
        return PhasedStatistics(
            side=self._setting.side,
            partner=self._setting.partner,
            num_steps=self._num_steps,
            computing_s=self._computing_s,
            sent_bytes=self._mailbox.sent_bytes.total(),
            spilled_bytes=stage_store.spilled_bytes,
            num_loads=stage_store.num_loads,
            gradient_norm=self._stage_driver.updater.norm,
            largest_stage_bytes=buffers.num_bytes,
            peak_parameter_bytes=buffers.ledger.peak_bytes,
            peak_gradient_bytes=self._stage_driver.work.buffers.ledger.peak_bytes,
            peak_input_bytes=self._phases.inputs.peak_bytes,
            peak_state_bytes=stage_store.state_ledger.peak_bytes,
        )

    def close(self, *, is_failing: bool) -> None:
        """Release threads and memory; without ``is_failing`` everything is stored before."""
        try:
            if not is_failing:
                self.synchronize()
                self._wait_for_last()
        finally:
            self._stage_driver.close(is_failing=is_failing or self._failure is not None)

    # --- the training thread -------------------------------------------------------------------------------------

    def _begin(self, kind: Pass, micros: Sequence[MicroBatch], whole: tuple[Any, Any]) -> None:
        self._num_passes += 1
        self._num_steps += kind is Pass.TRAIN
        current = CurrentPass(
            kind=kind,
            number=self._num_passes,
            step=self._phases.step + (kind is Pass.TRAIN),
            micros=micros,
            targets=whole[1],
            given=describe_given(*whole),
            num_samples=sum(micro.num_samples for micro in micros),
        )
        self._stage_driver.work.begin(current)
        with self._changed:
            self._pass = current
            self._obey(self._phases.begin(kind, len(micros)))
            self._take_early()

    def _wait_phase(self) -> Phase | None:
        """Return the next phase, once it can be computed; None if this rank's part of the pass is over."""
        with self._changed:
            reasons = self._awaited()
        with self._progress.waiting(f"stage's {reasons[0]}" if reasons else ""), self._changed:

            def can_go_on() -> bool:
                return self._can_compute() or self._phases.is_idle or self._is_left_alone()

            is_over = self._wait_told(can_go_on)
            self.raise_failure()
            if not self._can_compute() and not self._phases.is_idle:
                raise self._wait_error(is_over)
            phase, self._next = self._next, None
        return phase

    def _wait_told(self, can_go_on: Callable[[], bool]) -> bool:
        """Wait until the deadline; from half of it on all ranks know for whom."""
        if self._wait_for(can_go_on, self._timeout_s / 2):
            return True
        job, current, waits_for = self._setting.job, self._pass, self._waits_for()
        if waits_for and current is not None:
            job.wait_beside(waits_for, f"the {self._phases.current_phase}, step {current.step}")
        is_over = self._wait_for(can_go_on, self._timeout_s / 2)
        if not is_over and self._awaited() == ["update"]:  # its sum may have begun late, and names who does not come
            is_over = self._wait_for(can_go_on, self._timeout_s)
        if waits_for and is_over and self._failure is None:  # else others are to know, who fail as well
            job.wait_beside([], "")
        return is_over

    def _waits_for(self) -> list[int]:
        """Return for whom the next phase waits: the partner, or the ranks of this side; nobody for storage."""
        if self._awaited() == ["update"] and self._next is None:
            return self._stage_driver.updater.awaited_ranks
        return [self._setting.partner] if self._awaited() in (["input"], ["sending"]) or self._next is not None else []

    def _can_compute(self) -> bool:
        return self._next is not None and self._num_unsent < MAX_UNSENT

    def _awaited(self) -> list[str]:
        is_full = self._next is not None and self._num_unsent >= MAX_UNSENT
        return ["sending"] if is_full else self._phases.awaited()

    def _is_left_alone(self) -> bool:
        self._check_message()
        return self._is_silent and "input" in self._phases.awaited()

    def _check_message(self) -> None:
        """Refuse a message of another call; every call of the partner has its counterpart here."""
        message, current = self._early, self._pass
        if message is None or current is None or message.number != current.number:
            return  # that of a later call is for later
        raise UpdateError(
            f"Both ranks of a pair make the same calls in the same order, but {self._partner} called "
            f"{message.kind.value}() as call {message.number} and this rank {current.kind.value}() as call "
            f"{self._num_passes}"
        )

    def _wait_error(self, is_left: bool) -> Exception:
        phase, reasons = self._phases.current_phase, self._phases.awaited()
        if is_left and isinstance(self._left, PeerLeftError):
            return PeerLostError(
                f"{self._partner} closed its fleet, but the {phase} needs its part; give all ranks the same number of "
                "batches, as both ranks of a pair make the same steps",
                rank=self._left.rank,
                host=self._left.host,
            )
        limit = f"within {self._timeout_s * (2 if reasons == ['update'] else 1):g} s"
        if self._num_unsent >= MAX_UNSENT:
            return self._unsent_error()
        if "input" in reasons or self._next is not None:
            return self._accuse(f"sent nothing for the {phase} {limit}; it is far behind, hangs, or made another call")
        what = "updated and stored" if reasons == ["update"] else "read"
        return DeadlineError(f"Stage {phase and phase.stage} was not {what} {limit} ({self._storage.place})")

    def _compute(self, phase: Phase) -> None:
        current = self._pass
        assert current is not None, "phases are computed within a pass"
        with self._changed:
            messages = self._stage_driver.inputs.of(phase)
        start_ns = time.monotonic_ns()
        self._outgoing = self._stage_driver.work.compute(phase, current, messages)
        end_ns = time.monotonic_ns()
        self._computing_s += (end_ns - start_ns) / 1e9
        self._trace.span(str(phase), "compute", start_ns, end_ns, step=current.number)
        if current.kind is Pass.TRAIN:
            self._stage_driver.note_generator(current.step)
        with self._changed:
            self._obey(self._phases.computed(phase))

    def _wait_for_last(self) -> None:
        """Wait until everything has left, so that no rank runs ahead of its partner without bounds."""
        self._wait_until(lambda: not self._num_unsent and self._phases.inputs.is_empty, self._unsent_error)

    def _wait_until(self, is_over: Callable[[], bool], late: Callable[[], Exception]) -> None:
        with self._progress.waiting():
            has_come = self._wait_for(is_over, self._timeout_s)
        self.raise_failure()
        if not has_come:
            raise late()

    def _accuse(self, what: str) -> DeadlineError:
        return accusing(DeadlineError(f"{self._partner} {what}; {LOOK}"), self._setting.partner)

    def _unsent_error(self) -> DeadlineError:
        if not self._num_unsent:
            return DeadlineError(f"Spilled inputs were not written in {self._storage.place} in time; the disk hangs")
        return self._accuse(
            f"took nothing for {self._timeout_s:g} s: {self._num_unsent} messages to it have not left; it is far "
            "behind, or does not call step()"
        )

    # --- any thread ----------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End everything with ``error``, on all ranks if it names ranks at fault.

        That of a lost rank says in which step and stage this one was.
        """
        with self._changed:
            if self._failure is None:
                error = self._traced(error)
                if isinstance(error, SynclineError) and error.ranks_at_fault:
                    self._setting.job.give_up(error)
                if isinstance(error, PeerLostError):
                    error = with_place(error, self._port.rank, self._pass, self._phases)
            super().fail(error)

    def _traced(self, error: BaseException) -> BaseException:
        """Blame whom the one that ``error`` blames waits for itself, beside the collectives."""
        if not isinstance(error, DeadlineError) or not error.ranks_at_fault:
            return error
        found = self._setting.job.find_beside(error.ranks_at_fault[0])
        if found is None:
            return error
        culprit, waiter, what = found
        name, other = map(self._port.describe_peer, (culprit, waiter))
        text = f"{name} sent nothing for {what}; {other} waits for it. Therefore {error}"
        return accusing(DeadlineError(text), culprit)

    @property
    def _name(self) -> str:
        return self._port.describe_peer(self._port.rank)

    @property
    def _partner(self) -> str:
        return self._port.describe_peer(self._setting.partner)

    def _tell(self, instruction: Instruction) -> None:
        """Tell the machine what is done, and do what follows from it."""
        with self._changed:
            if self._failure is None:
                self._obey(self._phases.done(instruction))

    def _send(self, message: Message) -> None:
        """Send what was computed, which nobody changes any more; with the lock held."""
        self._num_unsent += 1
        payloads = [bytes_of(tensor) for tensor in message.payload if tensor is not None]
        sent = partial(self._on_sent, message, self._trace.now_ns())
        self._port.call_soon(self._mailbox.send, self._setting.partner, message.encode(), payloads, sent)

    def _on_sent(self, message: Message, start_ns: int) -> None:
        with self._changed:
            self._num_unsent -= 1
            self._changed.notify_all()
        self._trace.span(f"send for {message.phase}", "communication", start_ns, self._trace.now_ns())

    def _on_message(self, _: int, message: Message) -> None:
        with self._changed:
            self._is_listening = False
            self._num_heard += 1
            self._early = message
            if self._failure is None:
                self._take_early()
            self._changed.notify_all()

    def _take_early(self) -> None:
        """Take what was sent, if it is for the pass that is under way; with the lock held."""
        message, current = self._early, self._pass
        if message is None or current is None:
            return
        if (message.kind, message.number) == (current.kind, current.number):
            self._early = None
            if message.given and self._finds_difference(message, current):
                return
            self._stage_driver.inputs.add(message)
            self._obey(self._phases.arrived(message.phase, message.num_bytes))

    def _finds_difference(self, message: Message, current: CurrentPass) -> bool:
        """Compare the batch that the partner was given with the own one; with the lock held."""
        call = f"call {current.number} of {current.kind.value}()"
        text = find_difference((self._partner, message.given), (self._name, current.given), call)
        if text is not None:
            self._difference = Found(text=text)
            self._port.call_soon(self._tell_difference)
        return text is not None

    def _listen(self) -> None:
        """Receive the next message, if there is room for it, and it is of the same batch; with the lock held."""
        is_wanted = self._early is None and self._difference is None and self._phases.inputs.has_room
        if is_wanted and not self._is_listening:
            self._is_listening, self._is_silent = True, False
            self._port.call_soon(self._receive)

    def _receive(self) -> None:
        """Let the partner's next message come; on the loop's thread."""
        self._mailbox.listen(self._setting.partner)
        if self._left is not None:
            self._hear_out()

    def _hear_out(self) -> None:
        self._port.hear_out(lambda: self._num_heard, self._on_silence)

    def _on_silence(self) -> None:
        with self._changed:
            self._is_silent = self._is_listening
            self._changed.notify_all()

    def _tell_difference(self) -> None:
        """Let the partner know, and wait until it does: both raise the error before either closes its connections."""
        assert self._difference is not None, "it was found"
        self._send_note(self._setting.partner, self._difference)
        if self._port.is_lost(self._setting.partner):
            self.fail(UpdateError(self._difference.text))

    def _on_note(self, _: int, note: Found) -> None:
        if self._difference is None:
            self._difference = note
            self._send_note(self._setting.partner, note)
        self.fail(UpdateError(note.text))

    def _on_lost(self, peer: int, error: Exception) -> None:
        has_left = isinstance(error, PeerLeftError)
        self.membership.lose(peer, error, has_left=has_left)
        if peer == self._setting.partner and self._difference is not None:
            self.fail(UpdateError(self._difference.text))
        if not has_left:
            self.fail(error)
        elif peer == self._setting.partner:
            self._hear_out()

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
                case Compute(phase):
                    self._next = phase
                case Send():
                    assert self._outgoing is not None, "what is sent was computed just before"
                    self._send(self._outgoing)
                case _:
                    self._stage_driver.obey(instruction)
        self._listen()


def with_place(error: PeerLostError, rank: int, current: CurrentPass | None, phases: Phases) -> PeerLostError:
    """Return the same error, which says besides where ``rank`` was in training.

    ``current``: the pass that is under way there, if any is. Steps are counted as the trainer counts them, those before
    a restart included.
    """
    place = f"after step {phases.step}"
    if current is not None:
        call = f"step {current.step}" if current.kind is Pass.TRAIN else f"evaluate() after step {phases.step}"
        phase = phases.current_phase
        place = f"in {call}, at the {phase}" if phase is not None else f"at the end of {call}"
    return PeerLostError(f"{error}; rank {rank} was {place}", rank=error.rank, host=error.host)
