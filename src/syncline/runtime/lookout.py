"""Who holds the others up: every rank tells rank 0 every two seconds where it is, and rank 0 says what follows.

A report has sums since the start: seconds of its own in each phase, seconds waited, steps, bytes put on each link. Two
of them give the shares of a window, so no clocks are compared, and one that is lost matters little. They go straight to
rank 0, beside the heartbeats that every rank sends to every other anyway.

In a synchronous step everyone waits for the slowest, which therefore waits least: its own share of the time is larger
than the others' by what it costs them. What it does with that time is the reason, as far as it is known; a share is
never more than was measured. After StageFrontier (arXiv 2606.06751), which compares the stages of pipelines likewise.
"""

from __future__ import annotations

import json
import math
import os
import resource
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

from numpy import median

from syncline.errors import escape_text
from syncline.fabric import FabricStatistics
from syncline.fabric.progress import BACKWARD, ELSEWHERE, FORWARD, PHASES, STEP, Progress
from syncline.runtime.control import ControlError
from syncline.runtime.link_faults import Flow, LinkLoads, LinkWatch
from syncline.runtime.statistics import FleetStatistics
from syncline.runtime.whereabouts import NO_LOOKS, Looks, ThreadWatch
from syncline.topology import Topology

REPORT_S = 2.0
WINDOW_S = 8.0
"""Shares are those of the last window, or of a longer one with so many steps:"""
MIN_STEPS = 3
LONGEST_S = 120.0
LEAST_COST, LEAST_FACTOR = 0.15, 1.25
"""Who holds others up has a share of its own that is larger than theirs by so much, and by such a factor."""
KEPT_COST = 0.08
"""Who was named stays named until it costs less."""
LEAST_ON_DEVICE = 0.3
"""Who is seen to wait for a disk or another device at so many looks is slow by that."""
LEAST_FAULTS_PER_S = 20.0
"""Times a second that a process waits for memory which is on a disk."""
SILENT_REPORTS = 3
"""Who has not told so many times in a row is silent."""
MOST_FLOWS = 250
"""Of a report; where a rank sends to more, those that carry least are left out."""
_MOST_PLACE_CHARS = 200
STARTING = "starting"
"""Outside of the phases while no step is finished: it imports, reads data, or compiles."""
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
    flows: Mapping[int, Flow]
    """By the rank that it sends to."""
    pid: int = 0
    num_faults: int = 0
    """How often one of its threads waited for memory that is on a disk."""
    looks: Looks = NO_LOOKS
    """Where its training thread was seen, whenever that was outside of the phases and waited for nobody."""
    place: str = ""
    """Where it was seen most often since the last report, outside of what those are for;"""
    num_at_place: int = 0
    """and how often."""
    lacked_s: float = 0.0
    """In which one of its threads was ready to run, and had no processor."""
    stored_s: float = 0.0
    """In which it wrote checkpoints to a disk, of its own time elsewhere."""
    num_samples: int = 0
    loss: float = math.nan
    """As the user said them, if they did."""

    def encode(self) -> bytes:
        """Return it as it travels."""
        kept = sorted(self.flows.items(), key=lambda one: -one[1].sent_bytes)[:MOST_FLOWS]
        return json.dumps(asdict(replace(self, flows=dict(kept), place=self.place[:_MOST_PLACE_CHARS]))).encode()

    @classmethod
    def decode(cls, body: bytes, num_ranks: int) -> PaceReport:
        """Read one; :class:`ControlError` for what is none."""
        try:
            told = json.loads(body)
            told["flows"] = {int(peer): Flow(*flow) for peer, flow in told["flows"].items()}
            told["looks"], told["own_s"] = Looks(*told["looks"]), tuple(told["own_s"])
            told["place"] = escape_text(told["place"], max_chars=_MOST_PLACE_CHARS)
            report = cls(**told)
            numbers = [getattr(report, name) for name in _NUMBERS]
            numbers += [*report.own_s, *report.looks, *chain.from_iterable(report.flows.values())]
            is_possible = all(math.isfinite(one) and one >= 0 for one in numbers) and isinstance(report.loss, float)
            is_known = report.phase in PHASES and len(report.own_s) == len(PHASES)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ControlError("of its pace what cannot be read") from error
        if not (is_possible and is_known and all(0 <= peer < num_ranks for peer in report.flows)):
            raise ControlError("of its pace what cannot be")
        return report


_NUMBERS = [one.name for one in fields(PaceReport) if one.type in ("int", "float") and one.name != "loss"]
"""All but the loss, which may be any number."""


def take_pace(progress: Progress, statistics: FleetStatistics, watch: ThreadWatch) -> PaceReport:
    """Return what this rank has done until now."""
    own_s, waited_s = progress.own_s()
    place, num_at_place = watch.take_place()
    return PaceReport(
        phase=progress.phase,
        is_waiting=progress.is_idle,
        num_calls=progress.num_calls,
        num_steps=progress.num_steps,
        total_s=progress.total_s,
        own_s=tuple(own_s.values()),
        waited_s=waited_s,
        steps_s=progress.steps_s,
        flows=_flows(statistics.fabric),
        pid=os.getpid(),
        num_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        looks=watch.looks,
        place=place,
        num_at_place=num_at_place,
        lacked_s=progress.shortage.seconds(),
        stored_s=progress.stored_until_now_s,
        num_samples=progress.num_samples,
        loss=progress.loss,
    )


def _flows(fabric: FabricStatistics) -> dict[int, Flow]:
    """Return what was sent to each peer; its connections are busy together, so the longest counts."""
    found: dict[int, Flow] = {}
    for one in fabric.connections:
        if one.sent_bytes:
            flow = found.get(one.peer, Flow(0, 0, 0.0))
            busy_s = max(flow.busy_s, one.busy_s)
            found[one.peer] = Flow(flow.sent_bytes + one.sent_bytes, flow.lost_bytes + one.lost_bytes, busy_s)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank did with the time of a window; all are parts of one."""

    own: Mapping[str, float]
    waited: float
    lacked: float
    flows: Mapping[int, Flow]
    """Of a second, by the rank that it sends to."""
    faults_per_s: float
    stored: float
    looks: Looks
    places: Mapping[str, int]
    """Where its training thread was seen outside of the phases, and how often."""

    @property
    def worked(self) -> float:
        """The part in which it waited for nobody."""
        return sum(self.own.values())


class HeldUp(NamedTuple):
    """The rank or the links that hold the others up, and what is said of it; a link that is only full has no fault."""

    name: str
    text: str
    is_fault: bool = True


NOBODY = HeldUp("", "", False)


class Lookout:
    """What rank 0 has heard of all ranks, and what it says; told the time, and without any input or output.

    ``describe`` names a rank, ``examine`` says what else is known of one that is silent, by its number and process;
    ``behind_s`` is how long no step may be finished before it is said who is behind.
    """

    def __init__(
        self,
        topology: Topology,
        describe: Callable[[int], str],
        examine: Callable[[int, int], str],
        *,
        behind_s: float,
        now_s: float,
    ) -> None:
        self._links = LinkWatch(topology)
        self._describe = describe
        self._examine = examine
        self._behind_s = behind_s
        self._heard: dict[int, deque[tuple[float, PaceReport]]] = {}
        self._still_since_s: dict[int, float] = {}
        self._step_s = now_s
        self._next_behind_s = behind_s
        self._candidate = self._named = NOBODY
        self._bad_links: tuple[str, ...] = ()
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

    def last_heard(self, rank: int, now_s: float) -> tuple[float | None, int]:
        """Return for how long a rank has told nothing, and its process; None and 0 if it never told anything."""
        heard = self._heard.get(rank)
        return (now_s - heard[-1][0], heard[-1][1].pid) if heard else (None, 0)

    def look(self, now_s: float) -> list[str]:
        """Return the lines that are to be said now."""
        said = []
        if now_s - self._step_s >= self._next_behind_s:
            self._next_behind_s = 2 * (now_s - self._step_s)
            if line := self._behind(now_s):
                said.append(line)
        found = self._holding_up(now_s)
        if (found.name, found.is_fault) == (self._candidate.name, self._candidate.is_fault):  # twice in a row
            if found.name and (found.name != self._named.name or found.is_fault > self._named.is_fault):
                said.append(found.text)
            elif found.name != self._named.name and now_s - self._step_s < WINDOW_S:
                said.append(f"{self._named.name} {_hold(self._named.name)} nobody up any more")
            self._named = found
        self._candidate = found
        self._said.extend(said)
        return said

    def view(self, now_s: float) -> dict[str, Any]:
        """Return what is known of all ranks now, over the last seconds, as JSON has it; what is not known is None."""
        ranks = [self._view_rank(rank, heard, now_s) for rank, heard in sorted(self._heard.items())]
        moved = {rank: _flows_between(*self._window(heard)) for rank, heard in self._heard.items()}
        flows = {(rank, peer): flow for rank, one in moved.items() for peer, flow in one.items()}
        loads = LinkLoads(flows, self._links)
        links: list[dict[str, Any]] = [
            {"link": str(link), "rate": rate, "use": loads.use(link), "lost": loads.lost(link)}
            for link, rate in self._links.rates.items()
            if ranks and math.isfinite(rate)
        ]
        links.sort(key=lambda link: -link["use"])
        return {"seconds": now_s - self._began_s, "ranks": ranks, "links": links, "said": list(self._said)}

    @staticmethod
    def _window(heard: Sequence[tuple[float, PaceReport]]) -> tuple[PaceReport, PaceReport, float]:
        """Return the first and the last report of the last window, and what makes a second of it."""
        end_s, last = heard[-1]
        first = next(report for at_s, report in heard if at_s >= end_s - WINDOW_S - REPORT_S)
        seconds = last.total_s - first.total_s
        return first, last, 1 / seconds if seconds > 0 else 0.0

    def _view_rank(self, rank: int, heard: Sequence[tuple[float, PaceReport]], now_s: float) -> dict[str, Any]:
        first, last, per_s = self._window(heard)
        return {
            "rank": rank,
            "name": self._describe(rank),
            "phase": last.phase if last.num_steps or last.phase != ELSEWHERE else STARTING,
            "is_waiting": last.is_waiting,
            "silent_s": now_s - heard[-1][0],
            "steps": last.num_steps,
            "steps_per_s": (last.num_steps - first.num_steps) * per_s,
            "samples_per_s": (last.num_samples - first.num_samples) * per_s if last.num_samples else None,
            "loss": last.loss if math.isfinite(last.loss) else None,
            "waited": (last.waited_s - first.waited_s) * per_s,
            "lacked": (last.lacked_s - first.lacked_s) * per_s,
        }

    def _behind(self, now_s: float) -> str:
        waiting, behind = [], []
        for rank, heard in sorted(self._heard.items()):
            at_s, last = heard[-1]
            if last.is_waiting and self._still_since_s[rank] <= now_s - self._behind_s / 2:
                waiting.append(rank)
            elif now_s - at_s > self._silent_s:
                behind.append(self._silence(rank, now_s))
            else:
                behind.append(f"{self._describe(rank)} is behind, {self._where(last)}")
        if not waiting:
            return ""
        who = "; ".join(behind[:3]) + (f"; so are {len(behind) - 3} more" if len(behind) > 3 else "")
        head = f"no step was finished for {now_s - self._step_s:.0f} s"
        return f"{head}: {who}; {len(waiting)} wait" if behind else f"{head}: all {len(waiting)} ranks wait"

    @property
    def _silent_s(self) -> float:
        return SILENT_REPORTS * report_interval_s(len(self._heard))

    def _silence(self, rank: int, now_s: float) -> str:
        """Say that a rank tells nothing, where it was when it did, and what else is known of it."""
        at_s, last = self._heard[rank][-1]
        known = f"{self._describe(rank)} has told nothing for {now_s - at_s:.0f} s, and was {self._where(last)} before"
        return f"{known}; {self._examine(rank, last.pid)}"

    def _where(self, report: PaceReport) -> str:
        if report.phase != ELSEWHERE:
            return f"in {report.phase}"
        return f"outside of {self._phases()}" if report.num_steps else "before its first step"

    def _phases(self) -> str:
        """Name the phases that are seen: a process group hears of no forward pass."""
        forward = PHASES.index(FORWARD)
        is_seen = any(heard[-1][1].own_s[forward] for heard in self._heard.values())
        return "forward, backward and step" if is_seen else "backward and step"

    def _share(self, rank: int, until_s: float) -> Share | None:
        """Return what a rank did with its last window, which ends at about ``until_s``, for all alike."""
        heard = [entry for entry in self._heard[rank] if entry[0] <= until_s + REPORT_S / 2]
        if not heard:
            return None
        end_s, last = heard[-1]
        longs = (
            number
            for number, (start_s, report) in enumerate(heard)
            if report.num_steps and end_s - start_s >= WINDOW_S and last.num_steps - report.num_steps >= MIN_STEPS
        )
        start = max(longs, default=None)
        if start is None:
            return None
        first = heard[start][1]
        seconds = last.total_s - first.total_s
        if seconds <= 0:
            return None
        spent = zip(PHASES, last.own_s, first.own_s, strict=True)
        own = {phase: (later - earlier) / seconds for phase, later, earlier in spent}
        looks = Looks(*(later - earlier for later, earlier in zip(last.looks, first.looks, strict=True)))
        if not last.own_s[PHASES.index(FORWARD)]:
            own, looks = _divided(own, looks)
        places: Counter[str] = Counter()
        for _, report in heard[start + 1 :]:
            places[report.place] += report.num_at_place
        return Share(
            own=own,
            waited=(last.waited_s - first.waited_s) / seconds,
            lacked=(last.lacked_s - first.lacked_s) / seconds,
            flows=_flows_between(first, last, 1 / seconds),
            faults_per_s=(last.num_faults - first.num_faults) / seconds,
            stored=(last.stored_s - first.stored_s) / seconds,
            looks=looks,
            places=places,
        )

    def _holding_up(self, now_s: float) -> HeldUp:
        """Return who is known to hold the others up."""
        silent = [
            rank
            for rank, heard in self._heard.items()
            if now_s - heard[-1][0] > self._silent_s and heard[-1][1].num_steps  # before, imports may keep it silent
        ]
        if silent:
            more = f"; {len(silent) - 1} more are silent" if len(silent) > 1 else ""
            return HeldUp(self._describe(min(silent)), self._silence(min(silent), now_s) + more)
        until_s = min((heard[-1][0] for heard in self._heard.values()), default=now_s)
        shares = {rank: share for rank in self._heard if (share := self._share(rank, until_s)) is not None}
        if len(shares) < 2:
            return NOBODY
        slow = max(
            shares, key=lambda rank: (shares[rank].worked + 0.05 * (self._describe(rank) == self._named.name), -rank)
        )
        others = [share for rank, share in shares.items() if rank != slow]
        name, usual = self._describe(slow), median([share.worked for share in others])
        cost = shares[slow].worked - usual
        if (
            cost >= (KEPT_COST if name == self._named.name else LEAST_COST)
            and shares[slow].worked >= LEAST_FACTOR * usual
        ):
            waited = median([share.waited for share in others]), shares[slow].waited
            waits = f"they wait {waited[0]:.0%} of the time, and it {waited[1]:.0%}"
            why = self._reason(shares[slow], others) + _shortage(shares[slow], others, cost)
            why += _storing(shares[slow], others, cost) + _swapping(shares[slow], others)
            return HeldUp(name, f"{name} holds the others up ({waits}): {why}")
        return self._bad_link(shares)

    def _reason(self, slow: Share, others: Sequence[Share]) -> str:
        usual = {phase: median([share.own[phase] for share in others]) for phase in PHASES}
        excess = {phase: max(0.0, slow.own[phase] - usual[phase]) for phase in PHASES}
        computing = [phase for phase in (FORWARD, BACKWARD, STEP) if usual[phase] > 0]
        factors = {phase: slow.own[phase] / usual[phase] for phase in computing}
        ratios = ", ".join(f"{phase} {factor:.1f} x" for phase, factor in factors.items() if factor >= 0.95)
        apart_part = excess[ELSEWHERE] / sum(excess.values())
        if apart_part < 0.3:
            return f"it computes slower than they do ({ratios})"
        parts = slow.own[ELSEWHERE], usual[ELSEWHERE]
        phases = "forward, backward and step" if FORWARD in computing else "backward and step"
        apart = f"{parts[0]:.0%} of its time is outside of {phases}, and {parts[1]:.0%} of theirs"
        if apart_part < 0.7:
            return f"{apart}, and it computes slower ({ratios})"
        place = max(slow.places, key=lambda one: slow.places[one], default="")
        if place:
            return f"{apart}; at {slow.places[place]} of {slow.looks.num_looks} looks it was {place}"
        return f"{apart}; its input is late, or it does other work there" if FORWARD in computing else apart

    def _bad_link(self, shares: Mapping[int, Share]) -> HeldUp:
        """Return the links that hold ranks up; who was named stays named while it is among them."""
        flows = {(rank, peer): flow for rank, share in shares.items() for peer, flow in share.flows.items()}
        links, how, is_fault = self._links.find_bad(flows, median([share.waited for share in shares.values()]))
        if set(links) & set(self._bad_links):
            if _name_of(self._bad_links) == self._named.name:
                links = self._bad_links
            elif _name_of(self._bad_links) == self._candidate.name:
                self._candidate = self._candidate._replace(name=_name_of(links))
        self._bad_links = links
        name = _name_of(links)
        return HeldUp(name, f"{name} {_hold(name)} the ranks up: {how}", is_fault) if links else NOBODY


def _name_of(links: Sequence[str]) -> str:
    return f"the link{'s' * (len(links) > 1)} of {' and '.join(links)}"


def _hold(name: str) -> str:
    return "hold" if name.startswith("the links") else "holds"


def _divided(own: Mapping[str, float], looks: Looks) -> tuple[dict[str, float], Looks]:
    """Divide the time elsewhere by what was seen there, where nobody says when a forward pass begins."""
    if not looks.num_looks:
        return dict(own), looks
    parts = {FORWARD: looks.num_forward / looks.num_looks, BACKWARD: looks.num_backward / looks.num_looks}
    moved = {phase: part * own[ELSEWHERE] for phase, part in parts.items()}
    left = own[ELSEWHERE] - sum(moved.values())
    divided = {phase: own[phase] + moved.get(phase, 0.0) for phase in own} | {ELSEWHERE: left}
    return divided, looks._replace(num_looks=looks.num_apart, num_forward=0, num_backward=0)


def _flows_between(first: PaceReport, last: PaceReport, per_s: float) -> dict[int, Flow]:
    found = {}
    for peer, flow in last.flows.items():
        before = first.flows.get(peer, Flow(0, 0, 0.0))
        found[peer] = Flow(*(max(0.0, later - earlier) * per_s for later, earlier in zip(flow, before, strict=True)))
    return found


def report_interval_s(num_ranks: int) -> float:
    """Return how often each of so many ranks tells of its pace."""
    return max(REPORT_S, num_ranks / 64)


def _swapping(slow: Share, others: Sequence[Share]) -> str:
    """Say that the rank's memory is on a disk, where it waits for that much more often than the others do."""
    usual = median([share.faults_per_s for share in others])
    if slow.faults_per_s < max(LEAST_FAULTS_PER_S, 4 * usual):
        return ""
    return (
        f"; {slow.faults_per_s:.0f} times a second it waited for memory that is on a disk (swapped out, or of a file; "
        f"major page faults), they {usual:.0f} times"
    )


def _storing(slow: Share, others: Sequence[Share], cost: float) -> str:
    """Say that the rank wrote checkpoints, where that is half of its cost, and how often it waited for a disk."""
    usual, said = median([share.stored for share in others]), ""
    if slow.stored - usual >= cost / 2:
        said = f"; for {slow.stored:.0%} of the time it wrote a checkpoint to its disk, {usual:.0%} of theirs"
    on_device, usually = slow.looks.num_on_device, max(share.looks.num_on_device for share in others)
    if on_device > max(LEAST_ON_DEVICE * slow.looks.num_looks, usually):
        said += f"; at {on_device} of {slow.looks.num_looks} looks it waited for a disk or another device"
    return said


def _shortage(slow: Share, others: Sequence[Share], cost: float) -> str:
    """Say that the rank lacked a processor, where that is half of what it costs the others."""
    usual = median([share.lacked for share in others])
    if slow.lacked - usual < cost / 2:
        return ""
    return (
        f"; for {slow.lacked:.0%} of the time one of its threads was ready and had no processor, {usual:.0%} of theirs"
    )
