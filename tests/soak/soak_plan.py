"""What is done to a job, to whom and when: schedules from a seed. Pure.

A schedule is all that decides a run besides the machine's own timing: it is logged, and the same seed gives it again.
A job has many faults that must not harm it, one after another, and then, most often, one that ends it or a rank of it;
in one that grows, ranks are lost and come back all the time.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from soak_kinds import KINDS, By, Outcome

SYNCHRONOUS = ("allreduce", "sharded", "group", "phase")
TOLERANT = ("overlapped", "clustered")
GROWING = "allreduce-growing"
"""Elastic, and on the host of each rank that is lost another one begins and joins."""
ELASTIC = ("allreduce-elastic", "sharded-elastic", GROWING)
"""Synchronous, with the survivors of a loss."""
RULES = (*SYNCHRONOUS, *TOLERANT, *ELASTIC)
SAVING = ("allreduce", "sharded")
CHECKPOINT_EVERY = 10
SAMPLE_EVERY = 10
"""So many steps apart ranks say how much memory they have."""
NAN = "not-a-number"
"""Comes last of what is harmless: the model holds nothing else from then on."""
AT_START = tuple(kind.name for kind in KINDS.values() if kind.at_start)
ENDINGS = (
    *(kind.name for kind in KINDS.values() if kind.outcome is not Outcome.HARMLESS and not kind.at_start),
    NAN,
)
PASSING = tuple(kind.name for kind in KINDS.values() if kind.outcome is Outcome.HARMLESS and kind.name != NAN)
GROWING_LOSSES = ("killed", "killed", "killed", "stopped", "link-cut")
"""A silent loss takes longer, so that they are fewer."""
SIZES = {"phase": (4,)}
"""Pairs are of one rack each."""
ANY_SIZE = (4, 4, 5, 5, 6, 6, 7, 8)
BAD_STARTS = 0.08
"""So many jobs do not begin at all: each has but one fault, and takes as long as many."""
NUM_PASSING = (10, 30)
NUM_GROWING = (40, 80)
NUM_MARATHON = (150, 250)
MARATHONS = 0.1
SPACING = ((2, 8), (4, 14))
"""Steps from fault to fault; a newcomer needs a second or two, in which steps are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: it begins when ``victim`` has made ``at_step`` steps, and ``after_s`` later."""

    kind: str
    victim: int
    """The place of a rank at the start; in a job that grows, whoever is on its host then."""
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
    def grows(self) -> bool:
        """Whether others come for those who are lost."""
        return self.rule == GROWING

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
    draft = _Draft(random.Random(f"{kind} {rule} {seed}"), rule, world_size)
    draft.add(kind, draft.choose.randrange(8, 16))
    return JobPlan(seed=seed, rule=rule, world_size=world_size, num_steps=num_steps, faults=tuple(draft.faults))


def plan_job(seed: int, *, rules: tuple[str, ...] = RULES) -> JobPlan:
    """Plan a job of 4 to 8 ranks."""
    choose = random.Random(seed)
    rule = choose.choice(rules)
    draft = _Draft(choose, rule, choose.choice(SIZES.get(rule, ANY_SIZE)))
    if rule == GROWING:
        draft.mix(choose.randint(*(NUM_MARATHON if choose.random() < MARATHONS else NUM_GROWING)), losses=0.15)
    elif choose.random() < BAD_STARTS:
        draft.add(choose.choice(AT_START), 0)
    else:
        draft.mix(choose.randint(*NUM_PASSING))
        draft.end()
    num_steps = draft.at_step + 24
    return JobPlan(seed=seed, rule=rule, world_size=draft.world_size, num_steps=num_steps, faults=tuple(draft.faults))


class _Draft:
    """A schedule that is being made."""

    def __init__(self, choose: random.Random, rule: str, world_size: int) -> None:
        self.choose, self.rule, self.world_size = choose, rule, world_size
        self.faults: list[Fault] = []
        self.at_step = 5
        self._saves = rule in SAVING and choose.random() < 0.3
        self._proxied = tuple(choose.sample(range(world_size - 1), 2))
        """Higher ranks dial lower ones, so that the last is dialled by nobody. Each proxy is a process: two will do."""
        self._passing = [name for name in PASSING if self._suits(name)]

    def mix(self, number: int, *, losses: float = 0.0, spared: tuple[int, ...] = ()) -> None:
        """Add faults that are harmless, and among them losses where the job grows again; the ``spared`` are not hit."""
        for _ in range(number):
            is_loss = self.choose.random() < losses
            self.at_step += self.choose.randint(*SPACING[self.rule == GROWING])
            kind = self.choose.choice(GROWING_LOSSES if is_loss else self._passing)
            self.add(kind, self.at_step, spared=spared)

    def end(self) -> None:
        """Add what ends the job, or a rank of it; who is left is struck again then."""
        kind = self.choose.choice([name for name in ENDINGS if self._suits(name)])
        self.at_step += self.choose.randint(3, 12)
        self.add(kind, self.at_step)
        first = self.faults[-1]
        if self.rule not in (*TOLERANT, *ELASTIC) or first.outcome is not Outcome.LOSS or kind == "rack-cut":
            return
        spared = (first.victim,)
        if self.world_size >= 6:  # more than half are left
            other = self.choose.choice([rank for rank in range(self.world_size) if rank != first.victim])
            # Shards of two that are lost at once are lost: one comes after the other there.
            self.at_step += self.choose.randint(20, 26) if self.rule == "sharded-elastic" else self.choose.randint(0, 6)
            self.add("killed", self.at_step, victim=other)
            spared = (first.victim, other)
        self.mix(self.choose.randint(2, 6), spared=spared)

    def add(self, name: str, at_step: int, *, victim: int | None = None, spared: tuple[int, ...] = ()) -> None:
        """Add a fault; who is struck, where it is not said, the seed chooses."""
        choose, kind = self.choose, KINDS[name]
        if name == "killed-in-checkpoint":
            at_step = at_step // CHECKPOINT_EVERY * CHECKPOINT_EVERY + CHECKPOINT_EVERY
            self.at_step = max(self.at_step, at_step)
        if victim is None:
            allowed = [rank for rank in range(self.world_size) if rank not in spared]
            if kind.by is By.PROXY:
                allowed = list(self._proxied)
            victim = 0 if name == "file-size-limit" else choose.choice(allowed)  # with AllReduce it writes all
        others = [
            rank for rank in range(self.world_size) if rank != victim and (kind.by is not By.PROXY or rank > victim)
        ]
        self.faults.append(
            Fault(
                kind=name,
                victim=victim,
                other=choose.choice(others),
                at_step=0 if kind.at_start else at_step,
                after_s=round(choose.uniform(0.0, 0.6 if kind.at_start else 0.03), 4),
                lasts_s=round(choose.uniform(*kind.lasts_s), 3),
            )
        )

    def _suits(self, name: str) -> bool:
        kind, rule = KINDS[name], self.rule
        if kind.needs_checkpoints:
            return self._saves
        if rule == GROWING and kind.by is By.PROXY:
            return False  # newcomers are connected past it
        if rule == "sharded-elastic" and name == "rack-cut":
            return False  # owner and spare may be of one rack
        if name == "another-call":
            return rule in SAVING
        return name != NAN or rule not in (*TOLERANT, "phase")
