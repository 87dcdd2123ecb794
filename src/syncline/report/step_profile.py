"""What the trace of a job tells of its model: buckets, and how long ranks compute in a step, without their waits.

A bucket is known by the reduction of its gradients. One after another they begin in the backward pass, each when its
gradients are there, so what was computed between two of them is the backward pass of one, and the forward pass is taken
to be divided alike. Ranks of a synchronous job wait for the slowest, so of all ranks the one that computes longest
counts, and of its steps the median.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from syncline.errors import ConfigurationError
from syncline.priorities.forward_timing import BACKWARD_PER_FORWARD
from syncline.report.explanation import steady
from syncline.report.job_trace import JobTrace, RankTrace, Span

_REDUCED = re.compile(r"(?:all_reduce|reduce_scatter) of bucket (\d+)")
_PASSES = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSteps:
    """What predictions need of a traced job; sequences go by bucket, in forward order."""

    num_bytes: tuple[int, ...]
    forward_s: tuple[float, ...]
    rank: int
    """Whose passes take longest."""
    step_s: float
    """What a step took, the median."""
    num_steps: int
    """That this is of."""


def read_steps(job: JobTrace) -> TracedSteps:
    """Return the steps of ``job``, without the first ones; :class:`ConfigurationError` if it reduced no buckets.

    >>> read_steps(JobTrace(ranks=(), topology=None))
    Traceback (most recent call last):
    syncline.errors.ConfigurationError: the trace shows no step ...
    """
    ends_s = list(job.step_ends_s.items())
    kept = [number for number, _ in steady(ends_s)]
    reduced = [(one, found) for one in job.ranks if len(found := _reduced(one, kept))]
    if len(kept) < 2 or not reduced or not max(_computing_s(one, kept) for one, _ in reduced):
        raise ConfigurationError(
            "the trace shows no step in which gradients were reduced bucket by bucket; record three or more of "
            "AllReduce() or Sharded(), without codes, or give --model in place of --trace"
        )
    sizes: dict[int, int] = {}
    for _, steps in reduced:
        for spans in steps.values():
            sizes |= {bucket: int(span.args["bytes"]) for bucket, span in spans.items()}
    slowest, steps = max(reduced, key=lambda entry: _computing_s(entry[0], kept))
    computed_s, buckets = _computing_s(slowest, kept), sorted(sizes)
    parts_s = [_parts_s(slowest, slowest.steps[number], spans) for number, spans in steps.items()]
    weights = [fmean(each.get(bucket, 0.0) for each in parts_s) for bucket in buckets]
    weights = weights if any(weights) else [1.0] * len(buckets)
    forward_s = computed_s / (1 + BACKWARD_PER_FORWARD)
    durations_s = [after - before for (_, before), (_, after) in pairwise(ends_s)]
    return TracedSteps(
        num_bytes=tuple(sizes[bucket] for bucket in buckets),
        forward_s=tuple(forward_s * weight / sum(weights) for weight in weights),
        rank=slowest.rank,
        step_s=median(durations_s[-len(kept) :]),
        num_steps=len(kept),
    )


def _reduced(one: RankTrace, kept: list[int]) -> dict[int, dict[int, Span]]:
    """Return the reduction of each bucket by the number of the step in which it began."""
    steps: dict[int, dict[int, Span]] = {number: {} for number in kept}
    for span in one.spans.get("communication", ()):
        found, number = _REDUCED.fullmatch(span.name), span.args.get("step")
        if found and number in steps and number in one.steps:
            steps[number].setdefault(int(found[1]), span)
    return {number: spans for number, spans in steps.items() if spans}


def _computing_s(one: RankTrace, kept: list[int]) -> float:
    """Return how long the two passes of a step take without waits, the median."""
    times_s = []
    for number in kept:
        step = one.steps.get(number)
        if step is not None:
            times_s.append(_own_s(one, step.start_s, step.end_s))
    return median(times_s) if times_s else 0.0


def _own_s(one: RankTrace, start_s: float, end_s: float) -> float:
    """Return for how long ``one`` was in a pass between two times, and did not wait."""
    passes = [span for span in one.between("compute", start_s, end_s) if span.name in _PASSES]
    own_s = 0.0
    for span in passes:
        begun_s, over_s = max(start_s, span.start_s), min(end_s, span.end_s)
        waited_s = sum(wait.overlap_s(begun_s, over_s) for wait in one.between("wait", begun_s, over_s))
        own_s += max(0.0, over_s - begun_s - waited_s)
    return own_s


def _parts_s(one: RankTrace, step: Span, spans: Mapping[int, Span]) -> dict[int, float]:
    """Return what was computed for each bucket of a step until it was reduced, since the one before or the forward."""
    at_s, parts_s = step.start_s, {}
    for span in one.between("compute", step.start_s, step.end_s):
        if span.name == "backward":
            at_s = span.start_s
            break
    for bucket, reduced in sorted(spans.items(), key=lambda item: item[1].start_s):
        parts_s[bucket] = _own_s(one, at_s, reduced.start_s)
        at_s = max(at_s, reduced.start_s)
    return parts_s
