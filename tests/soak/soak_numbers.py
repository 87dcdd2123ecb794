"""Whether a job of a soak computed the right numbers: equal bits on all ranks, and those of any run before.

What is compared follows from the rule. Parameters of one process are those of plain PyTorch over the batches of those
who made each step; with pairs, it is the losses of both pairs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from soak_pairs import replay_pairs
from soak_plan import ELASTIC, TOLERANT
from soak_record import JobRecord
from soak_training import TOLERANCE, Replays

MOST_SENTENCES = 6


class Numbers:
    """Judges jobs one after another, and remembers which bits each step had before."""

    def __init__(self) -> None:
        self._replays = Replays()
        self._pairs = replay_pairs()
        self._losses: list[list[float]] = []
        self._digests: dict[tuple[str, int, int], str] = {}

    def judge(self, record: JobRecord, struck_s: Mapping[int, float]) -> list[str]:
        """Return what is wrong; ``struck_s``: since when ranks may be lost, which others go on without."""
        if record.plan.rule in TOLERANT:
            return judge_last_digests(record)
        if record.plan.rule == "phase":
            return self._judge_pairs(record)[:MOST_SENTENCES]
        return self._judge_steps(record, struck_s if record.plan.rule in ELASTIC else {})[:MOST_SENTENCES]

    def _judge_steps(self, record: JobRecord, struck_s: Mapping[int, float]) -> list[str]:
        wrong: list[str] = []
        took_place = [one["rank"] for one in record.injected if one["kind"] == "not-a-number"]
        planned = [one for one in record.plan.faults if one.kind == "not-a-number" and one.victim in took_place]
        spoilt_from = min((one.at_step for one in planned), default=math.inf)
        everyone = tuple(range(record.plan.world_size))
        made: list[tuple[int, ...]] = []
        for step, events in sorted(by_step(record, struck_s).items()):
            if step != len(made) + 1:
                wrong.append(f"step {len(made) + 1}: nobody who was there told of it")
                break
            digests = {event["digest"] for event in events.values()}
            members = {tuple(event["members"] or everyone) for event in events.values()}
            if len(digests) > 1 or len(members) > 1:
                wrong.append(f"step {step}: ranks differ: { ({rank: one['digest'] for rank, one in events.items()}) }")
                break
            made.append(*members)
            if step > spoilt_from:
                continue
            if made[-1] == everyone:
                known = self._digests.setdefault((record.plan.rule, record.plan.world_size, step), *digests)
                if {known} != digests:
                    wrong.append(f"step {step}: other bits than in an earlier run: {known} and {digests}")
            wrong += self._compare(f"step {step}", made, next(iter(events.values()))["value"])
        for event in record.events:
            if event["event"] == "loaded" and event["step"] <= spoilt_from:
                wrong += self._compare("the checkpoint", made[: event["step"]], event["value"])
        return wrong

    def _compare(self, what: str, members: Sequence[Sequence[int]], value: float) -> list[str]:
        return _compare(f"{what}: parameters are", value, self._replays.number(members))

    def _judge_pairs(self, record: JobRecord) -> list[str]:
        wrong = []
        for step, events in sorted(by_step(record, {}).items()):
            while len(self._losses) < step:
                self._losses.append(next(self._pairs))
            for rank, event in events.items():
                expected = self._losses[step - 1][rank // 2]
                wrong += _compare(f"step {step}: the loss of rank {rank} is", event["value"], expected)
        stages: dict[str, set[str]] = defaultdict(set)
        for event in record.events:
            if event["event"] == "done":
                for number, digest in event["stages"].items():
                    stages[number].add(digest)
        return wrong + [f"stage {number} differs: {found}" for number, found in stages.items() if len(found) > 1]


def judge_last_digests(record: JobRecord) -> list[str]:
    """Where each rank steps by itself, those that came to the end together hold the same: all, or their cluster's."""
    half = (record.plan.world_size + 1) // 2
    groups: dict[bool, dict[int, str]] = defaultdict(dict)
    for rank in record.statuses:
        for event in record.of(rank, "done"):
            groups[record.plan.rule == "clustered" and rank >= half][rank] = event["digest"]
    return [f"ranks end with different parameters: {found}" for found in groups.values() if len({*found.values()}) > 1]


def _compare(what: str, value: float, expected: float) -> list[str]:
    if abs(value - expected) <= TOLERANCE * max(1.0, abs(expected)):
        return []
    return [f"{what} not those of one process: {value} in place of {expected}"]


def by_step(record: JobRecord, struck_s: Mapping[int, float]) -> dict[int, dict[int, dict[str, Any]]]:
    """Return what ranks told after each step.

    A rank that was struck counts before that, but for its last step, which those who go on may have made without it.
    """
    found: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for event in record.events:
        if event["event"] == "step" and event["at_s"] < struck_s.get(event["rank"], math.inf):
            found[event["step"]][event["rank"]] = event
    for rank in struck_s:
        last = max((step for step, told in found.items() if rank in told), default=None)
        if last is not None:
            del found[last][rank]
    return {step: told for step, told in found.items() if told}
