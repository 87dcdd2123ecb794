"""Whether a job of a soak ended as it may: what each rank must, may and must not have told, and what may be left. Pure.

Each rule adds sentences to a list; a run in which the list is empty has passed. What cannot be judged, because the
fault that was planned did not take place or too few steps were made, is no pass either: it is told as invalid.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from soak_kinds import KINDS, Outcome
from soak_memory import MOST_GROWTH_KIB, WARM_STEPS, growth_kib
from soak_numbers import Numbers
from soak_record import JobRecord

LONGEST_STALL_S = 30.0
STORE_THREAD = "syncline-store"
"""May wait for a store whose process is dead, when init() has given up; torch's client cannot be told to stop."""
NO_ROOM = {"full-disk": "No space left", "file-size-limit": "File too large"}
"""What a rank is told of a checkpoint that cannot be written."""
DEADLY = {"killed": -9, "killed-at-start": -9, "killed-in-checkpoint": -9, "exit": 3, "crash": -11}
OPERATION = re.compile(
    r"(all_reduce|reduce_scatter|all_gather|broadcast|barrier|allreduce|exchange|gather|report|checkpoint|period|update|"
    r"checksums of parameters|"
    r"stage|samples of a pass|norm of all gradients|(of|after) step).*",
)
STEP = re.compile(r"(step|backward pass|iteration|period|checkpoint) \d+|checkpoint|barrier|starts|distribute")


class Oracle:
    """Judges jobs one after another, and remembers which bits each step had before."""

    def __init__(self) -> None:
        self._numbers = Numbers()

    def judge(self, record: JobRecord) -> list[str]:
        """Return what is wrong."""
        wrong = [f"rank {rank} hangs: {record.outputs.get(rank, '')[-1500:]}" for rank in record.hanging]
        wrong += [f"left behind: {what}" for what in record.left_behind]
        wrong += judge_ends(record)
        wrong += judge_errors(record)
        wrong += judge_notices(record)
        wrong += judge_what_is_held(record)
        wrong += self._numbers.judge(record, struck_s(record))
        stall_s = longest_stall_s(record)
        if stall_s > LONGEST_STALL_S:
            wrong.append(f"a rank that lives made no step and told no error for {stall_s:.1f} s")
        return wrong


def took_place(record: JobRecord) -> set[str]:
    """Return the kinds of faults that took place."""
    return {one["kind"] for one in record.injected}


def culprits(record: JobRecord) -> set[int]:
    """Return the ranks that may be lost by what took place."""
    return {*struck_s(record)}


def struck_s(record: JobRecord) -> dict[int, float]:
    """Return since when each of them may be lost."""
    faults = sorted(record.injected, key=lambda one: one["at_s"], reverse=True)
    return {rank: one["at_s"] for one in faults for rank in one["blamed"]}


def invalid(record: JobRecord) -> str | None:
    """Say why a run shows nothing, if it does not."""
    planned = {fault.kind for fault in record.plan.faults}
    if not record.injected:
        return f"nothing of {', '.join(sorted(planned))} took place"
    begun = [event for event in record.events if event["event"] == "step"]
    if not begun and not record.plan.begins_badly:
        return "no rank made a step"
    return None


def judge_ends(record: JobRecord) -> list[str]:
    """Each rank ends by itself, having told how; or is one of those that were to die, and so."""
    wrong = []
    allowed: dict[int, set[int]] = defaultdict(set)
    for one in record.injected:
        if one["kind"] in DEADLY:
            allowed[one["rank"]].add(DEADLY[one["kind"]])
    for rank, status in record.statuses.items():
        if rank in record.hanging or status in allowed[rank]:
            continue
        if status != 0 or not record.of(rank, "closed"):
            wrong.append(f"rank {rank} ended with status {status}: {record.outputs.get(rank, '')[-1500:]}")
    return wrong


def judge_errors(record: JobRecord) -> list[str]:
    """Those who are not struck end as the outcome allows, and their errors say who, what and when."""
    outcomes = {KINDS[kind].outcome for kind in took_place(record)}
    blamed = culprits(record)
    wrong = []
    for rank in record.statuses:
        errors = record.of(rank, "error")
        is_done = bool(record.of(rank, "done"))
        if Outcome.REFUSED in outcomes:
            wrong += _judge_refusal(record, rank, errors)
        elif Outcome.MISUSE in outcomes:
            wrong += [] if _names_both_calls(errors) else [f"rank {rank} was not told of both calls: {_texts(errors)}"]
        elif rank in blamed or (rank in record.newcomers and not record.of(rank, "ready")):
            wrong += [] if rank in blamed else _judge_newcomer(record, rank, errors)
        elif record.plan.begins_badly and not record.of(rank, "ready"):
            wrong += [] if errors and errors[0]["is_own"] else [f"rank {rank} was told nothing: {_texts(errors)}"]
        elif outcomes & {Outcome.LOSS, Outcome.PAIR} and not record.plan.is_tolerant:
            wrong += [] if is_done else _judge_loss(rank, errors, blamed, has_steps=record.plan.rule != "group")
        elif not is_done:
            wrong.append(f"rank {rank} had to go on, but {_texts(errors)}")
    told = [event["text"] for event in record.events if event["event"] == "error"]
    if record.plan.begins_badly and told and not any(f"rank {rank}" in text for rank in blamed for text in told):
        wrong.append(f"nobody names who did not come, of {sorted(blamed)}: {told}")
    return wrong


def _judge_newcomer(record: JobRecord, rank: int, errors: Sequence[dict[str, Any]]) -> list[str]:
    """One that did not come in was told why; and something happened meanwhile, or the job came to its end."""
    if not errors or not errors[0]["is_own"]:
        return [f"newcomer {rank} was told nothing: {_texts(errors)}"]
    told_s, began_s = errors[0]["at_s"], record.began(rank)
    ends = [event["at_s"] for event in record.events if event["event"] == "done"]
    times = [(one["at_s"], one["at_s"] + one["lasts_s"]) for one in record.injected] + [
        (end_s, told_s) for end_s in ends
    ]
    if any(first_s <= told_s and last_s >= began_s for first_s, last_s in times):
        return []
    return [f"newcomer {rank} had to come in, but {_texts(errors)}"]


def _judge_loss(rank: int, errors: Iterable[dict[str, Any]], blamed: set[int], *, has_steps: bool) -> list[str]:
    """The error is one of ours, names a rank that was struck, the call and its step; groups know of no steps."""
    for error in errors:
        text = error["text"]
        names = error["lost"] in blamed or any(re.search(rf"rank {other}\b", text) for other in blamed)
        if not error["is_own"] or not names:
            return [f"rank {rank} does not name any of {sorted(blamed)}: {error['kind']}: {text}"]
        if not OPERATION.search(text) or (has_steps and not STEP.search(text)):
            return [f"rank {rank} names no call, or not its step: {error['kind']}: {text}"]
        return []
    return [f"rank {rank} told no error, though {sorted(blamed)} are lost"]


def _judge_refusal(record: JobRecord, rank: int, errors: list[dict[str, Any]]) -> list[str]:
    if not errors or not errors[0]["is_own"] or record.of(rank, "ready"):
        return [f"rank {rank} was not refused: {_texts(errors)}"]
    return []


def _names_both_calls(errors: list[dict[str, Any]]) -> bool:
    return bool(errors) and errors[0]["kind"] == "MismatchError" and "8 x" in errors[0]["text"] + " "


def judge_notices(record: JobRecord) -> list[str]:
    """What must be told though training goes on: where NaN began, and that a checkpoint could not be written."""
    wrong = []
    for one in record.injected:
        rank = one["rank"]
        if one["kind"] == "not-a-number" and record.plan.rule != "group":
            for told in {0, rank}:
                warned = [event["text"] for event in record.of(told, "warning") if "NaN or infinity" in event["text"]]
                if not any(f"rank {rank} " in text for text in warned) and record.of(told, "done"):
                    wrong.append(f"rank {told} was not told that NaN began on rank {rank}: {warned}")
    wrong += _judge_refusals(record)
    if record.plan.saves and not record.of(-1, "loaded") and any(event["event"] == "saved" for event in record.events):
        wrong.append("no checkpoint can be loaded")
    return wrong


def _judge_refusals(record: JobRecord) -> list[str]:
    """All are told why a checkpoint could not be written; where two reasons meet, whoever writes may find either."""
    reasons: dict[int, set[str]] = defaultdict(set)
    for rank in record.statuses:
        for event in record.of(rank, "struck"):
            if event["kind"] in NO_ROOM:
                reasons[event["step"]].add(NO_ROOM[event["kind"]])
    wrong = []
    for step, words in reasons.items():
        for rank in record.statuses:
            told = [event["text"] for event in record.of(rank, "unsaved") if event["step"] == step]
            if not any(one in text for one in words for text in told) and record.of(rank, "done"):
                wrong.append(f"rank {rank} was not told why nothing can be saved after step {step}: {told}")
    return wrong


def judge_what_is_held(record: JobRecord) -> list[str]:
    """After it has left, a rank holds what it held before; and it does not grow while it trains."""
    wrong = []
    for rank in record.statuses:
        for event in record.of(rank, "closed"):
            after = without_store(event["after"]) if record.plan.begins_badly else event["after"]
            if event["before"] != after:
                wrong.append(f"rank {rank} held {event['before']} before, and {event['after']} after")
        grown_kib = growth_kib(memory_of(record, rank))
        if grown_kib is not None and grown_kib > MOST_GROWTH_KIB:
            wrong.append(f"rank {rank} grew by {grown_kib} KiB: {memory_of(record, rank)}")
    return wrong


def without_store(held: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what is held but for threads in which torch still looks for a store, each with a socket at most."""
    threads, files = ([*held[kind]] for kind in ("threads", "files"))
    while STORE_THREAD in threads:
        threads.remove(STORE_THREAD)
        if "socket" in files:
            files.remove("socket")
    return held | {"threads": threads, "files": files}


def memory_of(record: JobRecord, rank: int) -> list[int]:
    """Return what a rank held in memory, in KiB, after its first steps."""
    events = record.of(rank, "step")
    first = events[0]["step"] if events else 0
    return [event["rss_kib"] for event in events if "rss_kib" in event and event["step"] >= first + WARM_STEPS]


def longest_stall_s(record: JobRecord) -> float:
    """Return for how long a rank that was not struck told nothing, at most: no step, no error."""
    blamed = culprits(record)
    longest_s = 0.0
    for rank in set(record.statuses) - blamed:
        times = [
            record.began(rank),
            *(event["at_s"] for event in record.events if event["rank"] == rank and event["at_s"]),
        ]
        times += [record.ended_s] if rank in record.hanging else []
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        longest_s = max(longest_s, *gaps, 0.0)
    return longest_s


def _texts(errors: Iterable[dict[str, Any]]) -> str:
    return "; ".join(f"{error['kind']}: {error['text']}" for error in errors) or "it told no error"
