"""The order of phases at one rank of a pair, as a state machine: what has happened in, what is to be done next out.

The stages of even number are computed on side 0, the others on side 1. A training pass is

    FORWARD 0, 1 ... S-2    the input of each is kept by the rank that computes it, and nothing else
    LOSS S-1                forward, loss and backward of the last stage
    BACKWARD S-2 ... 0      forward again from the kept input, then backward

so that the ranks take turns, and what one computes goes to the other. In its partner's turn, and in its own too where
that is too short, a rank reduces and updates the stage that it computed last, stores and drops it, and loads the next
one. Rules:

* At most ``max_stages`` stages have memory. The stages that this rank computes next, those of the next pass included,
  are the wanted ones; what is not wanted is dropped once it is stored, and its place is loaded with what is.
* A stage is computed when it is loaded, its last update is over, and its input has arrived.
* A stage is updated when its gradients are reduced, its state is loaded, and its memory is not being stored.

Every method takes note of one event and returns the instructions that follow from it, in order.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is done with a stage in a phase."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


class Pass(Enum):
    """What all phases together do: a training step, or a forward pass alone."""

    TRAIN = "step"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True)
class Phase:
    """One stage's work in a pass."""

    kind: Kind
    stage: int

    def __str__(self) -> str:
        return f"{self.kind.value} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Load:
    """Give ``stage`` memory, and read its parameters into it."""

    stage: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Take the memory of ``stage`` away."""

    stage: int


@dataclass(frozen=True, slots=True)
class LoadState:
    """Read this rank's optimizer state of ``stage``."""

    stage: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute ``phase``; one at a time."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Send:
    """Send what was computed to the partner, which needs it for ``phase``."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce-scatter the gradients of ``stage`` among the ranks of this side."""

    stage: int


@dataclass(frozen=True, slots=True)
class Update:
    """Step this rank's shard of ``stage``, and gather the others'."""

    stage: int


@dataclass(frozen=True, slots=True)
class Store:
    """Write parameters and state of ``stage``."""

    stage: int


Instruction = Load | Drop | LoadState | Compute | Send | Reduce | Update | Store


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
    is_stored: bool = False
    """Its store is under way."""

    @property
    def is_final(self) -> bool:
        """Whether its parameters are those that the next phase computes with."""
        return self.is_loaded and not self.is_waiting_for_update and not self.is_updated

    @property
    def can_be_dropped(self) -> bool:
        """Whether its file says the same as its memory, and nobody reads that."""
        return self.is_final and not self.is_computed_on and not self.is_stored

    @property
    def can_be_updated(self) -> bool:
        """Whether everything that an update needs is there."""
        return self.is_waiting_for_update and self.is_reduced and self.has_state and not self.is_stored


class Phases:
    """The phases of one rank, pass after pass."""

    def __init__(self, *, num_stages: int, side: int, max_stages: int = 2) -> None:
        self.num_stages, self.side, self.max_stages = num_stages, side, max_stages
        self._own = tuple(range(side, num_stages, 2))
        self._queue: deque[Phase] = deque()
        self._computing: Phase | None = None
        self._held: dict[int, _Held] = {}
        self._arrived: Counter[Phase] = Counter()

    def __repr__(self) -> str:
        doing = f"computes {self._computing}" if self._computing else f"waits for {self.awaited() or 'nothing'}"
        return f"<Phases of side {self.side}: {doing}; holds stages {sorted(self._held)}>"

    @property
    def own_stages(self) -> tuple[int, ...]:
        """The stages that are computed here."""
        return self._own

    @property
    def is_idle(self) -> bool:
        """Whether everything of the passes that were begun has been computed here; updates may be under way."""
        return self._computing is None and not self._queue

    @property
    def is_settled(self) -> bool:
        """Whether, besides, every update is over and stored."""
        busy = (held.is_waiting_for_update or held.is_updated or held.is_stored for held in self._held.values())
        return self.is_idle and not any(busy)

    @property
    def held_stages(self) -> tuple[int, ...]:
        """The stages that have memory now."""
        return tuple(sorted(self._held))

    def awaited(self) -> list[str]:
        """Say what the next phase waits for, in words that follow "waits for"."""
        if self._computing is not None or not self._queue:
            return []
        phase = self._queue[0]
        held = self._held.get(phase.stage)
        reasons = []
        if not self._has_input(phase):
            reasons.append("input")
        if held is None or not held.is_loaded:
            reasons.append("parameters")
        elif not held.is_final:
            reasons.append("update")
        return reasons

    @property
    def next_phase(self) -> Phase | None:
        """The phase that is computed next."""
        return self._queue[0] if self._queue else None

    def start(self) -> list[Instruction]:
        """Load what the first pass needs first."""
        return self._go_on()

    def begin(self, kind: Pass) -> list[Instruction]:
        """Begin a pass; the one before is over."""
        assert self.is_idle, "passes follow each other"
        last = self.num_stages - 1
        if kind is Pass.EVALUATE:
            self._queue.extend(Phase(Kind.FORWARD, stage) for stage in self._own)
        else:
            forward = [Phase(Kind.FORWARD, stage) for stage in self._own if stage != last]
            loss_phase = [Phase(Kind.LOSS, last)] if last in self._own else []
            backward = [Phase(Kind.BACKWARD, stage) for stage in reversed(self._own) if stage != last]
            self._queue.extend(forward + loss_phase + backward)
        return self._go_on()

    def loaded(self, stage: int) -> list[Instruction]:
        """Take note that the parameters of ``stage`` are in memory."""
        self._held[stage].is_loaded = True
        return self._go_on()

    def arrived(self, phase: Phase) -> list[Instruction]:
        """Take note that the partner has sent what ``phase`` needs, perhaps before the pass was begun here."""
        self._arrived[phase] += 1
        return self._go_on()

    def computed(self, phase: Phase, kind: Pass) -> list[Instruction]:
        """Take note that ``phase`` is computed."""
        assert phase == self._computing, f"{phase} was not asked for"
        self._computing = None
        held = self._held[phase.stage]
        held.is_computed_on = False
        following = _after(phase, kind, self.num_stages)
        instructions: list[Instruction] = [Send(following)] if following is not None else []
        if phase.kind is not Kind.FORWARD:
            held.is_waiting_for_update = True
            instructions.append(Reduce(phase.stage))
        return instructions + self._go_on()

    def reduced(self, stage: int) -> list[Instruction]:
        """Take note that this rank's shard of the gradients of ``stage`` is complete."""
        self._held[stage].is_reduced = True
        return self._go_on()

    def state_loaded(self, stage: int) -> list[Instruction]:
        """Take note that the state of ``stage`` is in memory."""
        self._held[stage].has_state = True
        return self._go_on()

    def updated(self, stage: int) -> list[Instruction]:
        """Take note that the new parameters of ``stage`` are complete."""
        held = self._held[stage]
        held.is_updated = held.is_reduced = held.has_state = False
        held.is_stored = True
        return [Store(stage), *self._go_on()]

    def stored(self, stage: int) -> list[Instruction]:
        """Take note that parameters and state of ``stage`` are in their files."""
        self._held[stage].is_stored = False
        return self._go_on()

    def wanted(self) -> list[int]:
        """Return the stages that are computed on next here, in this order, as many as may have memory."""
        ahead = [self._computing] if self._computing is not None else []
        stages = [phase.stage for phase in (*ahead, *self._queue)]
        distinct = dict.fromkeys([*stages, *self._own])  # another pass begins with the first stages
        return list(distinct)[: self.max_stages]

    def _has_input(self, phase: Phase) -> bool:
        return phase == Phase(Kind.FORWARD, 0) or self._arrived[phase] > 0

    def _go_on(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        for stage, held in self._held.items():
            if held.can_be_updated:
                held.is_waiting_for_update = False
                held.is_updated = True
                instructions.append(Update(stage))
        return instructions + self._compute() + self._make_room()

    def _compute(self) -> list[Instruction]:
        if self._computing is not None or not self._queue:
            return []
        phase = self._queue[0]
        held = self._held.get(phase.stage)
        if held is None or not held.is_final or not self._has_input(phase):
            return []
        self._computing = self._queue.popleft()
        self._arrived[phase] -= 1
        held.is_computed_on = True
        if phase.kind is Kind.FORWARD:
            return [Compute(phase)]
        return [LoadState(phase.stage), Compute(phase)]

    def _make_room(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        wanted = self.wanted()
        for stage in wanted:
            if stage in self._held:
                continue
            if len(self._held) == self.max_stages:
                idle = next(
                    (old for old, held in self._held.items() if old not in wanted and held.can_be_dropped), None
                )
                if idle is None:
                    break
                del self._held[idle]
                instructions.append(Drop(idle))
            self._held[stage] = _Held()
            instructions.append(Load(stage))
        return instructions


def _after(phase: Phase, kind: Pass, num_stages: int) -> Phase | None:
    """Return the phase that needs what ``phase`` has computed; None if nobody does."""
    if phase.kind is not Kind.FORWARD:
        return Phase(Kind.BACKWARD, phase.stage - 1) if phase.stage else None
    if phase.stage == num_stages - 1:
        return None
    is_loss = kind is Pass.TRAIN and phase.stage == num_stages - 2
    return Phase(Kind.LOSS if is_loss else Kind.FORWARD, phase.stage + 1)
