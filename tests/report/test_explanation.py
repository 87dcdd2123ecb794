"""Critical paths and gains, held against jobs whose times are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_traces import MS, TOPOLOGY, make_job, synchronous
from syncline.errors import ConfigurationError
from syncline.observe import Trace, merge_traces
from syncline.report.explanation import LATE, NETWORK, UNKNOWN, explain
from syncline.report.job_trace import read_job_trace
from syncline.topology import Topology


def test_a_slow_rank_is_the_path_and_what_its_pace_would_give_is_said(tmp_path: Path) -> None:
    found = explain(make_job(tmp_path, 4, synchronous(20, slow={2: 40})))
    assert len(found.steps) == 17, "the first ones are left out"
    for step in found.steps:
        assert [(part.rank, part.kind) for part in step.parts][:2] == [(2, "forward"), (2, "backward")]
        assert sum(part.seconds for part in step.parts) == pytest.approx(step.seconds)
    assert found.step_s == pytest.approx(0.045)
    assert found.parts_s == pytest.approx({"forward": 0.004, "backward": 0.036, NETWORK: 0.005})
    assert found.own_s == pytest.approx({0: 0.01, 1: 0.01, 2: 0.04, 3: 0.01})
    assert found.gains[0].seconds == pytest.approx(0.03)
    assert found.sentences() == [
        "A step took 45 ms (mean of 17): 89% computing, 11% the network.",
        "Most would be gained if rank 2 (host h2) were as quick as the others (40 ms of its own, they 10 ms): at most "
        "30 ms of each step (67%).",
        "How full links were is not known, as no link's rate is.",
    ]


def test_a_healthy_job_accuses_nobody(tmp_path: Path) -> None:
    found = explain(make_job(tmp_path, 3, synchronous(12)))
    assert [gain.change for gain in found.gains] == [
        "if the network took no time (half of that with links twice as fast)"
    ]
    assert found.gains[0].seconds == pytest.approx(0.005)


def test_where_traces_of_other_hosts_are_missing_nothing_is_the_networks(tmp_path: Path) -> None:
    def fill(rank: int, trace: Trace, begin_ns: int) -> None:
        trace.about("job", rank=rank, members=[0, 1, 2], topology=None)
        synchronous(12)(rank, trace, begin_ns)

    assert make_job(tmp_path / "all", 3, fill).is_whole
    found = explain(make_job(tmp_path / "some", 2, fill))
    assert found.parts_s[UNKNOWN] == pytest.approx(0.005)
    assert NETWORK not in found.parts_s
    assert not found.gains


def test_what_no_message_ends_is_late_or_unknown_and_never_the_networks(tmp_path: Path) -> None:
    def fill(rank: int, trace: Trace, begin_ns: int) -> None:
        trace.span("backward", "compute", begin_ns, begin_ns + 10 * MS)
        trace.span("a", "communication", begin_ns + 5 * MS, begin_ns + 12 * MS)  # over, and the rank waits 8 ms more
        trace.span("step", "wait", begin_ns + 10 * MS, begin_ns + 20 * MS)
        trace.span("b", "communication", begin_ns + 25 * MS, begin_ns + 50 * MS)  # under way at the wait's end
        trace.span("step", "wait", begin_ns + 30 * MS, begin_ns + 40 * MS)
        trace.span("step 0", "step", begin_ns, begin_ns + 40 * MS)

    found = explain(make_job(tmp_path, 1, fill))
    assert [(part.kind, round(1000 * part.seconds)) for part in found.steps[0].parts] == [
        ("backward", 5),
        (NETWORK, 7),
        (LATE, 8),
        ("elsewhere", 10),
        (UNKNOWN, 10),
    ]


def test_calls_of_the_same_name_in_other_groups_do_not_count(tmp_path: Path) -> None:
    """Ranks 0 and 1 are one group, 2 and 3 another, whose calls come much later."""

    def fill(rank: int, trace: Trace, begin_ns: int) -> None:
        ready = begin_ns + (10 if rank < 2 else 100) * MS
        trace.span("backward", "compute", begin_ns, ready)
        trace.span("step", "wait", ready, ready + 10 * MS)
        trace.span("all_reduce", "communication", ready, ready + 10 * MS)
        trace.span("step 0", "step", begin_ns, ready + 10 * MS)

    found = explain(make_job(tmp_path, 4, fill))
    assert {part.rank for part in found.steps[0].parts} <= {2, 3}
    assert found.parts_s == pytest.approx({"backward": 0.1, NETWORK: 0.01})


def test_links_are_used_by_what_all_ranks_put_on_them_and_processors_are_lacked(tmp_path: Path) -> None:
    def fill(rank: int, trace: Trace, begin_ns: int) -> None:
        synchronous(20)(rank, trace, begin_ns)
        if rank == 0:
            trace.about("job", rank=0, members=[0, 1], topology=Topology.parse(TOPOLOGY).to_yaml())
        for ms, part in ((0, 0), (300, 1)):  # of 1 MB in 0.3 s each, at 10 MB/s: a third
            at = begin_ns + ms * MS
            name, other = ("a", "b") if rank == 0 else ("b", "a")
            moved = {f"{name} up": 1e6 * part, f"{other} down": 1e6 * part, f"rank {rank} up": 1e6 * part}
            trace._record("C", "bytes on links", "", moved, (at, at))
            trace._record("C", "seconds without a processor", "", {"value": 0.15 * part}, (at, at))

    found = explain(make_job(tmp_path, 2, fill))
    shares = {str(share.link): share.use for share in found.links}
    assert shares == pytest.approx({"a up": 1 / 3, "a down": 1 / 3, "b up": 1 / 3, "b down": 1 / 37.5}, rel=0.01)
    assert found.lacked_s == pytest.approx(0.005, rel=0.01), "half of the 10 ms that ranks compute in each step"
    assert found.sentences()[2] == "The busiest link was that of a up: 33% of its 80 Mbit/s, 830.1 KiB in these steps."


def test_a_failed_job_says_so_first_and_one_without_steps_has_no_more_to_say(tmp_path: Path) -> None:
    def fill(rank: int, trace: Trace, begin_ns: int) -> None:
        if rank == 1:
            trace.instant("failed: peer_lost", "communication", text="rank 0 is lost: its process has ended")

    found = explain(make_job(tmp_path, 2, fill))
    assert found.sentences() == [
        "The job failed: rank 1 (host h1): rank 0 is lost: its process has ended",
        "No step was finished, so there is nothing to say of where time goes.",
    ]


def test_a_merged_trace_a_folder_and_one_ranks_file_are_read_alike(tmp_path: Path) -> None:
    parts = make_job(tmp_path / "parts", 1, synchronous(8))
    merge_traces(sorted((tmp_path / "parts").glob("*.json")), tmp_path / "whole.json")
    for path in (tmp_path / "whole.json", tmp_path / "parts" / "trace-0.json"):
        assert explain(read_job_trace(path)).steps == explain(parts).steps


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"x\.json"):
        read_job_trace(tmp_path / "x.json")


def test_a_folder_without_traces_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has none"):
        read_job_trace(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be read as a trace"):
        read_job_trace(tmp_path / "none.json")
