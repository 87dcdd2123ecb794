"""Two ranks of a pair on a virtual clock: the state machines, a disk and a wire each, and nothing else."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from syncline.updates.phased.instructions import (
    Commit,
    Compute,
    Drop,
    Fetch,
    Forget,
    Instruction,
    Kind,
    Load,
    LoadGradients,
    LoadState,
    Pass,
    Phase,
    Reduce,
    Remove,
    Send,
    Spill,
    Store,
    StoreGradients,
    SumNorm,
    Update,
)
from syncline.updates.phased.phases import Phases


@dataclass(kw_only=True)
class Costs:
    """Seconds that things take; each may be a function of the stage."""

    forward: Any = 1.0
    backward: Any = 1.0
    load: Any = 1.0
    state: Any = 0.0
    store: Any = 0.0
    reduce: Any = 0.0
    update: Any = 0.0
    send: Any = 0.0
    gradients: Any = 0.0
    spill: Any = 0.0
    commit: Any = 0.0

    def of(self, name: str, stage: int) -> float:
        cost = getattr(self, name)
        return cost(stage) if callable(cost) else cost


MAX_UNSENT = 2


@dataclass
class Side:
    """One rank."""

    phases: Phases
    passes: list[Pass]
    pair: int = 0
    disk_free_s: float = 0.0
    wire_free_s: float = 0.0
    """Messages come in the order in which they were sent."""
    computing_s: float = 0.0
    num_passes: int = 0
    sent: list[tuple[int, Phase]] = field(default_factory=list)
    """What the partner has sent and this rank has not taken yet, with the number of its pass."""
    waiting: Phase | None = None
    """What could be computed if the partner took what it was sent."""
    done: list[Instruction] = field(default_factory=list)
    most_held: int = 0


class PairClock:
    """Runs passes to their end; ``time_s`` is when everything was computed, ``settled_s`` when all was stored."""

    def __init__(
        self,
        num_stages: int,
        costs: Costs,
        passes: list[Pass],
        *,
        num_micros: int = 1,
        num_pairs: int = 1,
        size: Any = None,
        **options: Any,
    ) -> None:
        self.costs, self.num_micros = costs, num_micros
        self.size = size or (lambda stage: 1)
        self.now_s = self.time_s = self.settled_s = 0.0
        self.computed: list[Phase] = []
        self._events: list[Any] = []
        self._order = itertools.count()
        self._agreed: Counter[str] = Counter()
        self.sides = [
            Side(Phases(num_stages=num_stages, side=side, **options), list(passes), pair=pair)
            for pair in range(num_pairs)
            for side in range(2)
        ]

    def run(self) -> PairClock:
        for side in self.sides:
            self._obey(side, side.phases.start())
        while self._events:
            self.now_s, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        self.settled_s = self.now_s
        for side in self.sides:
            assert side.phases.is_settled, f"stuck at {self.now_s}: {side.phases!r}"
            assert side.phases.inputs.is_empty
            assert not side.passes
        return self

    def _later(self, seconds: float, call: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), call, arguments))

    def _on_disk(self, side: Side, cost: str, one: Instruction, stage: int) -> None:
        seconds = self.costs.of(cost, stage) * (1 + side.pair)  # later pairs are slower
        side.disk_free_s = max(side.disk_free_s, self.now_s) + seconds
        self._later(side.disk_free_s - self.now_s, self._happened, side, one)

    def _happened(self, side: Side, one: Instruction) -> None:
        self._obey(side, side.phases.done(one))

    def _agree(self, what: str, ranks: list[Side], seconds: float, one: Instruction) -> None:
        """Tell all of ``ranks`` once all of them have come."""
        self._agreed[what] += 1
        for side in ranks if self._agreed[what] == len(ranks) else ():
            self._later(seconds, self._happened, side, one)

    def _update(self, side: Side, one: Reduce | Update) -> None:
        """Make a collective of the ranks that hold the same stages."""
        ranks = [other for other in self.sides if other.phases.side == side.phases.side]
        what = f"{one} of {side.phases.side}, {side.done.count(one)}"
        self._agree(what, ranks, self.costs.of("reduce" if isinstance(one, Reduce) else "update", one.stage), one)

    def _computed(self, side: Side, phase: Phase) -> None:
        self.time_s = self.now_s
        self.computed.append(phase)
        self._obey(side, side.phases.computed(phase))

    def _sent(self, target: Side, number: int, phase: Phase) -> None:
        target.sent.append((number, phase))
        self._go_on()

    def _go_on(self) -> None:
        for side in self.sides:
            if side.phases.is_idle and side.phases.inputs.is_empty and side.passes:
                side.num_passes += 1
                self._obey(side, side.phases.begin(side.passes.pop(0), self.num_micros))
            if side.sent and side.sent[0][0] == side.num_passes and side.phases.inputs.has_room:
                _, phase = side.sent.pop(0)
                self._obey(side, side.phases.arrived(phase, self.size(phase.stage)))
            other = self._partner(side)
            if side.waiting is not None and len(other.sent) < MAX_UNSENT:
                phase, side.waiting = side.waiting, None
                seconds = self._seconds(phase)
                side.computing_s += seconds
                self._later(seconds, self._computed, side, phase)

    def _obey(self, side: Side, instructions: list[Instruction]) -> None:
        side.most_held = max(side.most_held, len(side.phases.held))
        for one in instructions:
            side.done.append(one)
            self._begin(side, one) if isinstance(one, Spill | Fetch | Forget | Remove) else self._do(side, one)
        self._go_on()

    def _begin(self, side: Side, one: Instruction) -> None:
        match one:
            case Spill(name) | Fetch(name):
                self._on_disk(side, "spill", one, name.stage)

    def _do(self, side: Side, one: Instruction) -> None:  # noqa: C901 - one line for each
        other = self._partner(side)
        match one:
            case Load(stage):
                self._on_disk(side, "load", one, stage)
            case LoadState(stage):
                self._on_disk(side, "state", one, stage)
            case Store(stage):
                self._on_disk(side, "store", one, stage)
            case StoreGradients(stage) | LoadGradients(stage):
                self._on_disk(side, "gradients", one, stage)
            case Reduce() | Update():
                self._update(side, one)
            case SumNorm():
                number = sum(isinstance(earlier, SumNorm) for earlier in side.done)
                self._agree(f"norm {number}", self.sides, self.costs.of("reduce", 0), one)
            case Commit(step):
                self._agree(f"step {step}", self.sides, self.costs.of("commit", 0), one)
            case Send(phase):
                side.wire_free_s = max(side.wire_free_s, self.now_s + self.costs.of("send", phase.stage))
                self._later(side.wire_free_s - self.now_s, self._sent, other, side.num_passes, phase)
            case Compute(phase):
                side.waiting = phase
            case Drop():
                pass

    def _partner(self, side: Side) -> Side:
        return self.sides[2 * side.pair + 1 - side.phases.side]

    def _seconds(self, phase: Phase) -> float:
        forward = self.costs.of("forward", phase.stage)
        return forward if phase.kind is Kind.FORWARD else forward + self.costs.of("backward", phase.stage)
