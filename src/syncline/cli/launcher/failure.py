"""Words what went wrong: which rank failed first, its traceback, and what became of the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from syncline.cli.launcher.supervisor import Exit, Failure
from syncline.errors import name_ranks, without_teller
from syncline.last_words import LastWords

NUM_TAIL_LINES = 20
# Errors that say "another rank is gone": a rank that ends with one of them is seldom the cause.
CONSEQUENCES = ("PeerLostError", "FabricClosedError", "RendezvousError", "DeadlineError", "DistNetworkError")
OWN_FAULTS = ("cannot serve the store", "server socket has failed to listen")
"""What those errors say, ours and torch's, where the rank itself could not do a thing for which the others wait."""


def pick_cause(failures: Sequence[Failure], tails: Mapping[int, Sequence[str]]) -> Failure:
    """Choose the failure to report: the first one that is no mere consequence of another, else the first."""
    for failure in failures:
        if not failure.was_signalled and not _is_consequence(tails.get(failure.rank, ())):
            return failure
    return failures[0]


def since_last_survived(failures: Sequence[Failure], words: Mapping[int, LastWords]) -> list[Failure]:
    """Leave out what survivors have gone on after: what comes before all whom ``words`` name, and who left them.

    Who stops as too few are left names those that were lost since the members last agreed on who goes on.
    """
    heard = {*words, *(rank for told in words.values() for rank in told.ranks)}
    first = next((number for number, failure in enumerate(failures) if failure.rank in heard), 0)
    return list(failures[first:])


def describe_first(
    name: str,
    how: Exit,
    *,
    num_living: int,
    grace_s: float,
    pause_s: float | None = None,
    would_go_on: bool = False,
) -> str:
    """Word, in one line, that a rank has failed; the others go on if ``grace_s`` is infinite.

    ``pause_s``: in how many seconds it is started again, to join the others; None if it is not. ``would_go_on``:
    whether the others would without it, if they were let.
    """
    if pause_s is not None:
        return f"{_fate(name, how)}; it starts again in {pause_s:g} s, to join those that go on"
    get, selves = ("gets", "itself") if num_living == 1 else ("get", "themselves")
    what = "may go on"
    if math.isfinite(grace_s):
        what = f"{get} {grace_s:g} s to end by {selves}"
        what += ", and would go on with --keep-going or --elastic" if would_go_on else ""
    rest = f"; the other {_ranks(num_living)} {what}" if num_living else ""
    return f"{_fate(name, how)}{rest}"


def describe_ending(reason: str, living: Collection[int]) -> str:
    """Word, in one line, that those who live are ended; ``reason`` is that of an announcement."""
    if reason == "over":
        return f"the job ended before {name_ranks(living)} could join it"
    why = {
        "interrupt": "Ctrl-C again kills them",
        "termination": "as the launcher was told to end",
        "alone": "nobody is left whom they could join",
    }
    return f"ending {name_ranks(living)}; {why[reason]}"


def describe_failures(
    failures: Sequence[Failure],
    *,
    names: Mapping[int, str],
    tails: Mapping[int, Sequence[str]],
    num_missing: int | None = None,
    words: Mapping[int, LastWords] | None = None,
) -> list[str]:
    """Word the closing report; ``tails`` holds the last lines that each rank wrote to its standard error.

    ``num_missing``: without how many ranks the job ended well; None if it did not. ``words``: what ranks left that
    ended with an error of ours. Whom most of them name stands first, unless a rank failed by a fault of its own.
    """
    if num_missing is None and (blamed := _blamed(failures, tails, words or {}, names)) is not None:
        return _describe_blamed(blamed, failures, names=names, tails=tails, words=words or {})
    cause = pick_cause(failures, tails)
    without = f"went on without {num_missing} of {_ranks(len(names))}" if num_missing else "lost ranks, which came back"
    head = "the job failed" if num_missing is None else f"the job {without}"
    report = [f"{head}: {names[cause.rank]}, {_outcome(cause, ())}"]
    report += [f"    {line}" for line in traceback_of(tails.get(cause.rank, ()))]
    return report + _describe_others(failures, cause.rank, names=names, tails=tails)


def _blamed(
    failures: Sequence[Failure],
    tails: Mapping[int, Sequence[str]],
    words: Mapping[int, LastWords],
    names: Mapping[int, str],
) -> int | None:
    """Return whom most ranks name that have failed; None if one failed by itself, or nobody is named."""
    for failure in failures:
        is_told = failure.rank in words or _is_consequence(tails.get(failure.rank, ()))
        if not failure.was_signalled and not is_told:
            return None
    votes = Counter(told.ranks[0] for told in words.values() if told.ranks and told.ranks[0] in names)
    return max(sorted(votes), key=votes.__getitem__, default=None)


def _describe_blamed(
    blamed: int,
    failures: Sequence[Failure],
    *,
    names: Mapping[int, str],
    tails: Mapping[int, Sequence[str]],
    words: Mapping[int, LastWords],
) -> list[str]:
    own = next((failure for failure in failures if failure.rank == blamed), None)
    how = "which ended with exit code 0" if own is None else _outcome(own, ())
    tellers = [rank for rank, told in words.items() if told.ranks[:1] == (blamed,)]
    teller = next((rank for rank in tellers if rank != blamed), tellers[0])
    report = [f"the job failed: {names[blamed]}, {how}", f"    {names[teller]} says: {words[teller].text}"]
    if own is not None and not own.was_signalled:
        report += [f"    {line}" for line in traceback_of(tails.get(blamed, ()))]
    return report + _describe_others(failures, blamed, names=names, tails=tails)


def _describe_others(
    failures: Sequence[Failure], cause: int, *, names: Mapping[int, str], tails: Mapping[int, Sequence[str]]
) -> list[str]:
    """Word what became of the others, in one line where that is the same."""
    alike: dict[str, dict[int, None]] = {}
    for failure in failures:
        if failure.rank != cause:
            outcome = without_teller(_outcome(failure, tails.get(failure.rank, ())))
            alike.setdefault(outcome, {})[failure.rank] = None  # once, however often it came back
    return [
        f"  then {name_ranks(ranks) if len(ranks) > 1 else names[min(ranks)]}: {outcome}"
        for outcome, ranks in alike.items()
    ]


def describe_restarts(attempts: Sequence[str], *, is_success: bool, gave_up: str | None) -> str:
    """Word, at the very end, why the job was started anew: ``attempts`` has the cause of each that failed."""
    causes = "; ".join(f"{number}. {cause}" for number, cause in enumerate(attempts, start=1))
    if is_success:
        return f"the job ended well when it was started for the {_ordinal(len(attempts) + 1)} time; before: {causes}"
    end = f"no further restart, as --restarts allows it {gave_up}" if gave_up else "ended"
    return f"{end}; attempts: {causes}"


def fate_of(
    failures: Sequence[Failure],
    *,
    names: Mapping[int, str],
    tails: Mapping[int, Sequence[str]],
    words: Mapping[int, LastWords] | None = None,
) -> str:
    """Word in a few words what ended an attempt: whom :func:`describe_failures` puts first, of the same."""
    blamed = _blamed(failures, tails, words or {}, names)
    rank = pick_cause(failures, tails).rank if blamed is None else blamed
    own = next((failure for failure in failures if failure.rank == rank), None)
    if own is not None and own.was_signalled:
        return f"{names[rank]} was {_outcome(own, ())}"
    return _fate(names[rank], Exit(code=0) if own is None else own.exit)


def _fate(name: str, how: Exit) -> str:
    return f"{name} ended with {how}" if how.signal_number is None else f"{name} was {how}"


def _ordinal(number: int) -> str:
    words = {2: "second", 3: "third"}
    return words.get(number, f"{number}th")


def traceback_of(tail: Sequence[str]) -> list[str]:
    """Find the last traceback in ``tail`` with the ones that led to it, or else its last lines."""
    starts = [number for number, line in enumerate(tail) if line.startswith(("Traceback (most", "Fatal Python error"))]
    return list(tail)[starts[0] if starts else -NUM_TAIL_LINES :]


def _explain(how: Exit) -> str:
    if how.signal_number is None:
        return str(how)
    why = {6: "abort", 7: "bus error", 9: "out of memory, or somebody's kill -9", 11: "a crash in native code"}
    reason = why.get(how.signal_number)
    return f"{how} ({reason})" if reason else str(how)


def _outcome(failure: Failure, tail: Sequence[str]) -> str:
    if failure.was_signalled:
        return f"ended by the launcher ({failure.exit})"
    if failure.exit.signal_number is not None:  # what it wrote last was before, of something else
        return _explain(failure.exit)
    last = next((line for line in reversed(tail) if line.strip()), "")
    return f"{failure.exit}: {last}" if last else str(failure.exit)


def _is_consequence(tail: Sequence[str]) -> bool:
    last = next((line for line in reversed(tail) if line.strip() and not line.startswith(" ")), "")
    kind, _, told = last.partition(":")
    return any(name in kind for name in CONSEQUENCES) and not any(fault in told for fault in OWN_FAULTS)


def _ranks(count: int) -> str:
    return "rank" if count == 1 else f"{count} ranks"
