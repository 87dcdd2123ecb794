"""Two ranks of a pair on a virtual clock: the state machines, a disk and a wire each, and nothing else."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any

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

    def of(self, name: str, stage: int) -> float:
        cost = getattr(self, name)
        return cost(stage) if callable(cost) else cost


@dataclass
class Side:
    """One rank."""

    phases: Phases
    passes: list[Pass]
    disk_free_s: float = 0.0
    kind: Pass = Pass.TRAIN
    done: list[Instruction] = field(default_factory=list)
    most_held: int = 0


class PairClock:
    """Runs passes to their end; ``time_s`` is when everything was computed, ``settled_s`` when all was stored."""

    def __init__(self, num_stages: int, costs: Costs, passes: list[Pass], *, max_stages: int = 2) -> None:
        self.costs = costs
        self.now_s = self.time_s = self.settled_s = 0.0
        self.computed: list[Phase] = []
        self._events: list[Any] = []
        self._order = itertools.count()
        self.sides = [
            Side(Phases(num_stages=num_stages, side=side, max_stages=max_stages), list(passes)) for side in range(2)
        ]

    def run(self) -> PairClock:
        for side in self.sides:
            self._obey(side, side.phases.start())
        for side in self.sides:
            self._begin(side)
        while self._events:
            self.now_s, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        self.settled_s = self.now_s
        for side in self.sides:
            assert side.phases.is_settled, f"stuck at {self.now_s}: {side.phases!r}"
            assert not side.passes
        return self

    def _begin(self, side: Side) -> None:
        if side.phases.is_idle and side.passes:
            side.kind = side.passes.pop(0)
            self._obey(side, side.phases.begin(side.kind))

    def _later(self, seconds: float, call: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), call, arguments))

    def _on_disk(self, side: Side, seconds: float, call: Any, stage: int) -> None:
        side.disk_free_s = max(side.disk_free_s, self.now_s) + seconds
        self._later(side.disk_free_s - self.now_s, self._happened, side, call, stage)

    def _happened(self, side: Side, call: Any, *arguments: Any) -> None:
        self._obey(side, call(*arguments))

    def _computed(self, side: Side, phase: Phase) -> None:
        self.time_s = self.now_s
        self.computed.append(phase)
        self._obey(side, side.phases.computed(phase, side.kind))
        self._begin(side)

    def _obey(self, side: Side, instructions: list[Instruction]) -> None:
        side.done += instructions
        side.most_held = max(side.most_held, len(side.phases.held_stages))
        other = self.sides[1 - side.phases.side]
        for one in instructions:
            match one:
                case Load(stage):
                    self._on_disk(side, self.costs.of("load", stage), side.phases.loaded, stage)
                case LoadState(stage):
                    self._on_disk(side, self.costs.of("state", stage), side.phases.state_loaded, stage)
                case Store(stage):
                    self._on_disk(side, self.costs.of("store", stage), side.phases.stored, stage)
                case Reduce(stage):
                    self._later(self.costs.of("reduce", stage), self._happened, side, side.phases.reduced, stage)
                case Update(stage):
                    self._later(self.costs.of("update", stage), self._happened, side, side.phases.updated, stage)
                case Send(phase):
                    seconds = self.costs.of("send", phase.stage)
                    self._later(seconds, self._happened, other, other.phases.arrived, phase)
                case Compute(phase):
                    self._later(self._seconds(phase), self._computed, side, phase)
                case Drop():
                    pass

    def _seconds(self, phase: Phase) -> float:
        forward = self.costs.of("forward", phase.stage)
        return forward if phase.kind is Kind.FORWARD else forward + self.costs.of("backward", phase.stage)
