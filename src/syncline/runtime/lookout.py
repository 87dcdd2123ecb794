"""Who holds the others up: every rank tells rank 0 every two seconds where it is, and rank 0 says what follows.

A report has sums since the start: seconds of its own in each phase, seconds waited, steps, bytes put on each link. Two
of them give the shares of a window, so no clocks are compared, and one that is lost matters little. They go straight to
rank 0, beside the heartbeats that every rank sends to every other anyway.

In a synchronous step everyone waits for the slowest, which therefore waits least: its own share of the time is larger
than the others' by what it costs them. What it does with that time is the reason, as far as it is known; a share is
never more than was measured. After StageFrontier (arXiv 2606.06751), which compares the stages of pipelines likewise.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from syncline.fabric.progress import BACKWARD, ELSEWHERE, FORWARD, PHASES, STEP, Progress
from syncline.runtime.control import ControlError
from syncline.topology import DirectedLink, Topology
from syncline.units import format_rate

REPORT_S = 2.0
WINDOW_S = 8.0
"""Shares are those of the last window, or of a longer one with so many steps:"""
MIN_STEPS = 3
LONGEST_S = 120.0
LEAST_COST, LEAST_FACTOR = 0.15, 1.25
"""Who holds others up has a share of its own that is larger than theirs by so much, and by such a factor."""
KEPT_COST = 0.08
"""Who was named stays named until it costs less."""
LEAST_USE, LEAST_WAIT = 0.6, 0.25
"""A link holds ranks up that is used for so much of the time, while they wait so much of it, and not much longer."""
_FIXED = struct.Struct("<BBQQQddddddddd")
_NOT_HEARD_S = 10.0
NUM_KEPT_LINES = 5
"""Of what was said, for those who look at the job now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceReport:
    """What a rank has done since it was connected."""

    phase: str
    is_waiting: bool
    num_calls: int
    num_steps: int
    total_s: float
    own_s: tuple[float, ...]
    """In each phase, without the waits in it."""
    waited_s: float
    steps_s: float
    link_bytes: tuple[int, ...]
    """What it has put on each link, in the order of :func:`rated_links`."""
    lacked_s: float = 0.0
    """In which one of its threads was ready to run, and had no processor."""
    num_samples: int = 0
    loss: float = math.nan
    """As the user said them, if they did."""

    def encode(self) -> bytes:
        """Return it as it travels."""
        state = PHASES.index(self.phase), self.is_waiting, self.num_calls, self.num_steps, self.num_samples
        fixed = _FIXED.pack(*state, self.loss, self.total_s, *self.own_s, self.waited_s, self.steps_s, self.lacked_s)
        return fixed + struct.pack(f"<{len(self.link_bytes)}Q", *self.link_bytes)

    @classmethod
    def decode(cls, body: bytes, num_links: int) -> PaceReport:
        """Read one; :class:`ControlError` for what is none."""
        try:
            phase, is_waiting, num_calls, num_steps, num_samples, loss, *seconds = _FIXED.unpack_from(body)
            link_bytes = struct.unpack(f"<{num_links}Q", body[_FIXED.size :])
        except struct.error as error:
            raise ControlError("of its pace what cannot be read") from error
        if phase >= len(PHASES) or not all(math.isfinite(one) and one >= 0 for one in seconds):
            raise ControlError("of its pace what cannot be")
        total_s, *own_s, waited_s, steps_s, lacked_s = seconds
        return cls(
            phase=PHASES[phase],
            is_waiting=bool(is_waiting),
            num_calls=num_calls,
            num_steps=num_steps,
            total_s=total_s,
            own_s=tuple(own_s),
            waited_s=waited_s,
            steps_s=steps_s,
            link_bytes=link_bytes,
            lacked_s=lacked_s,
            num_samples=num_samples,
            loss=loss,
        )


def rated_links(topology: Topology) -> dict[DirectedLink, float]:
    """Return each direction of a link whose rate is known, with that (bytes per second), in one order on all ranks."""
    both = [(DirectedLink(name, "up"), DirectedLink(name, "down")) for name, _ in topology.links()]
    found = {link: topology.bytes_per_s(link) for ways in both for link in ways}
    return {link: rate for link, rate in found.items() if math.isfinite(rate)}


def take_pace(progress: Progress, bytes_of: Mapping[DirectedLink, int], topology: Topology) -> PaceReport:
    """Return what this rank has done until now; ``bytes_of``: what it has put on each link."""
    own_s, waited_s = progress.own_s()
    rates = rated_links(topology)
    return PaceReport(
        phase=progress.phase,
        is_waiting=progress.is_idle,
        num_calls=progress.num_calls,
        num_steps=progress.num_steps,
        total_s=progress.total_s,
        own_s=tuple(own_s.values()),
        waited_s=waited_s,
        steps_s=progress.steps_s,
        link_bytes=tuple(bytes_of.get(link, 0) for link in rates),
        lacked_s=progress.shortage.seconds(),
        num_samples=progress.num_samples,
        loss=progress.loss,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank did with the time of a window; all are parts of one."""

    own: Mapping[str, float]
    waited: float
    lacked: float
    link_bytes_per_s: tuple[float, ...]

    @property
    def busy(self) -> float:
        """The part in which it waited for nobody."""
        return sum(self.own.values())


class Lookout:
    """What rank 0 has heard of all ranks, and what it says; told the time, and without any input or output.

    ``describe`` names a rank; ``behind_s`` is how long no step may be finished before it is said who is behind.
    """

    def __init__(self, topology: Topology, describe: Callable[[int], str], *, behind_s: float, now_s: float) -> None:
        self._rates = rated_links(topology)
        self._describe = describe
        self._behind_s = behind_s
        self._heard: dict[int, deque[tuple[float, PaceReport]]] = {}
        self._still_since_s: dict[int, float] = {}
        self._step_s = now_s
        self._next_behind_s = behind_s
        self._candidate = self._named = ""
        self._began_s = now_s
        self._said: deque[str] = deque(maxlen=NUM_KEPT_LINES)

    def hear(self, rank: int, report: PaceReport, now_s: float) -> None:
        """Take what a rank tells."""
        heard = self._heard.setdefault(rank, deque())
        last = heard[-1][1] if heard else None
        if last is None or (last.num_calls, last.is_waiting, last.phase) != (
            report.num_calls,
            report.is_waiting,
            report.phase,
        ):
            self._still_since_s[rank] = now_s
        if last is not None and report.num_steps > last.num_steps:
            self._step_s, self._next_behind_s = now_s, self._behind_s
        heard.append((now_s, report))
        while len(heard) > 2 and heard[1][0] < now_s - LONGEST_S:
            heard.popleft()

    def forget(self, rank: int) -> None:
        """Leave out a rank that is gone."""
        self._heard.pop(rank, None)

    def look(self, now_s: float) -> list[str]:
        """Return the lines that are to be said now."""
        said = []
        if now_s - self._step_s >= self._next_behind_s:
            self._next_behind_s = 2 * (now_s - self._step_s)
            if line := self._behind(now_s):
                said.append(line)
        found, text = self._holding_up(now_s)
        if found == self._candidate and found != self._named:  # twice in a row
            if found:
                said.append(text)
            elif now_s - self._step_s < WINDOW_S:
                said.append(f"{self._named} holds nobody up any more")
            self._named = found
        self._candidate = found
        self._said.extend(said)
        return said

    def view(self, now_s: float) -> dict[str, Any]:
        """Return what is known of all ranks now, over the last seconds, as JSON has it; what is not known is None."""
        ranks = [self._view_rank(rank, heard, now_s) for rank, heard in sorted(self._heard.items())]
        moved = [sum(each) for each in zip(*(one.pop("links") for one in ranks), strict=True)]
        use = {f"{link.child} {link.direction}": rate for link, rate in self._rates.items()}
        links = [
            {"link": name, "rate": rate, "use": bytes_per_s / rate}
            for (name, rate), bytes_per_s in zip(use.items(), moved, strict=bool(ranks))
        ]
        links.sort(key=lambda link: -link["use"])
        return {"seconds": now_s - self._began_s, "ranks": ranks, "links": links, "said": list(self._said)}

    def _view_rank(self, rank: int, heard: Sequence[tuple[float, PaceReport]], now_s: float) -> dict[str, Any]:
        end_s, last = heard[-1]
        first = next(report for at_s, report in heard if at_s >= end_s - WINDOW_S - REPORT_S)
        seconds = last.total_s - first.total_s
        per_s = 1 / seconds if seconds > 0 else 0.0
        return {
            "rank": rank,
            "name": self._describe(rank),
            "phase": last.phase,
            "is_waiting": last.is_waiting,
            "silent_s": now_s - end_s,
            "steps": last.num_steps,
            "steps_per_s": (last.num_steps - first.num_steps) * per_s,
            "samples_per_s": (last.num_samples - first.num_samples) * per_s if last.num_samples else None,
            "loss": last.loss if math.isfinite(last.loss) else None,
            "waited": (last.waited_s - first.waited_s) * per_s,
            "lacked": (last.lacked_s - first.lacked_s) * per_s,
            "links": [(b - a) * per_s for a, b in zip(first.link_bytes, last.link_bytes, strict=True)],
        }

    def _behind(self, now_s: float) -> str:
        waiting, behind = [], []
        for rank, heard in sorted(self._heard.items()):
            at_s, last = heard[-1]
            if last.is_waiting and self._still_since_s[rank] <= now_s - self._behind_s / 2:
                waiting.append(rank)
            elif now_s - at_s > _NOT_HEARD_S:
                said = f"said nothing for {now_s - at_s:.0f} s, and was {self._where(last)} before"
                behind.append(f"{self._describe(rank)} {said}")
            else:
                behind.append(f"{self._describe(rank)} is behind, {self._where(last)}")
        if not waiting:
            return ""
        who = "; ".join(behind[:3]) + (f"; so are {len(behind) - 3} more" if len(behind) > 3 else "")
        head = f"no step was finished for {now_s - self._step_s:.0f} s"
        return f"{head}: {who}; {len(waiting)} wait" if behind else f"{head}: all {len(waiting)} ranks wait"

    def _where(self, report: PaceReport) -> str:
        return f"in {report.phase}" if report.phase != ELSEWHERE else f"outside of {self._phases()}"

    def _phases(self) -> str:
        """Name the phases that are seen: a process group hears of no forward pass."""
        forward = PHASES.index(FORWARD)
        is_seen = any(heard[-1][1].own_s[forward] for heard in self._heard.values())
        return "forward, backward and step" if is_seen else "backward and step"

    def _share(self, rank: int, now_s: float) -> Share | None:
        heard = self._heard[rank]
        end_s, last = heard[-1]
        for start_s, first in reversed(heard):
            if end_s - start_s >= WINDOW_S and last.num_steps - first.num_steps >= MIN_STEPS:
                break
        else:
            return None
        seconds = last.total_s - first.total_s
        if seconds <= 0 or now_s - end_s > _NOT_HEARD_S:
            return None
        spent = zip(PHASES, last.own_s, first.own_s, strict=True)
        moved = zip(last.link_bytes, first.link_bytes, strict=True)
        return Share(
            own={phase: (later - earlier) / seconds for phase, later, earlier in spent},
            waited=(last.waited_s - first.waited_s) / seconds,
            lacked=(last.lacked_s - first.lacked_s) / seconds,
            link_bytes_per_s=tuple((later - earlier) / seconds for later, earlier in moved),
        )

    def _holding_up(self, now_s: float) -> tuple[str, str]:
        """Return the rank or link that holds the others up, and what to say; nothing where none is known to."""
        shares = {rank: share for rank in self._heard if (share := self._share(rank, now_s)) is not None}
        if len(shares) < 2:
            return "", ""
        slow = max(shares, key=lambda rank: (shares[rank].busy + 0.05 * (self._describe(rank) == self._named), -rank))
        others = [share for rank, share in shares.items() if rank != slow]
        name, usual = self._describe(slow), median(share.busy for share in others)
        cost = shares[slow].busy - usual
        if cost >= (KEPT_COST if name == self._named else LEAST_COST) and shares[slow].busy >= LEAST_FACTOR * usual:
            waited = median(share.waited for share in others), shares[slow].waited
            waits = f"they wait {waited[0]:.0%} of the time, and it {waited[1]:.0%}"
            why = self._reason(shares[slow], others) + _shortage(shares[slow], others, cost)
            return name, f"{name} holds the others up ({waits}): {why}"
        return self._full_link(list(shares.values()))

    def _reason(self, slow: Share, others: Sequence[Share]) -> str:
        usual = {phase: median(share.own[phase] for share in others) for phase in PHASES}
        excess = {phase: max(0.0, slow.own[phase] - usual[phase]) for phase in PHASES}
        computing = [phase for phase in (FORWARD, BACKWARD, STEP) if usual[phase] > 0]
        ratios = ", ".join(f"{phase} {slow.own[phase] / usual[phase]:.1f} x" for phase in computing)
        apart_part = excess[ELSEWHERE] / sum(excess.values())
        if FORWARD not in computing:  # what a group sees of computing tells of what it does not see
            theirs = sum(usual[phase] for phase in computing)
            is_slower = sum(slow.own[phase] for phase in computing) >= 1.5 * theirs > 0
            apart_part *= not (is_slower and apart_part < 0.9)
        if apart_part < 0.3:
            return f"it computes slower than they do ({ratios})"
        parts = slow.own[ELSEWHERE], usual[ELSEWHERE]
        apart = f"{parts[0]:.0%} of its time is outside of {self._phases()}, and {parts[1]:.0%} of theirs"
        if apart_part < 0.7:
            return f"{apart}, and it computes slower ({ratios})"
        return f"{apart}; its input is late, or it does other work there" if FORWARD in computing else apart

    def _full_link(self, shares: Sequence[Share]) -> tuple[str, str]:
        waited = median(share.waited for share in shares)
        moved = [sum(each) for each in zip(*(share.link_bytes_per_s for share in shares), strict=True)]
        used = {link: bytes_per_s / self._rates[link] for link, bytes_per_s in zip(self._rates, moved, strict=True)}
        fullest = max(used, key=lambda link: used[link], default=None)
        if fullest is None or waited < LEAST_WAIT or used[fullest] < max(LEAST_USE, 0.8 * waited):
            return "", ""
        name = f"the link of {fullest.child} {fullest.direction}"
        moves = f"{used[fullest]:.0%} of {format_rate(self._rates[fullest])} is used"
        return name, f"{name} holds the ranks up: {moves}, and they wait {waited:.0%} of the time"


def _shortage(slow: Share, others: Sequence[Share], cost: float) -> str:
    """Say that the rank lacked a processor, where that is half of what it costs the others."""
    usual = median(share.lacked for share in others)
    if slow.lacked - usual < cost / 2:
        return ""
    return (
        f"; for {slow.lacked:.0%} of the time one of its threads was ready and had no processor, {usual:.0%} of theirs"
    )
