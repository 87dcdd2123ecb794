"""What predictions take from a trace, held against jobs whose times are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_traces import MS, make_job, synchronous
from syncline.errors import ConfigurationError
from syncline.observe import Trace
from syncline.report.step_profile import read_steps


def test_buckets_and_what_the_slowest_rank_computes_are_those_of_the_job(tmp_path: Path) -> None:
    """Forward 4 ms of which 1 is a wait, backward 10 of which 2 are; buckets begin 2, 5 and 8 ms after the last one."""

    def fill(rank: int, trace: Trace, begin_ns: int) -> None:
        for step in range(12):
            at = begin_ns + step * 30 * MS
            slower = MS if rank == 1 else 0
            trace.span("forward", "compute", at, at + 4 * MS + slower)
            trace.span("forward", "wait", at + MS, at + 2 * MS)
            start = at + 5 * MS
            trace.span("backward", "compute", start, start + 10 * MS)
            for bucket, ms in ((2, 2), (1, 5), (0, 8)):
                name, size = f"reduce_scatter of bucket {bucket}", (bucket + 1) << 20
                trace.span(name, "communication", start + ms * MS, start + (ms + 4) * MS, bytes=size, step=step)
                trace.span(f"all_gather of bucket {bucket}", "communication", at, at + MS, bytes=size, step=step)
            trace.span("backward", "wait", start + 8 * MS, start + 10 * MS)
            trace.span(f"step {step}", "step", at, at + 25 * MS)

    found = read_steps(make_job(tmp_path, 2, fill))
    assert found.num_bytes == (1 << 20, 2 << 20, 3 << 20)
    assert found.rank == 1
    assert sum(found.forward_s) == pytest.approx((4 + 8) / 1000 / 3)  # 5 and 10 less what it waited, a third
    assert found.forward_s == pytest.approx([0.004 * ms / 8 for ms in (3, 3, 2)])
    assert found.step_s == pytest.approx(0.030)
    assert found.num_steps == 9, "the first ones are left out"


def test_of_a_trace_without_gradients_or_steps_nothing_is_taken(tmp_path: Path) -> None:
    def fill(_: int, trace: Trace, begin_ns: int) -> None:
        for step in range(4):
            trace.span(f"step {step}", "step", begin_ns + step * MS, begin_ns + (step + 1) * MS)

    for number, job in enumerate((fill, synchronous(1))):
        with pytest.raises(ConfigurationError, match="no step in which gradients were reduced bucket by bucket"):
            read_steps(make_job(tmp_path / str(number), 2, job))
