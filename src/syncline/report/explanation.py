"""Where the time of a step goes: its critical path, and what one change would give.

The path of a step is followed back from the end of the last rank. While that rank computed, the time is its own. Where
it waited, the collective counts that ended the wait: from the time at which the last rank had begun it, it is the
network's, and before that the path goes on at that rank. So every second of a step has one reason, which is measured;
what the trace does not show is counted as unknown. Ranks of several machines are compared by their wall clocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import TypeVar

from syncline.report.job_trace import JobTrace, RankTrace, Span
from syncline.topology import DirectedLink
from syncline.units import format_duration, format_rate, format_size

T = TypeVar("T")

NETWORK, LATE, UNKNOWN, ELSEWHERE = "network", "late", "unknown", "elsewhere"
"""Late is a rank that has all that it waited for, and whose threads have not gone on yet."""
COMPUTING = ("forward", "backward", "step")
MEANING = {
    "forward": "forward pass",
    "backward": "backward pass",
    "step": "optimizer's step",
    ELSEWHERE: "outside of these: data, loss, logging, validation",
    NETWORK: "the network: messages under way",
    LATE: "late: everything had arrived, and the rank's threads had not gone on",
    UNKNOWN: "not seen in the trace",
}
WARM_UP = 3
"""The first steps are left out, where there are three times as many: they plan, and fill caches."""
LEAST_PART = 0.03
"""Of a step's time: what gives less is not named."""
NUM_BINS = 40
"""Of a link's use over time."""
_LATE_S, _ROUNDING_S = 1e-4, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Span):
    """A piece of a step's critical path: ``kind`` is a phase of ``rank``, the network, or unknown."""

    rank: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPath:
    """The critical path of one step, from the end of the one before; the earliest part first."""

    number: int
    start_s: float
    end_s: float
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one change would give: ``seconds`` of each step at most."""

    change: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShare:
    """What one direction of a link carried, while steps were made; ``use`` is a part of its rate, if that is known."""

    link: DirectedLink
    num_bytes: float
    use: float | None
    over_time: tuple[float, ...]
    """The same, from the first step to the last."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a trace tells of a job's steps."""

    job: JobTrace
    steps: tuple[StepPath, ...]

    @cached_property
    def parts_s(self) -> Mapping[str, float]:
        """Seconds of a step's critical path by kind, means."""
        parts_s: defaultdict[str, float] = defaultdict(float)
        for step in self.steps:
            for part in step.parts:
                parts_s[part.kind] += part.seconds / len(self.steps)
        return parts_s

    @cached_property
    def own_s(self) -> Mapping[int, float]:
        """Seconds of each rank's own in a step, without waits, means."""
        start_s, end_s = self.steps[0].start_s, self.steps[-1].end_s
        own_s = {}
        for one in self.job.ranks:
            waited_s = sum(span.overlap_s(start_s, end_s) for span in one.between("wait", start_s, end_s))
            own_s[one.rank] = (end_s - start_s - waited_s) / len(self.steps)
        return own_s

    @cached_property
    def lacked_s(self) -> float:
        """Of them without a processor: the kernel's count for ranks on the path, spread evenly over their time."""
        start_s, end_s = self.steps[0].start_s, self.steps[-1].end_s
        name, lacked_s = "seconds without a processor", 0.0
        for one in self.job.ranks:
            before, after = (one.values_at(name, time_s).get("value", 0.0) for time_s in (start_s, end_s))
            lacked_s += self._on_path_s(one.rank) * min(1.0, (after - before) / (end_s - start_s))
        return lacked_s

    def _on_path_s(self, rank: int) -> float:
        """Return how much of a step's critical path is a rank's own, the mean."""
        parts = (part for step in self.steps for part in step.parts if part.rank == rank)
        return sum(part.seconds for part in parts if part.kind not in (NETWORK, UNKNOWN)) / len(self.steps)

    @cached_property
    def gains(self) -> tuple[Gain, ...]:
        """What single changes would give, the most first."""
        found = [
            Gain(
                change="if the network took no time (half of that with links twice as fast)",
                seconds=self.parts_s.get(NETWORK, 0.0),
            ),
            Gain(change="if the ranks had processors of their own", seconds=self.lacked_s),
            Gain(
                change="if nothing was done outside of forward, backward and step",
                seconds=self.parts_s.get(ELSEWHERE, 0.0),
            ),
        ]
        if len(self.own_s) > 1:
            slow = max(self.own_s, key=self.own_s.__getitem__)
            usual_s = median(seconds for rank, seconds in self.own_s.items() if rank != slow)
            name = next(one.name for one in self.job.ranks if one.rank == slow)
            pace = f"{format_duration(self.own_s[slow])} of its own, they {format_duration(usual_s)}"
            change = f"if {name} were as quick as the others ({pace})"
            found.append(Gain(change=change, seconds=min(self.own_s[slow] - usual_s, self._on_path_s(slow))))
        kept = [gain for gain in found if gain.seconds >= LEAST_PART * self.step_s]
        return tuple(sorted(kept, key=lambda gain: -gain.seconds))

    @cached_property
    def links(self) -> tuple[LinkShare, ...]:
        """The busiest first; those within a machine are left out."""
        job = self.job
        if job.topology is None:
            return ()
        start_s, end_s = self.steps[0].start_s, self.steps[-1].end_s
        times_s = [start_s + (end_s - start_s) * k / NUM_BINS for k in range(NUM_BINS + 1)]
        bins = [job.link_bytes(*pair) for pair in pairwise(times_s)]
        names, found = {name for name, _ in job.topology.links()}, []
        for link, num_bytes in job.link_bytes(start_s, end_s).items():
            if link.child not in names or {" ", "/"} & set(link.child):
                continue
            rate = job.topology.bytes_per_s(link)
            is_known = rate != float("inf")
            over_time = tuple(
                each.get(link, 0.0) / (rate if is_known else 1.0) * NUM_BINS / (end_s - start_s) for each in bins
            )
            use = num_bytes / rate / (end_s - start_s) if is_known else None
            found.append(LinkShare(link=link, num_bytes=num_bytes, use=use, over_time=over_time))
        return tuple(sorted(found, key=lambda share: (-(share.use or 0.0), -share.num_bytes)))

    @cached_property
    def failures(self) -> tuple[str, ...]:
        """What ranks said when they failed."""
        spans = [(one, span) for one in self.job.ranks for span in one.instants if span.name.startswith("failed: ")]
        return tuple(f"{one.name}: {span.args.get('text') or span.name}" for one, span in spans)

    @property
    def step_s(self) -> float:
        """How long a step took, the mean."""
        return fmean(step.seconds for step in self.steps) if self.steps else 0.0

    def sentences(self) -> list[str]:
        """Return what matters most, in three sentences at most."""
        said = [f"The job failed: {self.failures[0]}"] if self.failures else []
        if not self.steps:
            return [*said, "No step was finished, so there is nothing to say of where time goes."]
        return [*said, self._of_time(), self._of_gain(), *self._of_link()][:3]

    def _of_time(self) -> str:
        shares = {"computing": sum(self.parts_s.get(kind, 0.0) for kind in COMPUTING)}
        shares |= {
            "the network": self.parts_s.get(NETWORK, 0.0),
            "outside of forward, backward and step": self.parts_s.get(ELSEWHERE, 0.0),
            "late to go on when everything had arrived": self.parts_s.get(LATE, 0.0),
            "not seen in the trace": self.parts_s.get(UNKNOWN, 0.0),
        }
        listed = [
            f"{seconds / self.step_s:.0%} {name}" for name, seconds in shares.items() if seconds > 0.005 * self.step_s
        ]
        lacked = f" ({self.lacked_s / self.step_s:.0%} of it without a processor)"
        return (
            f"A step took {format_duration(self.step_s)} (mean of {len(self.steps)}): {', '.join(listed)}"
            f"{lacked if self.lacked_s >= LEAST_PART * self.step_s else ''}."
        )

    def _of_gain(self) -> str:
        if not self.gains:
            return f"No single change that the trace shows would give more than {LEAST_PART:.0%} of a step."
        best = self.gains[0]
        part = best.seconds / self.step_s
        return f"Most would be gained {best.change}: at most {format_duration(best.seconds)} of each step ({part:.0%})."

    def _of_link(self) -> list[str]:
        if not self.links or self.links[0].use is None:
            return ["How full links were is not known, as no link's rate is."] if len(self.job.ranks) > 1 else []
        first, topology = self.links[0], self.job.topology
        assert topology is not None
        assert first.use is not None
        rate = topology.bytes_per_s(first.link)
        carried = f"{first.use:.0%} of its {format_rate(rate)}, {format_size(first.num_bytes)} in these steps"
        if first.use > 1.05:
            carried += "; so the network is faster than the topology says"
        return [f"The busiest link was that of {first.link.child} {first.link.direction}: {carried}."]


def explain(job: JobTrace) -> Explanation:
    """Return what ``job`` tells; takes some 10 ms for each 1,000 steps and rank."""
    follow = PathFinder(job)
    ends_s = list(job.step_ends_s.items())
    starts_s = [min(one.steps[number].start_s for one in job.ranks if number in one.steps) for number, _ in ends_s[:1]]
    starts_s += [end_s for _, end_s in ends_s[:-1]]
    steps = [
        follow.path(number, start_s, end_s)
        for (number, end_s), start_s in zip(ends_s, starts_s, strict=True)
        if end_s > start_s
    ]
    return Explanation(job=job, steps=tuple(steady(steps)))


def steady(steps: Sequence[T]) -> Sequence[T]:
    """Return all but the first few."""
    return steps[WARM_UP:] if len(steps) >= 4 * WARM_UP else steps


class PathFinder:
    """Follows critical paths through the spans of a job."""

    def __init__(self, job: JobTrace) -> None:
        self._job = job
        self._ranks = {one.rank: one for one in job.ranks}
        self._peers: dict[tuple[object, ...], list[tuple[int, Span]]] = defaultdict(list)
        self._ended: dict[int, list[tuple[float, tuple[object, ...], Span]]] = {}
        for one in job.ranks:
            seen: Counter[tuple[object, ...]] = Counter()
            ended = []
            for span in one.spans.get("communication", ()):
                what = span.name, span.args.get("step")
                key = (*what, seen[what])
                seen[what] += 1
                self._peers[key].append((one.rank, span))
                ended.append((span.end_s, key, span))
            self._ended[one.rank] = sorted(ended, key=lambda entry: entry[0])

    def path(self, number: int, start_s: float, end_s: float) -> StepPath:
        """Return the critical path from ``start_s`` to the end of step ``number``, on the rank that was the last."""
        last = [one for one in self._job.ranks if number in one.steps and one.steps[number].end_s >= end_s]
        parts: list[Part] = []
        rank, time_s = last[0].rank, end_s
        while time_s > start_s + _ROUNDING_S:
            wait = next(reversed(self._ranks[rank].between("wait", start_s, time_s - _ROUNDING_S)), None)
            if wait is None or wait.end_s < time_s - _LATE_S:
                begin_s = start_s if wait is None else max(start_s, wait.end_s)
                parts += reversed(list(self._own(self._ranks[rank], begin_s, time_s)))
                time_s = begin_s
                continue
            part, rank = self._through(rank, wait, max(start_s, wait.start_s), time_s)
            part = replace(part, start_s=max(start_s, part.start_s), end_s=time_s)
            parts.append(part)
            time_s = part.start_s
        return StepPath(
            number=number,
            start_s=start_s,
            end_s=end_s,
            parts=tuple(part for part in reversed(parts) if part.seconds > _ROUNDING_S),
        )

    def _through(self, rank: int, wait: Span, begin_s: float, end_s: float) -> tuple[Part, int]:
        """Return what a wait was for until it ended, and the rank at which the path goes on before that."""
        ended = self._ended[rank]
        place = bisect_right(ended, end_s + _LATE_S, key=lambda entry: entry[0])
        last_s = ended[place - 1][0] if place else begin_s
        if last_s <= begin_s or last_s < end_s - _LATE_S:
            is_busy = any(span.start_s < end_s for _, _, span in ended[place:])
            kind = UNKNOWN if is_busy else LATE
            return Part(rank=rank, kind=kind, name=wait.name, start_s=max(begin_s, last_s), end_s=end_s), rank
        _, key, span = ended[place - 1]
        # Calls of other groups may have the same name, but not the same time.
        peers = [(who, one) for who, one in self._peers[key] if one.start_s < span.end_s and one.end_s > span.start_s]
        who, last = max(peers, key=lambda entry: entry[1].start_s)
        if last.start_s < end_s:
            kind = NETWORK if self._job.is_whole else UNKNOWN  # who is not seen may have begun last
            return Part(rank=rank, kind=kind, name=span.name, start_s=last.start_s, end_s=end_s), who
        return Part(rank=rank, kind=UNKNOWN, name=wait.name, start_s=begin_s, end_s=end_s), rank

    @staticmethod
    def _own(one: RankTrace, begin_s: float, end_s: float) -> Iterator[Part]:
        """Yield what a rank did between two times, in which it waited for nobody."""
        at_s = begin_s
        for span in one.between("compute", begin_s, end_s):
            if span.start_s > at_s:
                yield Part(rank=one.rank, kind=ELSEWHERE, name=ELSEWHERE, start_s=at_s, end_s=span.start_s)
            start_s, at_s = max(at_s, span.start_s), min(span.end_s, end_s)
            if at_s > start_s:
                yield Part(rank=one.rank, kind=span.name, name=span.name, start_s=start_s, end_s=at_s)
        if end_s > at_s:
            yield Part(rank=one.rank, kind=ELSEWHERE, name=ELSEWHERE, start_s=at_s, end_s=end_s)
