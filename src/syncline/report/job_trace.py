"""Reads a trace back: what each rank did and when, which links carried how much, and what the job said of itself.

And what the ranks of a running job answered, when they were asked what they do: who is in which call, and who is not.
In a stream of calls all ranks make the same ones in the same order, so numbers tell who is behind: a rank whose last
call there is before the one in which others are has not begun it. Nothing is said of calls that are young.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from syncline.errors import ConfigurationError, name_ranks
from syncline.observe import align_events, gather_events
from syncline.topology import DirectedLink, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took from ``start_s`` to ``end_s``, in seconds from the trace's begin."""

    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """Return how much of it lies between two times."""
        return max(0.0, min(self.end_s, end_s) - max(self.start_s, start_s))


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank recorded."""

    rank: int
    name: str
    spans: Mapping[str, Sequence[Span]]
    """By category, ordered by their start."""
    counters: Mapping[str, Sequence[tuple[float, Mapping[str, float]]]]
    """Values from a time on, by name; sums since the start, mostly."""
    instants: Sequence[Span]
    """What happened at one time."""
    facts: Mapping[str, Sequence[Mapping[str, Any]]]
    """What the rank said of the job: its ``totals``, ``plan`` and so on."""

    @cached_property
    def steps(self) -> Mapping[int, Span]:
        """Steps that it finished, by number."""
        return {int(span.name.split()[-1]): span for span in self.spans.get("step", ())}

    def between(self, category: str, start_s: float, end_s: float) -> list[Span]:
        """Return the spans of a category whose spans follow each other that overlap a time."""
        spans = self.spans.get(category, ())
        first = max(0, bisect_right(spans, start_s, key=lambda span: span.start_s) - 1)
        last = bisect_right(spans, end_s, key=lambda span: span.start_s)
        return [span for span in spans[first:last] if span.end_s > start_s]

    def values_at(self, counter: str, time_s: float) -> dict[str, float]:
        """Return what a counter had counted at a time, on a straight line between two looks at it."""
        looks = self.counters.get(counter, ())
        after = bisect_right(looks, time_s, key=lambda look: look[0])
        if not after:
            return {}
        (before_s, before), (after_s, later) = looks[after - 1], looks[min(after, len(looks) - 1)]
        part = (time_s - before_s) / (after_s - before_s) if after_s > before_s else 0.0
        return {key: before.get(key, 0.0) + part * (value - before.get(key, 0.0)) for key, value in later.items()}


@dataclass(frozen=True, kw_only=True)
class JobTrace:
    """The traces of a job's ranks, on one time line."""

    ranks: tuple[RankTrace, ...]
    topology: Topology | None
    """None where rank 0 did not say, because its trace is missing or it did not connect."""

    @property
    def end_s(self) -> float:
        """When the last thing happened."""
        ends = [span.end_s for one in self.ranks for spans in (*one.spans.values(), one.instants) for span in spans]
        return max(ends, default=0.0)

    @cached_property
    def is_whole(self) -> bool:
        """Whether as many ranks left a trace as the job had at once: those of other hosts may be elsewhere."""
        told = [len(job.get("members", ())) for one in self.ranks for job in one.facts.get("job", ())]
        return len(self.ranks) >= max(told, default=0)

    @cached_property
    def step_ends_s(self) -> dict[int, float]:
        """When each step was over on the last rank that finished it."""
        ends: dict[int, float] = {}
        for one in self.ranks:
            for number, span in one.steps.items():
                ends[number] = max(ends.get(number, 0.0), span.end_s)
        return dict(sorted(ends.items()))

    def link_bytes(self, start_s: float, end_s: float) -> dict[DirectedLink, float]:
        """Return what all ranks have put on each link between two times."""
        moved: dict[DirectedLink, float] = defaultdict(float)
        for one in self.ranks:
            before = one.values_at("bytes on links", start_s)
            for link, value in one.values_at("bytes on links", end_s).items():
                name, _, direction = link.rpartition(" ")
                moved[DirectedLink(name, "up" if direction == "up" else "down")] += value - before.get(link, 0.0)
        return dict(moved)

    def plans(self) -> list[Mapping[str, Any]]:
        """Return what the model said of collectives, the largest first."""
        told = [plan for one in self.ranks for plan in one.facts.get("plan", ())]
        return sorted(told, key=lambda plan: -plan["bytes"])


def read_job_trace(path: str | Path) -> JobTrace:
    """Read a file that ``syncline run --trace`` wrote, one rank's own, or a folder with those of ranks or hosts.

    Raises :class:`ConfigurationError` for what is none.

    >>> trace = syncline.observe.Trace(rank=0, path="trace-0.json"); trace.close()
    >>> read_job_trace("trace-0.json").ranks[0].name
    'rank 0'
    """
    path = Path(path)
    try:
        if path.is_dir():
            parts = sorted(path.glob("*.json"))
            if not parts:
                raise ConfigurationError(f"a trace must be a file, or a folder with those of ranks; '{path}' has none")
            return build_job_trace(gather_events(parts))
        return build_job_trace(gather_events([path]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"'{path}' cannot be read as a trace ({error}); name one that syncline run --trace wrote"
        ) from error


def build_job_trace(events: Iterable[Mapping[str, Any]]) -> JobTrace:
    """Return what the events of all ranks tell, whose times count from one zero.

    >>> build_job_trace([]).ranks
    ()
    """
    by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        by_rank[event["pid"]].append(event)
    ranks = tuple(_build_rank(rank, told) for rank, told in sorted(by_rank.items()))
    jobs = [job for one in ranks for job in one.facts.get("job", ()) if job["topology"]]
    return JobTrace(ranks=ranks, topology=Topology.parse(jobs[-1]["topology"]) if jobs else None)


def _build_rank(rank: int, events: Iterable[Mapping[str, Any]]) -> RankTrace:
    name, spans = f"rank {rank}", defaultdict[str, list[Span]](list)
    instants: list[Span] = []
    counters = defaultdict[str, list[tuple[float, Mapping[str, float]]]](list)
    facts = defaultdict[str, list[Mapping[str, Any]]](list)
    for event in sorted(events, key=lambda event: event.get("ts", 0.0)):
        args, start_s = event.get("args", {}), event.get("ts", 0.0) / 1e6
        if event["ph"] == "C":
            counters[event["name"]].append((start_s, args))
        elif event["ph"] == "M":
            if event["name"] == "process_name":
                name = args["name"]
            if found := re.fullmatch("syncline_(.*)", event["name"]):
                facts[found[1]].append(args)
        else:
            end_s = start_s + event.get("dur", 0.0) / 1e6
            span = Span(name=event["name"], start_s=start_s, end_s=end_s, args=args)
            (spans[event["cat"]] if event["ph"] == "X" else instants).append(span)
    return RankTrace(rank=rank, name=name, spans=spans, counters=counters, instants=instants, facts=facts)


LEAST_OPEN_S = 1.0
"""Calls that began later are as they should be, as far as one look can tell."""
MOST_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """What one rank answered."""

    rank: int
    name: str
    pid: int
    phase: str
    is_waiting: bool
    steps: int
    calls: Sequence[Mapping[str, Any]]
    """The last call of each stream."""
    thread: str
    """That of the training."""
    stacks: Mapping[str, Sequence[str]]
    """Of each thread, the innermost call first."""

    @property
    def where(self) -> str:
        """Where its training thread is, in a word or two."""
        return "waits in " * self.is_waiting + self.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was learnt of a running job."""

    job: JobTrace
    """Of the seconds in which the ranks recorded."""
    ranks: tuple[RankAnswer, ...]
    absent: tuple[Mapping[str, Any], ...]
    """Those that did not answer, with what rank 0 knows of them."""

    def held(self) -> dict[str, frozenset[int]]:
        """Return a sentence for what ranks are in for long, the first of its calls, and the ranks that it waits for."""
        by_stream: dict[tuple[tuple[int, ...], int], dict[int, Mapping[str, Any]]] = defaultdict(dict)
        for one in self.ranks:
            for call in one.calls:
                by_stream[tuple(call["members"]), call["stream"]][one.rank] = call
        found: dict[object, tuple[str, frozenset[int]]] = {}
        for (members, _), calls in by_stream.items():
            for within, sentence, awaited in self._held_in(members, calls):
                found.setdefault((within, awaited), (sentence, awaited))
        return dict(found.values())

    def _held_in(
        self, members: Sequence[int], calls: Mapping[int, Mapping[str, Any]]
    ) -> Iterator[tuple[frozenset[int], str, frozenset[int]]]:
        is_open = {rank: call for rank, call in calls.items() if not call["is_over"]}
        if not is_open:
            return
        place = min(call["place"] for call in is_open.values())
        within = {rank: call for rank, call in is_open.items() if call["place"] == place}
        oldest = max(within.values(), key=lambda call: call["seconds"])
        if oldest["seconds"] < LEAST_OPEN_S:
            return
        answered = {one.rank: one for one in self.ranks}
        behind = [rank for rank in members if rank in answered and calls.get(rank, {"place": 0})["place"] < place]
        silent = [rank for rank in members if rank not in answered]
        through = [rank for rank, call in calls.items() if rank not in within and rank not in behind]
        verb = "are" if len(within) > 1 else "is"
        parts = [f"{name_ranks(within)} {verb} in {oldest['what']} since {oldest['seconds']:.0f} s"]
        parts += [f"{answered[rank].name} has not begun it: {answered[rank].where}" for rank in behind]
        if silent:
            parts.append(f"{name_ranks(silent)} {'give' if len(silent) > 1 else 'gives'} no answer")
        if through:
            parts.append(f"{name_ranks(through)} {'are' if len(through) > 1 else 'is'} through")
        if len(within) == len(members):
            parts.append("all of its ranks have begun it, so what is missing is under way between them")
        yield frozenset(within), "; ".join(parts) + ".", frozenset((*behind, *silent))


def read_examination(told: Mapping[str, Any]) -> Examination:
    """Read what the port of rank 0 says; :class:`ConfigurationError` for what it cannot say.

    >>> read_examination({"answers": {}, "absent": []}).ranks
    ()
    """
    try:
        answers = [_read_answer(text) for _, text in sorted(told["answers"].items(), key=lambda item: int(item[0]))]
        job = build_job_trace(align_events(answer.pop("events") for answer in answers))
        ranks = tuple(RankAnswer(**answer) for answer in answers)
        return Examination(job=job, ranks=ranks, absent=tuple(told["absent"]))
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise ConfigurationError(
            f"what the job answers cannot be read ({error}); ask with the version of Syncline that it runs"
        ) from error


def _read_answer(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompressobj().decompress(base64.b64decode(text), MOST_ANSWER_BYTES))
    return found
