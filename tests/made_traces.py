"""Traces of jobs that were never run, with times that a test chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from syncline.observe import Trace
from syncline.report.job_trace import JobTrace, read_job_trace

MS = 1_000_000
TOPOLOGY = """
topology: made
switch: s
children:
  - {host: a, uplink: 80 Mbit/s}
  - {host: b, uplink: {up: 80 Mbit/s, down: 1 Gbit/s}}
"""


def make_job(folder: Path, num_ranks: int, fill: Callable[[int, Trace, int], None]) -> JobTrace:
    """Let ``fill`` record what each rank did, given its number, its trace and the time at which all begins, in ns."""
    folder.mkdir(parents=True, exist_ok=True)
    traces = [Trace(rank=rank, host=f"h{rank}", path=folder / f"trace-{rank}.json") for rank in range(num_ranks)]
    begin_ns = Trace.now_ns()
    for rank, trace in enumerate(traces):
        fill(rank, trace, begin_ns)
        trace.close()
    return read_job_trace(folder)


def synchronous(num_steps: int, slow: dict[int, int] | None = None) -> Callable[[int, Trace, int], None]:
    """Steps in which ranks compute for 10 ms, those of ``slow`` for so many; the network takes 5 ms after the last."""
    slow = slow or {}
    last_ms = max([10, *slow.values()])

    def fill(rank: int, trace: Trace, begin_ns: int) -> None:
        for step in range(num_steps):
            at = begin_ns + step * (last_ms + 5) * MS
            ready, last, done = (at + ms * MS for ms in (slow.get(rank, 10), last_ms, last_ms + 5))
            trace.span("forward", "compute", at, at + 4 * MS)
            trace.span("backward", "compute", at + 4 * MS, ready)
            trace.span("step", "compute", ready, done)
            trace.span("step", "wait", ready, done)
            trace.span("all_reduce of bucket 0", "communication", ready, done, bytes=1 << 20, step=step)
            trace.span(f"step {step}", "step", at, done)
            assert last <= done

    return fill


def without_topology(job: JobTrace) -> JobTrace:
    return dataclasses.replace(job, topology=None)
