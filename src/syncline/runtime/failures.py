"""From what went wrong to the errors that callers see: rule, value, remedy, and who.

A failure ends every call that is under way and every later one, because after it the ranks no longer agree on what was
done. Each call gets an error of its own, with its own label and step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from syncline.errors import (
    DeadlineError,
    FabricClosedError,
    FabricError,
    MismatchError,
    PeerLostError,
    SynclineError,
    as_told,
    name_ranks,
)
from syncline.fabric.liveness import describe_absence
from syncline.runtime.call import DETAILS, PARTS
from syncline.runtime.control import Failure, Tally

if TYPE_CHECKING:
    from syncline.runtime.call import Call

EVERY_RANK = ": call it on every rank"
"""The end of a label of what happens in a user's call, by which errors find those who made that call on some ranks."""
_COMMON_CALL = re.compile(r"(?:^|[(;] ?)((?:[^;()]|\(\))+)" + EVERY_RANK)
AS_MANY_BATCHES = "give all ranks the same number of batches (syncline.data.sampler, or drop_last=True of a DataLoader)"
SAME_BATCHES = f"{AS_MANY_BATCHES}, or put the loop in `with syncline.join(model):`"
SAME_CALLS = (
    "all ranks of a group make the same calls: give all the same number of batches (DistributedSampler, "
    "drop_last=True), or put the loop of a DistributedDataParallel in `with model.join():`"
)
SAME_BATCHES_OF_PAIRS = (
    "give all pairs the same number of batches (a DistributedSampler with num_replicas = number of pairs, or "
    "drop_last=True of a DataLoader)"
)
LOOK = (
    "look where it is (py-spy dump --pid), or raise timeout_s and stall_s of syncline.init() (of a process group, its "
    "timeout and BackendOptions.stall_s) if it may compute for so long"
)
SAME_ORDER = "all ranks must make the same calls in the same order"
STEP, PHASED_STEP = "step", "phased step"
"""Units of a tally of training."""
SAME_STEPS = "call step() as often on every rank: where one ran no backward pass, it still makes a step of all"
SAME_COUNTS = {STEP: SAME_BATCHES, PHASED_STEP: SAME_BATCHES_OF_PAIRS}
"""By unit, what lets all ranks make as many."""
_STEP = re.compile(r", step \d+\b")
"""In what a call of a step is called."""
_PARTS = re.compile(rf"{PARTS}(\d+(?:, \d+)*)")
MOST_SIZES = 8
"""Of parts that an error lists; of more, it names the first that differs."""
LATE_S = 5.0
"""A loop that looks at its clock so much too late did not run."""
MISMATCH, DEADLINE, PEER_LOST, CRASH, CLOSED = "mismatch", "deadline", "peer lost", "crash", "closed"
VIOLATION = "violation"
LOSSES = (PEER_LOST, VIOLATION, DEADLINE)


def reason_of(error: SynclineError) -> str:
    """Return the reason of a failure that becomes an error of the same kind."""
    if isinstance(error, PeerLostError):
        return PEER_LOST
    return DEADLINE if isinstance(error, DeadlineError) else MISMATCH


def error_for(failure: Failure, call: Call | None, numbers: Sequence[int], *, host: str) -> SynclineError:
    """Return the error that ``call`` ends with because of ``failure``; without a call, the failure itself.

    ``numbers`` are the job's own of the ranks that make the call; the error has those of whom it is about, and the
    ``host`` of the first.
    """
    error = _worded(failure, call, numbers, host)
    if failure.reason != CLOSED:
        error.ranks_at_fault = tuple(numbers[rank] for rank in failure.accused or (failure.rank,))
    return error


def _worded(failure: Failure, call: Call | None, numbers: Sequence[int], host: str) -> SynclineError:
    what = "a collective" if call is None else call.what
    if failure.reason == MISMATCH:
        return MismatchError(failure.text)
    if failure.reason == CLOSED:
        return FabricClosedError(f"{what} cannot be done: {failure.text}")
    if failure.reason == DEADLINE:
        others = "" if call is None or what in failure.text else f" ({what} ends with it)"
        return DeadlineError(failure.text + others)
    if failure.reason == CRASH:
        return FabricError(f"{what} cannot be done: {failure.text}")
    text = failure.text
    if call is not None:
        waiters = [numbers[rank] for rank in call.needed_by(failure.rank)]
        text += f", during {what}; {wait_for(waiters, 'it')}"
    text += f"; {failure.remedy}" if failure.remedy else ""
    return PeerLostError(text, rank=numbers[failure.rank], host=host)


def accuse(
    whom: str,
    silent_s: float,
    call: Call,
    waiters: Collection[int],
    elsewhere: Sequence[str] = (),
    *,
    still_s: float,
) -> str:
    """Say that a rank did not do its part of ``call``, who waits for it, and in which other call it waits itself.

    ``still_s`` is for how long its training thread is known to have done nothing with others. Heartbeats come all the
    time: what was silent is the call, not the rank.
    """
    if still_s >= silent_s / 2 and not elsewhere:
        return (
            f"{whom} lives, but its training thread has made no call for {still_s:.1f} s, during {call.what} (deadline "
            f"{call.timeout_s:g} s); {wait_for(waiters, 'it')}"
        )
    text = (
        f"{whom} sent nothing of {call.what} for {silent_s:.1f} s (deadline {call.timeout_s:g} s); "
        f"{wait_for(waiters, 'it')}"
    )
    return f"{text}, and it waits in {elsewhere[0]}, which was not called here" if elsewhere else text


def was_away(whom: str, late_s: float, call: Call) -> str:
    """Say that this rank itself did not look at its clock when the time of ``call`` was over."""
    return f"{whom} {describe_absence(late_s)}, and {call.what} (deadline {call.timeout_s:g} s) was not done before"


def late(call: Call, sentences: list[str], *, accused: Sequence[int], remedy: str) -> Failure:
    """Return the failure of a ``call`` whose time is over; ``accused`` are those whom the sentences are about."""
    text = "; ".join(sentences[:8]) or f"{call.what} was not done within {call.timeout_s:g} s"
    text += f"; {remedy}" if remedy else ""
    return Failure(reason=DEADLINE, text=text, rank=accused[0], accused=tuple(accused))


def common_call(text: str) -> str | None:
    """``"save_checkpoint()"``: the user's call, for every rank to make, in which the call that ``text`` tells of is."""
    found = _COMMON_CALL.search(text)
    return found[1] if found else None


def disagreement(texts: Mapping[int, str], describe: Callable[[int], str], place: str) -> tuple[str, tuple[int, ...]]:
    """Say that two ranks made different calls, and who of them is at fault, first; ``texts`` describe their calls."""
    texts = _shorten_parts(texts)
    halves = {rank: texts[rank].partition(DETAILS) for rank in sorted(texts)}
    called = {rank: f"{describe(rank)} called {what}" for rank, (what, _, _) in halves.items()}
    details = "; ".join(f"{describe(rank)}: {about}" for rank, (_, _, about) in halves.items() if about)
    names = {rank: name for rank in called if (name := common_call(texts[rank]))}
    if len(names) == 1:
        ((rank, name),) = names.items()
        (other,) = called.keys() - {rank}
        return called_alone(name, describe(rank), f"{called[other]} ({place})"), (rank,)
    passes = [rank for rank in called if texts[rank].startswith("reduce_scatter ") and _STEP.search(texts[rank])]
    steps = [rank for rank in called if texts[rank].startswith("all_gather ") and _STEP.search(texts[rank])]
    if passes and steps:
        return (
            f"step() must be called on every rank after the same backward passes; {describe(passes[0])} ran another "
            f"where {describe(steps[0])} called step() ({place}: {', but '.join(called.values())})",
            (*passes, *steps),
        )
    text = f"{', but '.join(called.values())}. {SAME_ORDER.capitalize()}; {place} differs"
    return f"{text} ({details})" if details else text, tuple(called)


def _shorten_parts(texts: Mapping[int, str]) -> Mapping[int, str]:
    """Let calls of many unequal parts name one of them: the first that differs."""
    sizes = {rank: found[1].split(", ") for rank, text in texts.items() if (found := _PARTS.search(text))}
    if max(map(len, sizes.values()), default=0) <= MOST_SIZES:
        return texts
    columns = enumerate(zip(*sizes.values(), strict=False))
    owner = next((owner for owner, column in columns if len(set(column)) > 1), 0)
    return {
        rank: _PARTS.sub(f"{PARTS}which rank {owner}'s is {sizes[rank][owner]}", text) if rank in sizes else text
        for rank, text in texts.items()
    }


def find_odd(what: str, waiting: Sequence[int], elsewhere: Mapping[int, str]) -> list[int]:
    """Return the ranks that make another call than the others, where some wait in ``what`` and some ``elsewhere``.

    The fewer are odd; of as many, those who are not in a step of the training. Empty if that does not tell.
    """
    if not elsewhere:
        return []
    here, there = sorted(waiting), sorted(elsewhere)
    if len(here) != len(there):
        return min(here, there, key=len)
    is_step_here, is_step_there = (_STEP.search(text) is not None for text in (what, next(iter(elsewhere.values()))))
    return [] if is_step_here == is_step_there else there if is_step_here else here


def called_alone(name: str, caller: str, other: str) -> str:
    """Say that a user's call, which is for every rank, was not made on all; ``other`` says what one did instead."""
    return f"{name} must be called on every rank; {caller} called it, but {other}"


def parted(whom: str, theirs: Tally, us: str, ours: Tally, *, is_next: bool) -> str:
    """Say how far a rank came that has left, and how far this one is; ``is_next``: it is in one more than it made."""
    plural = "" if theirs.count == 1 else "s"
    number = ours.count + is_next
    rest = f"is in its {ordinal(number)}" if number > theirs.count else f"has made {ours.count}"
    return f"{whom} left after {theirs.count} {theirs.unit}{plural}, and {us} {rest}"


def made_idle(us: str, num_idle: int) -> str:
    """Say that this rank took part in steps of the others to which it brought no backward pass."""
    times = "once" if num_idle == 1 else f"{num_idle} times"
    return f"{us} called step() {times} without a backward pass, which took part in the others' next step"


def ordinal(number: int) -> str:
    """``"4th"``."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def heard_from(failure: Failure, teller: int, describe: Callable[[int], str]) -> Failure:
    """Return what ``failure`` of another rank means here."""
    if failure.reason == PEER_LOST and failure.rank != teller:
        return failure._replace(text=as_told(failure.text, describe(teller)), is_hearsay=True)
    if failure.reason in (PEER_LOST, MISMATCH, VIOLATION):
        return failure
    if failure.reason == DEADLINE:
        return failure._replace(remedy="")
    return Failure(reason=PEER_LOST, text=f"{describe(teller)} gave up: {failure.text}", rank=teller)


def wait_for(ranks: Collection[int], whom: str) -> str:
    """``"ranks 5 and 6 wait for it"``."""
    if not ranks:
        return f"no rank waits for {whom}"
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {whom}"


def find_culprits(awaited: Mapping[int, Collection[int]], start: int) -> dict[int, list[int]]:
    """Follow who waits for whom from ``start``: the ranks that are waited for but wait for nobody, and by whom.

    ``awaited`` holds, for each rank that said so, whom it waits for. If all wait in a circle, whom ``start`` waits for
    is as good an answer as any.
    """
    waiters: dict[int, list[int]] = {}
    queue, seen = [start], {start}
    while queue:
        rank = queue.pop(0)
        for peer in sorted(awaited.get(rank, ())):
            waiters.setdefault(peer, []).append(rank)
            if peer not in seen:
                seen.add(peer)
                queue.append(peer)
    culprits = {peer: sorted(ranks) for peer, ranks in waiters.items() if not awaited.get(peer)}
    return culprits or {peer: [start] for peer in sorted(awaited.get(start, ()))}
