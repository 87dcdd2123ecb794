"""What is done to a job, to whom and when: the kinds of faults, what may come of each, and schedules from a seed. Pure.

A schedule is all that decides a run besides the machine's own timing: it is logged, and the same seed gives it again.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Outcome(Enum):
    """What may come of a fault, for those that it does not strike itself."""

    HARMLESS = "nobody ends; same bits"
    LOSS = "the victim is lost: rules that go on without it do, others end and name it"
    PAIR = "as harmless, or one of two ranks is lost"
    MISUSE = "all ranks end, with both calls named"
    REFUSED = "no rank begins, and each says why"


class By(Enum):
    """Who brings it about."""

    SIGNAL = "a signal"
    NETWORK = "the lab's network"
    PROXY = "a proxy before one rank's port"
    STRANGER = "a process that does not belong to the job"
    RANK = "the rank itself, in its loop"
    LIMIT = "a limit of the process, before it begins"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault; ``lasts_s`` is the range that the seed chooses from, where it ends by itself."""

    name: str
    by: By
    outcome: Outcome
    lasts_s: tuple[float, float] = (0.0, 0.0)
    is_silent: bool = False
    """Whether only silence tells of it, so that the job needs a short ``silence_s``."""
    needs_checkpoints: bool = False
    at_start: bool = False


def _kinds(*kinds: FaultKind) -> dict[str, FaultKind]:
    return {kind.name: kind for kind in kinds}


SILENCE_S = 4.0
STALL_S = 5.0
LONG_S = (SILENCE_S + 2.0, SILENCE_S + 3.0)
BRIEF_S = (0.2, 1.2)

KINDS = _kinds(
    FaultKind(name="killed", by=By.SIGNAL, outcome=Outcome.LOSS),
    FaultKind(name="killed-at-start", by=By.SIGNAL, outcome=Outcome.LOSS, at_start=True),
    FaultKind(name="killed-in-checkpoint", by=By.SIGNAL, outcome=Outcome.LOSS, needs_checkpoints=True),
    FaultKind(name="stopped-briefly", by=By.SIGNAL, outcome=Outcome.HARMLESS, lasts_s=BRIEF_S),
    FaultKind(name="stopped", by=By.SIGNAL, outcome=Outcome.LOSS, lasts_s=LONG_S, is_silent=True),
    FaultKind(name="link-cut-briefly", by=By.NETWORK, outcome=Outcome.HARMLESS, lasts_s=BRIEF_S),
    FaultKind(name="link-cut", by=By.NETWORK, outcome=Outcome.LOSS, lasts_s=LONG_S, is_silent=True),
    FaultKind(name="rack-cut", by=By.NETWORK, outcome=Outcome.LOSS, lasts_s=LONG_S, is_silent=True),
    FaultKind(name="black-hole-briefly", by=By.NETWORK, outcome=Outcome.HARMLESS, lasts_s=BRIEF_S),
    FaultKind(name="black-hole", by=By.NETWORK, outcome=Outcome.PAIR, lasts_s=LONG_S, is_silent=True),
    FaultKind(name="slow-link", by=By.NETWORK, outcome=Outcome.HARMLESS, lasts_s=(0.5, 2.0)),
    FaultKind(name="reset", by=By.NETWORK, outcome=Outcome.HARMLESS),
    FaultKind(name="bit-flip", by=By.PROXY, outcome=Outcome.HARMLESS),
    FaultKind(name="closed-in-a-frame", by=By.PROXY, outcome=Outcome.HARMLESS),
    FaultKind(name="strangers", by=By.STRANGER, outcome=Outcome.HARMLESS),
    FaultKind(name="exit", by=By.RANK, outcome=Outcome.LOSS),
    FaultKind(name="crash", by=By.RANK, outcome=Outcome.LOSS),
    FaultKind(name="exception", by=By.RANK, outcome=Outcome.LOSS),
    FaultKind(name="hung", by=By.RANK, outcome=Outcome.LOSS, lasts_s=(STALL_S + 3.0, STALL_S + 4.0)),
    FaultKind(name="interpreter-held", by=By.RANK, outcome=Outcome.HARMLESS, lasts_s=BRIEF_S),
    FaultKind(name="another-call", by=By.RANK, outcome=Outcome.MISUSE),
    FaultKind(name="not-a-number", by=By.RANK, outcome=Outcome.HARMLESS),
    FaultKind(name="full-disk", by=By.RANK, outcome=Outcome.HARMLESS, needs_checkpoints=True),
    FaultKind(name="file-size-limit", by=By.RANK, outcome=Outcome.HARMLESS, needs_checkpoints=True),
    FaultKind(name="few-files", by=By.LIMIT, outcome=Outcome.REFUSED, at_start=True),
    FaultKind(name="wrong-secret", by=By.LIMIT, outcome=Outcome.REFUSED, at_start=True),
)

SYNCHRONOUS = ("allreduce", "sharded", "group")
TOLERANT = ("overlapped", "clustered")
ELASTIC = ("allreduce-elastic",)
"""Synchronous, with the survivors of a loss."""
RULES = (*SYNCHRONOUS, *TOLERANT, *ELASTIC)
CHECKPOINT_EVERY = 10
ENDINGS = tuple(kind.name for kind in KINDS.values() if kind.outcome is not Outcome.HARMLESS)
PASSING = tuple(kind.name for kind in KINDS.values() if kind.outcome is Outcome.HARMLESS and not kind.needs_checkpoints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: it begins when ``victim`` has made ``at_step`` steps, and ``after_s`` later."""

    kind: str
    victim: int
    other: int
    """The other end, where it strikes a connection; any rank."""
    at_step: int
    after_s: float = 0.0
    lasts_s: float = 0.0

    @property
    def outcome(self) -> Outcome:
        """What may come of it."""
        return KINDS[self.kind].outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A job and what is done to it."""

    seed: int
    rule: str
    world_size: int
    num_steps: int
    faults: tuple[Fault, ...]

    @property
    def is_tolerant(self) -> bool:
        """Whether survivors of a loss go on."""
        return self.rule in (*TOLERANT, *ELASTIC)

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written."""
        return any(KINDS[fault.kind].needs_checkpoints for fault in self.faults)

    @property
    def proxied(self) -> tuple[int, ...]:
        """The ranks that listen behind a proxy."""
        return tuple(sorted({fault.victim for fault in self.faults if KINDS[fault.kind].by is By.PROXY}))

    @property
    def begins_badly(self) -> bool:
        """Whether a rank does not come."""
        return any(KINDS[fault.kind].at_start for fault in self.faults)

    @property
    def has_silence(self) -> bool:
        """Whether a loss is told by silence alone."""
        return any(KINDS[fault.kind].is_silent for fault in self.faults)

    def rack_b(self) -> tuple[int, ...]:
        """The ranks in the second rack."""
        return tuple(range((self.world_size + 1) // 2, self.world_size))

    def struck(self, fault: Fault) -> tuple[int, ...]:
        """Return the ranks that may be lost by a fault."""
        if fault.outcome is Outcome.LOSS:
            return self.rack_b() if fault.kind == "rack-cut" else (fault.victim,)
        return {Outcome.PAIR: (fault.victim, fault.other), Outcome.REFUSED: (fault.victim,)}.get(fault.outcome, ())

    def as_record(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)


def plan_one(kind: str, rule: str, *, seed: int, world_size: int = 4, num_steps: int = 40) -> JobPlan:
    """Plan a job with one fault of a kind, at a place that the seed chooses."""
    choose = random.Random(f"{kind} {rule} {seed}")
    fault = _choose_fault(choose, kind, world_size, at_step=choose.randrange(8, 16))
    return JobPlan(seed=seed, rule=rule, world_size=world_size, num_steps=num_steps, faults=(fault,))


def plan_job(seed: int, *, rules: tuple[str, ...] = RULES, max_passing: int = 5) -> JobPlan:
    """Plan a job of 4 to 8 ranks: some faults that must not harm it, and then, most often, one that may end it."""
    choose = random.Random(seed)
    rule, world_size = choose.choice(rules), choose.randint(4, 8)
    at_step, faults = 5, []
    passing = [name for name in PASSING if rule not in TOLERANT or name != "not-a-number"]
    for _ in range(choose.randint(1, max_passing)):
        at_step += choose.randint(1, 12)
        faults.append(_choose_fault(choose, choose.choice(passing), world_size, at_step=at_step))
    faults = _once_not_a_number(faults)
    allowed = [name for name in ENDINGS if _suits(name, rule)]
    if rule in SYNCHRONOUS and rule != "group" and choose.random() < 0.15:
        allowed = ["full-disk", "file-size-limit"]
    ending = choose.choice(allowed)
    if KINDS[ending].at_start:
        faults = []
    at_step += choose.randint(3, 12)
    faults.append(_choose_fault(choose, ending, world_size, at_step=at_step))
    if (
        rule in (*TOLERANT, *ELASTIC)
        and world_size >= 6
        and KINDS[ending].outcome is Outcome.LOSS
        and ending != "rack-cut"
    ):
        faults += _second_loss(choose, faults[-1], world_size)
    return JobPlan(seed=seed, rule=rule, world_size=world_size, num_steps=at_step + 24, faults=tuple(faults))


def _once_not_a_number(faults: list[Fault]) -> list[Fault]:
    """Leave out what follows gradients that are not a number: the model holds nothing else from then on."""
    kinds = [fault.kind for fault in faults]
    return faults[: kinds.index("not-a-number")] if "not-a-number" in kinds[:-1] else faults


def _second_loss(choose: random.Random, first: Fault, world_size: int) -> list[Fault]:
    """Kill another rank while the first loss is being dealt with, or later; more than half are left."""
    other = choose.choice([rank for rank in range(world_size) if rank != first.victim])
    return [_choose_fault(choose, "killed", world_size, at_step=first.at_step + choose.randint(0, 6), victim=other)]


def _suits(name: str, rule: str) -> bool:
    kind = KINDS[name]
    if rule in (*TOLERANT, *ELASTIC, "group"):
        return not kind.needs_checkpoints and name != "another-call"
    return True


def _choose_fault(
    choose: random.Random, name: str, world_size: int, *, at_step: int, victim: int | None = None
) -> Fault:
    kind = KINDS[name]
    chosen = choose.randrange(world_size) if victim is None else victim
    if name == "killed-in-checkpoint":
        at_step = at_step // CHECKPOINT_EVERY * CHECKPOINT_EVERY + CHECKPOINT_EVERY
    if kind.by is By.PROXY:
        chosen = choose.randrange(world_size - 1)  # higher ranks dial lower ones, so that the last is dialled by nobody
    elif name == "file-size-limit":
        chosen = 0  # with AllReduce it writes all
    others = [rank for rank in range(world_size) if rank != chosen and (kind.by is not By.PROXY or rank > chosen)]
    return Fault(
        kind=name,
        victim=chosen,
        other=choose.choice(others),
        at_step=0 if kind.at_start else at_step,
        after_s=round(choose.uniform(0.0, 0.6 if kind.at_start else 0.03), 4),
        lasts_s=round(choose.uniform(*kind.lasts_s), 3),
    )
