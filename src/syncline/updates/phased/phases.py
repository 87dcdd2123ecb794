"""The order of phases at one rank of a pair, as a state machine: what has happened in, what is to be done next out.

The stages of even number are computed on side 0, the others on side 1. A stage is visited once on the way forward and
once on the way back, and in each visit all micro-batches of the pass go through it. A training pass is, at each rank
for the stages that are its own,

    FORWARD 0, 1 ... S-2    the input of each micro-batch is kept, and nothing else
    LOSS S-1                forward, loss and backward of the last stage
    BACKWARD S-2 ... 0      forward again from the kept input, then backward; the gradients of micro-batches add up

What one rank computes goes to the other at once. So with one micro-batch the ranks take turns, and with several both
compute at the same time, each on another stage. Beside that a rank reduces and updates the stage that it computed last,
stores and drops it, and loads the next one. Rules:

* At most ``max_stages`` stages have memory. The stages that this rank computes next, those of the next pass included,
  are the wanted ones; what is not wanted is dropped once it is stored, and its place is loaded with what is.
* A stage is computed when it is loaded, its last update is over, and its input is in memory.
* A stage is updated when its gradients are reduced, its state is loaded, and its memory is not being stored.
* With ``defers_updates`` no stage is updated before the gradients of all are reduced on all ranks and their norm is
  known. Until then its gradients are stored. It is updated when it is wanted, so at the latest in the next pass, and
  after the stages before it.
* With ``keeps_versions`` what a step has made of a stage is stored once all ranks have stored the step before whole.

Every method takes note of one event and returns the instructions that follow from it, in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from syncline.updates.phased.instructions import (
    Commit,
    Compute,
    Drop,
    Fetch,
    Instruction,
    Kind,
    Load,
    LoadGradients,
    LoadState,
    Pass,
    Phase,
    Reduce,
    Send,
    Spill,
    StageInstruction,
    Store,
    StoreGradients,
    SumNorm,
    Update,
)
from syncline.updates.phased.kept_inputs import KeptInputs


@dataclass(slots=True)
class _Held:
    """A stage that has memory, and what is under way with it."""

    is_loaded: bool = False
    is_computed_on: bool = False
    is_waiting_for_update: bool = False
    is_reduced: bool = False
    has_state: bool = False
    is_updated: bool = False
    """An update is under way."""
    is_waiting_for_store: bool = False
    is_stored: bool = False
    """Its store is under way."""
    step: int = 0
    """Of the last update."""

    @property
    def is_final(self) -> bool:
        """Whether its parameters are those of its last update."""
        return self.is_loaded and not self.is_waiting_for_update and not self.is_updated

    @property
    def is_unsaved(self) -> bool:
        """Whether its file says something else than its memory, or is being written."""
        return self.is_waiting_for_store or self.is_stored

    @property
    def can_be_dropped(self) -> bool:
        """Whether its file says the same as its memory, and nobody reads that."""
        return self.is_final and not self.is_computed_on and not self.is_unsaved

    @property
    def can_be_updated(self) -> bool:
        """Whether everything that an update needs of this rank is there."""
        return self.is_waiting_for_update and self.is_reduced and self.has_state and not self.is_unsaved


class Phases:
    """The phases of one rank, pass after pass. ``step``: how many steps were made before."""

    def __init__(
        self,
        *,
        num_stages: int,
        side: int,
        max_stages: int = 2,
        input_budget_bytes: int | None = None,
        defers_updates: bool = False,
        keeps_versions: bool = False,
        step: int = 0,
    ) -> None:
        self.num_stages, self.side, self.max_stages = num_stages, side, max_stages
        self.inputs = KeptInputs(input_budget_bytes)
        self.step = step
        """Training passes that were begun."""
        self._defers_updates, self._keeps_versions = defers_updates, keeps_versions
        self.own_stages = tuple(range(side, num_stages, 2))
        """The stages that are computed here."""
        self._queue: deque[Phase] = deque()
        self._kind = Pass.TRAIN
        self._num_micros = 1
        self._computing: Phase | None = None
        self.held: dict[int, _Held] = {}
        """The stages that have memory now."""
        self._deferred: dict[int, int] = {}
        """Stages whose gradients are stored until they are updated, and the step of that."""
        self._num_reduced = self._num_stored = self._num_begun = 0
        """Of the own stages: reduced, stored, and deferred updates that were begun; each 0 again once it was all."""
        self._is_norm_known = False
        self._committed = step

    def __repr__(self) -> str:
        doing = f"computes {self._computing}" if self._computing else f"waits for {self.awaited() or 'nothing'}"
        return f"<Phases of side {self.side}: {doing}; holds stages {sorted(self.held)}>"

    @property
    def is_idle(self) -> bool:
        """Whether everything of the passes that were begun has been computed here; updates may be under way."""
        return self._computing is None and not self._queue

    @property
    def is_settled(self) -> bool:
        """Whether, besides, every update is over and stored, and on all ranks where versions are kept."""
        busy = (held.is_waiting_for_update or held.is_updated or held.is_unsaved for held in self.held.values())
        is_committed = self._committed == self.step or not self._keeps_versions
        return self.is_idle and not self._deferred and not any(busy) and is_committed

    def awaited(self) -> list[str]:
        """Say what the next phase waits for, in words that follow "waits for"."""
        if self._computing is not None or not self._queue:
            return []
        phase = self._queue[0]
        held = self.held.get(phase.stage)
        reasons = []
        if not self.inputs.has_arrived(phase):
            reasons.append("input")
        elif not self.inputs.is_ready(phase):
            reasons.append("spilled input")
        if held is None or not held.is_loaded:
            reasons.append("parameters")
        elif not self._is_up_to_date(phase, held):
            reasons.append("update")
        return reasons

    @property
    def current_phase(self) -> Phase | None:
        """The phase that is computed now, or else the next one."""
        return self._computing or (self._queue[0] if self._queue else None)

    def start(self) -> list[Instruction]:
        """Load what the first pass needs first."""
        return self._go_on()

    def begin(self, kind: Pass, num_micros: int = 1) -> list[Instruction]:
        """Begin a pass; the one before is over."""
        assert self.is_idle, "passes follow each other"
        assert self.inputs.is_empty, "what was sent for a pass is used in it"
        self._kind, self._num_micros = kind, num_micros
        last = self.num_stages - 1
        visits = [(Kind.FORWARD, stage) for stage in self.own_stages if kind is Pass.EVALUATE or stage != last]
        if kind is Pass.TRAIN:
            self.step += 1
            visits += [(Kind.LOSS, last)] if last in self.own_stages else []
            visits += [(Kind.BACKWARD, stage) for stage in reversed(self.own_stages) if stage != last]
        self._queue.extend(Phase(what, stage, micro) for what, stage in visits for micro in range(num_micros))
        return self._go_on()

    def arrived(self, phase: Phase, num_bytes: int = 0) -> list[Instruction]:
        """Take note that the partner has sent what ``phase``, of the pass that is under way, needs."""
        self.inputs.arrived(phase, num_bytes)
        return self._go_on()

    def computed(self, phase: Phase) -> list[Instruction]:
        """Take note that ``phase`` is computed."""
        assert phase == self._computing, f"{phase} was not asked for"
        self._computing = None
        held = self.held[phase.stage]
        held.is_computed_on = False
        is_forward = phase.kind is Kind.FORWARD
        following = _after(phase, self._kind, self.num_stages)
        instructions: list[Instruction] = [Send(following)] if following is not None else []
        instructions += self.inputs.used(phase, keeps_input=is_forward and self._kind is Pass.TRAIN)
        if not is_forward and phase.micro == self._num_micros - 1:
            held.is_waiting_for_update, held.step = True, self.step
            instructions.append(Reduce(phase.stage))
        return instructions + self._go_on()

    def done(self, instruction: Instruction) -> list[Instruction]:
        """Take note that what was to be done is done, as far as it takes time; of a phase :meth:`computed` does."""
        following: list[Instruction] = []
        match instruction:
            case Spill(name):
                following = self.inputs.spilled(name)
            case Fetch(name):
                self.inputs.fetched(name)
            case SumNorm():
                self._is_norm_known = True
            case Commit(step):  # on all ranks
                self._committed = step
            case StageInstruction(stage):
                following = self._done_with_stage(instruction, self.held[stage])
        return following + self._go_on()

    def _done_with_stage(self, instruction: StageInstruction, held: _Held) -> list[Instruction]:
        match instruction:
            case Load():
                held.is_loaded = True
            case LoadState():
                held.has_state = True
            case Reduce(stage) if self._defers_updates:
                self._num_reduced = (self._num_reduced + 1) % len(self.own_stages)
                self._is_norm_known = False  # the updates of the step before are over: they were computed with
                return [StoreGradients(stage), *([] if self._num_reduced else [SumNorm()])]
            case Reduce() | LoadGradients():
                held.is_reduced = True
            case StoreGradients(stage):
                held.is_waiting_for_update = False
                self._deferred[stage] = held.step
            case Update():
                held.is_updated = held.is_reduced = held.has_state = False
                held.is_waiting_for_store = True
            case Store():
                held.is_stored = False
                self._num_stored = (self._num_stored + 1) % len(self.own_stages)
                return [Commit(self._committed + 1)] if self._keeps_versions and not self._num_stored else []
        return []

    def wanted(self) -> list[int]:
        """Return the stages that are computed on next here, in this order, as many as may have memory."""
        distinct: dict[int, None] = {}
        for stage in self._coming_stages():
            distinct[stage] = None
            if len(distinct) == self.max_stages:
                break
        return list(distinct)

    def _coming_stages(self) -> list[int]:
        upcoming = [phase.stage for phase in self._upcoming()]
        return [*upcoming, *sorted(self._deferred), *self.own_stages]  # another pass begins with the first stages

    def _upcoming(self) -> list[Phase]:
        return [*([self._computing] if self._computing is not None else []), *self._queue]

    def _go_on(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        for stage, held in self.held.items():
            if held.can_be_updated and (self._is_norm_known or not self._defers_updates):
                held.is_waiting_for_update = False
                held.is_updated = True
                instructions.append(Update(stage))
            if held.is_waiting_for_store and (held.step <= self._committed + 1 or not self._keeps_versions):
                held.is_waiting_for_store = False
                held.is_stored = True
                instructions.append(Store(stage))
        instructions += self._compute() + self._make_room() + self._begin_deferred()
        return instructions + self.inputs.go_on(self._upcoming())

    def _compute(self) -> list[Instruction]:
        if self._computing is not None or not self._queue:
            return []
        phase = self._queue[0]
        held = self.held.get(phase.stage)
        if held is None or not self._is_up_to_date(phase, held) or not self.inputs.is_ready(phase):
            return []
        self._computing = self._queue.popleft()
        held.is_computed_on = True
        if phase.kind is Kind.FORWARD or phase.micro or self._defers_updates:
            return [Compute(phase)]
        return [LoadState(phase.stage), Compute(phase)]

    def _is_up_to_date(self, phase: Phase, held: _Held) -> bool:
        """Whether the last update is over; before the way back to the next one, its store has begun."""
        is_taken = phase.kind is Kind.FORWARD or not held.is_waiting_for_store
        return held.is_final and phase.stage not in self._deferred and is_taken

    def _make_room(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        wanted = self.wanted()
        for stage in wanted:
            if stage in self.held:
                continue
            if len(self.held) == self.max_stages:
                idle = next((old for old, held in self.held.items() if old not in wanted and held.can_be_dropped), None)
                if idle is None:
                    break
                del self.held[idle]
                instructions.append(Drop(idle))
            self.held[stage] = _Held()
            instructions.append(Load(stage))
        return instructions

    def _begin_deferred(self) -> list[Instruction]:
        """Read what the deferred updates of wanted stages need, in forward order on all ranks of this side.

        They make each update together: in any other order, each could fill its places with what another has no place
        for.
        """
        instructions: list[Instruction] = []
        for stage in sorted(self.wanted()) if self._deferred else ():
            held = self.held.get(stage)
            is_next = stage in self._deferred and stage == self.own_stages[self._num_begun]
            if is_next and held is not None and held.can_be_dropped:
                self._num_begun = (self._num_begun + 1) % len(self.own_stages)
                held.is_waiting_for_update, held.step = True, self._deferred.pop(stage)
                instructions += [LoadState(stage), LoadGradients(stage)]
        return instructions


def _after(phase: Phase, kind: Pass, num_stages: int) -> Phase | None:
    """Return the phase that needs what ``phase`` has computed; None if nobody does."""
    if phase.kind is not Kind.FORWARD:
        return Phase(Kind.BACKWARD, phase.stage - 1, phase.micro) if phase.stage else None
    if phase.stage == num_stages - 1:
        return None
    is_loss = kind is Pass.TRAIN and phase.stage == num_stages - 2
    return Phase(Kind.LOSS if is_loss else Kind.FORWARD, phase.stage + 1, phase.micro)
