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
import os
import resource
import struct
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from syncline.errors import escape_text
from syncline.fabric.progress import BACKWARD, ELSEWHERE, FORWARD, PHASES, STEP, Progress
from syncline.runtime.control import ControlError
from syncline.runtime.statistics import FleetStatistics, route_sums
from syncline.runtime.whereabouts import is_on_device, training_place
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
LEAST_LOST = 0.01
"""A link loses so much of what is sent on it, where that is worth a line: TCP then keeps far below its rate."""
MOST_SLOW_PART = 0.25
"""A link is slow that carries at most so much of its rate while a connection across it has something under way."""
LEAST_FAULTS_PER_S = 20.0
"""Times a second that a process waits for memory which is on a disk."""
SILENT_REPORTS = 3
"""Who has not told so many times in a row is silent."""
MOST_LINKS = 400
"""Of a report; where a rank uses more, those that carry least are left out."""
_FIXED = struct.Struct("<BBBQQQIQddddddddddHH")
_LINK = struct.Struct("<HQQII")
_MOST_PLACE_BYTES = 200
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
    link_bytes: tuple[int, ...]
    """What it has put on each link, in the order of :func:`watched_links`."""
    lost_bytes: tuple[int, ...] = ()
    """What of that TCP sent again as it was lost, likewise; a loss counts on all links of its path."""
    busy_s: tuple[tuple[float, float], ...] = ()
    """For how long its connections across each link had something under way: in all, and the one that had longest."""
    pid: int = 0
    num_faults: int = 0
    """How often one of its threads waited for memory that is on a disk."""
    place: str = ""
    """Where its training thread is, while it is outside of the phases and waits for nobody."""
    lacked_s: float = 0.0
    """In which one of its threads was ready to run, and had no processor."""
    is_on_device: bool = False
    """Whether the kernel says that the thread waits there for a disk or another device."""
    stored_s: float = 0.0
    """In which it wrote checkpoints to a disk, of its own time elsewhere."""
    num_samples: int = 0
    loss: float = math.nan
    """As the user said them, if they did."""

    def encode(self) -> bytes:
        """Return it as it travels."""
        moved = [
            (num_bytes, number, lost, *(round(1000 * one) for one in busy))
            for number, (num_bytes, lost, busy) in enumerate(
                zip(self.link_bytes, self.lost_bytes, self.busy_s, strict=True)
            )
            if num_bytes
        ]
        kept = sorted(moved, reverse=True)[:MOST_LINKS]
        place = self.place.encode()[:_MOST_PLACE_BYTES]
        state = (
            PHASES.index(self.phase),
            self.is_waiting,
            self.is_on_device,
            self.num_calls,
            self.num_steps,
            self.num_samples,
        )
        seconds = self.loss, self.total_s, *self.own_s, self.waited_s, self.steps_s, self.lacked_s, self.stored_s
        fixed = _FIXED.pack(*state, self.pid, self.num_faults, *seconds, len(kept), len(place))
        return fixed + b"".join(_LINK.pack(number, sent, *more) for sent, number, *more in kept) + place

    @classmethod
    def decode(cls, body: bytes, num_links: int) -> PaceReport:
        """Read one; :class:`ControlError` for what is none."""
        try:
            (phase, is_waiting, on_device, *counts, num_kept, num_place) = _FIXED.unpack_from(body)
            end = _FIXED.size + num_kept * _LINK.size
            moved = list(_LINK.iter_unpack(body[_FIXED.size : end]))
        except struct.error as error:
            raise ControlError("of its pace what cannot be read") from error
        num_calls, num_steps, num_samples, pid, num_faults, loss, *seconds = counts
        is_whole = len(moved) == num_kept and len(body) == end + num_place
        if not is_whole or phase >= len(PHASES) or any(number >= num_links for number, *_ in moved):
            raise ControlError("of its pace what cannot be read")
        if not all(math.isfinite(one) and one >= 0 for one in seconds):
            raise ControlError("of its pace what cannot be")
        sent = {number: num_bytes for number, num_bytes, *_ in moved}
        lost = {number: num_bytes for number, _, num_bytes, *_ in moved}
        busy_s = {number: (in_all / 1000, longest / 1000) for number, _, _, in_all, longest in moved}
        total_s, *own_s, waited_s, steps_s, lacked_s, stored_s = seconds
        return cls(
            phase=PHASES[phase],
            is_waiting=bool(is_waiting),
            num_calls=num_calls,
            num_steps=num_steps,
            total_s=total_s,
            own_s=tuple(own_s),
            waited_s=waited_s,
            steps_s=steps_s,
            link_bytes=tuple(sent.get(number, 0) for number in range(num_links)),
            lost_bytes=tuple(lost.get(number, 0) for number in range(num_links)),
            busy_s=tuple(busy_s.get(number, (0.0, 0.0)) for number in range(num_links)),
            pid=pid,
            num_faults=num_faults,
            place=escape_text(body[end:], max_chars=_MOST_PLACE_BYTES),
            lacked_s=lacked_s,
            is_on_device=bool(on_device),
            stored_s=stored_s,
            num_samples=num_samples,
            loss=loss,
        )


def watched_links(topology: Topology) -> dict[DirectedLink, float]:
    """Return each direction of a link with its rate (bytes per second; without end if unknown), alike on all ranks."""
    both = [(DirectedLink(name, "up"), DirectedLink(name, "down")) for name, _ in topology.links()]
    return {link: topology.bytes_per_s(link) for ways in both for link in ways}


def take_pace(progress: Progress, statistics: FleetStatistics, topology: Topology) -> PaceReport:
    """Return what this rank has done until now."""
    own_s, waited_s = progress.own_s()
    links = watched_links(topology)
    lost = route_sums(statistics.fabric, topology, "lost_bytes")
    is_elsewhere = progress.phase == ELSEWHERE and not progress.is_waiting
    return PaceReport(
        phase=progress.phase,
        is_waiting=progress.is_idle,
        num_calls=progress.num_calls,
        num_steps=progress.num_steps,
        total_s=progress.total_s,
        own_s=tuple(own_s.values()),
        waited_s=waited_s,
        steps_s=progress.steps_s,
        link_bytes=tuple(statistics.link_bytes.get(link, 0) for link in links),
        lost_bytes=tuple(lost.get(link, 0) for link in links),
        busy_s=_busy_s(statistics, topology, links),
        pid=os.getpid(),
        num_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        place=training_place(progress.thread) if is_elsewhere else "",
        lacked_s=progress.shortage.seconds(),
        is_on_device=is_elsewhere and is_on_device(progress.thread),
        stored_s=progress.stored_until_now_s,
        num_samples=progress.num_samples,
        loss=progress.loss,
    )


def _busy_s(
    statistics: FleetStatistics, topology: Topology, links: Mapping[DirectedLink, float]
) -> tuple[tuple[float, float], ...]:
    across: defaultdict[DirectedLink, list[float]] = defaultdict(list)
    for one in statistics.fabric.connections:
        if one.busy_s:
            for link in topology.route(statistics.fabric.rank, one.peer):
                across[link].append(one.busy_s)
    return tuple((sum(across[link]), max(across[link], default=0.0)) for link in links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank did with the time of a window; all are parts of one."""

    own: Mapping[str, float]
    waited: float
    lacked: float
    link_bytes_per_s: tuple[float, ...]
    lost_bytes_per_s: tuple[float, ...]
    busy: tuple[tuple[float, float], ...]
    faults_per_s: float
    stored: float
    places: tuple[str, ...]
    """Where its training thread was seen, whenever that was outside of the phases."""
    num_on_device: int
    """How often it waited for a disk or another device there."""

    @property
    def worked(self) -> float:
        """The part in which it waited for nobody."""
        return sum(self.own.values())


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
        self._rates = watched_links(topology)
        self._describe = describe
        self._examine = examine
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
        lost = [sum(each) for each in zip(*(one.pop("lost") for one in ranks), strict=True)]
        links = [
            {"link": str(link), "rate": rate, "use": sent / rate, "lost": gone / sent if sent else 0.0}
            for (link, rate), sent, gone in zip(self._rates.items(), moved, lost, strict=bool(ranks))
            if math.isfinite(rate)
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
            "phase": last.phase if last.num_steps or last.phase != ELSEWHERE else STARTING,
            "is_waiting": last.is_waiting,
            "silent_s": now_s - end_s,
            "steps": last.num_steps,
            "steps_per_s": (last.num_steps - first.num_steps) * per_s,
            "samples_per_s": (last.num_samples - first.num_samples) * per_s if last.num_samples else None,
            "loss": last.loss if math.isfinite(last.loss) else None,
            "waited": (last.waited_s - first.waited_s) * per_s,
            "lacked": (last.lacked_s - first.lacked_s) * per_s,
            "links": [(b - a) * per_s for a, b in zip(first.link_bytes, last.link_bytes, strict=True)],
            "lost": [(b - a) * per_s for a, b in zip(first.lost_bytes, last.lost_bytes, strict=True)],
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
        moved = zip(last.link_bytes, first.link_bytes, strict=True)
        lost = zip(last.lost_bytes, first.lost_bytes, strict=True)
        return Share(
            own={phase: (later - earlier) / seconds for phase, later, earlier in spent},
            waited=(last.waited_s - first.waited_s) / seconds,
            lacked=(last.lacked_s - first.lacked_s) / seconds,
            link_bytes_per_s=tuple((later - earlier) / seconds for later, earlier in moved),
            lost_bytes_per_s=tuple((later - earlier) / seconds for later, earlier in lost),
            busy=tuple(
                (max(0.0, later[0] - earlier[0]) / seconds, max(0.0, later[1] - earlier[1]) / seconds)
                for later, earlier in zip(last.busy_s, first.busy_s, strict=True)
            ),
            faults_per_s=(last.num_faults - first.num_faults) / seconds,
            stored=(last.stored_s - first.stored_s) / seconds,
            places=tuple(report.place for _, report in heard[start + 1 :] if report.place),
            num_on_device=sum(report.is_on_device for _, report in heard[start + 1 :]),
        )

    def _holding_up(self, now_s: float) -> tuple[str, str]:
        """Return the rank or link that holds the others up, and what to say; nothing where none is known to."""
        silent = [
            rank
            for rank, heard in self._heard.items()
            if now_s - heard[-1][0] > self._silent_s and heard[-1][1].num_steps  # before, imports may keep it silent
        ]
        if silent:
            more = f"; {len(silent) - 1} more are silent" if len(silent) > 1 else ""
            return self._describe(min(silent)), self._silence(min(silent), now_s) + more
        until_s = min((heard[-1][0] for heard in self._heard.values()), default=now_s)
        shares = {rank: share for rank in self._heard if (share := self._share(rank, until_s)) is not None}
        if len(shares) < 2:
            return "", ""
        slow = max(shares, key=lambda rank: (shares[rank].worked + 0.05 * (self._describe(rank) == self._named), -rank))
        others = [share for rank, share in shares.items() if rank != slow]
        name, usual = self._describe(slow), median(share.worked for share in others)
        cost = shares[slow].worked - usual
        if cost >= (KEPT_COST if name == self._named else LEAST_COST) and shares[slow].worked >= LEAST_FACTOR * usual:
            waited = median(share.waited for share in others), shares[slow].waited
            waits = f"they wait {waited[0]:.0%} of the time, and it {waited[1]:.0%}"
            why = self._reason(shares[slow], others) + _shortage(shares[slow], others, cost)
            why += _storing(shares[slow], others, cost) + _swapping(shares[slow], others)
            return name, f"{name} holds the others up ({waits}): {why}"
        return self._bad_link(list(shares.values()))

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
        (place, seen), *_ = Counter(slow.places).most_common(1) or [("", 0)]
        if place:
            return f"{apart}; at {seen} of {len(slow.places)} looks it was {place}"
        return f"{apart}; its input is late, or it does other work there" if FORWARD in computing else apart

    def _bad_link(self, shares: Sequence[Share]) -> tuple[str, str]:
        """Return the link that is full, or else the one that loses what is sent on it, while ranks wait."""
        waited = median(share.waited for share in shares)
        sent = [sum(each) for each in zip(*(share.link_bytes_per_s for share in shares), strict=True)]
        gone = [sum(each) for each in zip(*(share.lost_bytes_per_s for share in shares), strict=True)]
        used = {link: bytes_per_s / rate for (link, rate), bytes_per_s in zip(self._rates.items(), sent, strict=True)}
        lost = {link: gone / max(one, 1.0) for link, one, gone in zip(self._rates, sent, gone, strict=True)}
        if waited < LEAST_WAIT or not used:
            return "", ""
        fullest = max(used, key=lambda link: used[link])
        if used[fullest] >= max(LEAST_USE, 0.8 * waited):
            also = f", {lost[fullest]:.0%} of what is sent there is lost" if lost[fullest] >= LEAST_LOST else ""
            name = f"the link of {fullest}"
            moves = f"{used[fullest]:.0%} of {format_rate(self._rates[fullest])} is used{also}"
            return name, f"{name} holds the ranks up: {moves}, and they wait {waited:.0%} of the time"
        worst = max(lost.values())
        if worst < LEAST_LOST:
            return self._slow_link(shares, sent, waited)
        # What lost something counts on its whole path; the link at fault has the largest part, with those whose all
        # traffic crosses it too.
        names = [str(link) for link, part in lost.items() if part >= 0.8 * worst]
        name = f"the link{'s' * (len(names) > 1)} of {' and '.join(names[:3])}"
        what = f"{worst:.1%} of what is sent there is lost, and sent again"
        return name, f"{name} hold{'s' * (len(names) < 2)} the ranks up: {what}; they wait {waited:.0%} of the time"

    def _slow_link(self, shares: Sequence[Share], sent: Sequence[float], waited: float) -> tuple[str, str]:
        """Return the link that is far below its rate though something is under way there for as long as ranks wait."""
        in_all, found = {}, {}
        for place, (link, rate) in enumerate(self._rates.items()):
            longest = min(1.0, max(share.busy[place][1] for share in shares))
            in_all[link] = sum(share.busy[place][0] for share in shares)
            if math.isfinite(rate) and longest >= 0.8 * waited and sent[place] <= MOST_SLOW_PART * longest * rate:
                found[link] = longest, sent[place] / longest, rate
        if not found:
            return "", ""
        # A path has several links; that at fault has been busy for most of its connections.
        most = max(in_all[link] for link in found)
        names = [link for link in found if in_all[link] >= 0.8 * most]
        longest, carried, rate = found[max(names, key=in_all.__getitem__)]
        name = f"the link{'s' * (len(names) > 1)} of {' and '.join(map(str, names[:3]))}"
        what = (
            f"messages were under way there for {longest:.0%} of the time, at {format_rate(carried)} of "
            f"{format_rate(rate)}"
        )
        return name, f"{name} hold{'s' * (len(names) < 2)} the ranks up: {what}; they wait {waited:.0%} of the time"


def report_interval_s(num_ranks: int) -> float:
    """Return how often each of so many ranks tells of its pace."""
    return max(REPORT_S, num_ranks / 64)


def _swapping(slow: Share, others: Sequence[Share]) -> str:
    """Say that the rank's memory is on a disk, where it waits for that much more often than the others do."""
    usual = median(share.faults_per_s for share in others)
    if slow.faults_per_s < max(LEAST_FAULTS_PER_S, 4 * usual):
        return ""
    return (
        f"; {slow.faults_per_s:.0f} times a second it waited for memory that is on a disk (swapped out, or of a file; "
        f"major page faults), they {usual:.0f} times"
    )


def _storing(slow: Share, others: Sequence[Share], cost: float) -> str:
    """Say that the rank wrote checkpoints, where that is half of its cost, and how often it waited for a disk."""
    usual, said = median(share.stored for share in others), ""
    if slow.stored - usual >= cost / 2:
        said = f"; for {slow.stored:.0%} of the time it wrote a checkpoint to its disk, {usual:.0%} of theirs"
    if slow.num_on_device > max(1, *(share.num_on_device for share in others)):
        said += f"; at {slow.num_on_device} of {len(slow.places)} looks it waited for a disk or another device"
    return said


def _shortage(slow: Share, others: Sequence[Share], cost: float) -> str:
    """Say that the rank lacked a processor, where that is half of what it costs the others."""
    usual = median(share.lacked for share in others)
    if slow.lacked - usual < cost / 2:
        return ""
    return (
        f"; for {slow.lacked:.0%} of the time one of its threads was ready and had no processor, {usual:.0%} of theirs"
    )
