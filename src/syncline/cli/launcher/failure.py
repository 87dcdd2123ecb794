"""Words what went wrong: which rank failed first, its traceback, and what became of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from syncline.cli.launcher.supervisor import Exit, Failure

NUM_TAIL_LINES = 20
# Errors that say "another rank is gone": a rank that ends with one of them is seldom the cause.
CONSEQUENCES = ("PeerLostError", "FabricClosedError", "RendezvousError", "DeadlineError", "DistNetworkError")


def pick_cause(failures: Sequence[Failure], tails: Mapping[int, Sequence[str]]) -> Failure:
    """Choose the failure to report: the first one that is no mere consequence of another, else the first."""
    for failure in failures:
        if not failure.was_signalled and not _is_consequence(tails.get(failure.rank, ())):
            return failure
    return failures[0]


def describe_first(name: str, how: Exit, *, num_living: int, grace_s: float) -> str:
    """Word, in one line, that the first rank has failed; the others go on if ``grace_s`` is infinite."""
    get, selves = ("gets", "itself") if num_living == 1 else ("get", "themselves")
    what = f"{get} {grace_s:g} s to end by {selves}" if math.isfinite(grace_s) else "may go on"
    rest = f"; the other {_ranks(num_living)} {what}" if num_living else ""
    return f"{name} ended with {how}{rest}" if how.signal_number is None else f"{name} was {how}{rest}"


def describe_failures(
    failures: Sequence[Failure], *, names: Mapping[int, str], tails: Mapping[int, Sequence[str]], went_on: bool = False
) -> list[str]:
    """Word the closing report; ``tails`` holds the last lines that each rank wrote to its standard error."""
    cause = pick_cause(failures, tails)
    head = f"the job went on without {len(failures)} of {_ranks(len(names))}" if went_on else "the job failed"
    report = [f"{head}: {names[cause.rank]}, {_explain(cause.exit)}"]
    report += [f"    {line}" for line in traceback_of(tails.get(cause.rank, ()))]
    report += [
        f"  then {names[failure.rank]}: {_outcome(failure, tails.get(failure.rank, ()))}"
        for failure in failures
        if failure is not cause
    ]
    return report


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
    last = next((line for line in reversed(tail) if line.strip()), "")
    return f"{failure.exit}: {last}" if last else str(failure.exit)


def _is_consequence(tail: Sequence[str]) -> bool:
    last = next((line for line in reversed(tail) if line.strip() and not line.startswith(" ")), "")
    return any(name in last.split(":", 1)[0] for name in CONSEQUENCES)


def _ranks(count: int) -> str:
    return "rank" if count == 1 else f"{count} ranks"
