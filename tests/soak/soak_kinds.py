"""The kinds of faults of a soak: who brings each about, what may come of it, and what it needs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
