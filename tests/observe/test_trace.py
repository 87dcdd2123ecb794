"""Traces: strict JSON after close, readable after a kill, bounded, and merged onto one time line."""

import json
import os
import subprocess
import sys
import threading

import pytest

from syncline.errors import ConfigurationError
from syncline.observe import Trace, merge_traces


def events_of(path):
    return json.loads(path.read_text())


def spans_of(path, phase="X"):
    events = events_of(path)
    return [event for event in (events["traceEvents"] if isinstance(events, dict) else events) if event["ph"] == phase]


def test_a_closed_trace_is_strict_json_with_all_events(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(rank=3, host="b1", path=path)
    trace.span("forward", "compute", 1_000, 5_000, step=7)
    trace.instant("peer lost", "communication", peer=2)
    trace.counter("queued bytes", 12)
    trace.close()
    span = spans_of(path)[0]
    assert (span["name"], span["cat"], span["ts"], span["dur"], span["pid"]) == ("forward", "compute", 1.0, 4.0, 3)
    assert span["args"] == {"step": 7}
    assert spans_of(path, "i")[0]["args"] == {"peer": 2}
    assert spans_of(path, "C")[0]["args"] == {"value": 12}
    names = [event["args"].get("name") for event in spans_of(path, "M")]
    assert "rank 3 (host b1)" in names
    assert {"compute", "communication"} <= set(names)


def test_closing_twice_adds_nothing(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path=path)
    trace.close()
    text = path.read_text()
    trace.instant("late", "compute")
    trace.close()
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_any_more_ends_the_trace_and_not_the_run(tmp_path, caplog):
    path = tmp_path / "trace.json"
    trace = Trace(rank=3, path=path)
    path.unlink()
    path.mkdir()
    trace.instant("early", "compute")
    trace.flush()
    assert caplog.messages == [f"rank 3: the trace {path} ends here: Is a directory"]
    assert not trace.enabled
    trace.instant("late", "compute")
    trace.close()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("place", ["/proc/zz", "/none/trace.json", "/dev/full"])
def test_a_file_that_cannot_be_written_at_all_is_refused(place):
    with pytest.raises(
        ConfigurationError, match=rf"^A trace must be .*'{place}' is not: .*; name another \(trace=, or "
    ):
        Trace(path=place)


def test_overlapping_collectives_lie_on_rows_of_their_own(tmp_path):
    trace = Trace(path=tmp_path / "t.json")
    trace.span("a", "communication", 0, 10)
    trace.span("b", "communication", 5, 15)
    trace.span("c", "communication", 10, 20)
    trace.close()
    rows = {span["name"]: span["tid"] for span in spans_of(tmp_path / "t.json")}
    assert rows["a"] == rows["c"] != rows["b"]


def test_nested_computing_stays_on_one_row(tmp_path):
    trace = Trace(path=tmp_path / "t.json")
    trace.span("inner", "compute", 5, 6)
    trace.span("outer", "compute", 0, 10)
    trace.close()
    assert [span["name"] for span in spans_of(tmp_path / "t.json")] == ["outer", "inner"]
    assert len({span["tid"] for span in spans_of(tmp_path / "t.json")}) == 1


def test_more_events_than_allowed_are_dropped_and_counted(tmp_path):
    trace = Trace(path=tmp_path / "t.json", max_events=10)
    for i in range(25):
        trace.span(f"event {i}", "compute", i, i + 1)
    assert trace.num_dropped == 15
    trace.close()
    assert len(spans_of(tmp_path / "t.json")) == 10
    assert events_of(tmp_path / "t.json")[-1]["args"] == {"num_events": 15}


def test_many_events_go_to_the_file_while_the_run_goes_on(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path=path)
    for i in range(5_000):
        trace.span("step", "compute", i, i + 1)
    assert path.read_text().count('"step"') >= 4_096
    trace.close()
    assert len(spans_of(path)) == 5_000


def test_threads_lose_no_event(tmp_path):
    trace = Trace(path=tmp_path / "t.json")

    def record():
        for i in range(3_000):
            trace.span("step", "compute", i, i + 1)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    assert len(spans_of(tmp_path / "t.json")) == 12_000


def test_an_exception_that_ends_the_process_loses_no_event(tmp_path):
    program = (
        "from syncline.observe import Trace\n"
        f"trace = Trace(path={str(tmp_path / 'crash.json')!r})\n"
        "trace.span('last', 'compute', 0, 1)\n"
        "raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 3
    assert [span["name"] for span in spans_of(tmp_path / "crash.json")] == ["last"]


def test_merging_puts_ranks_on_one_time_line(tmp_path):
    paths = []
    for rank in range(2):
        trace = Trace(rank=rank, host="a1", path=tmp_path / f"{rank}.json")
        trace.span("step", "compute", 5_000_000 + 1_000 * rank, 6_000_000)
        trace.close()
        paths.append(tmp_path / f"{rank}.json")
    assert merge_traces(paths, tmp_path / "all.json") == 2
    spans = spans_of(tmp_path / "all.json")
    assert {span["pid"] for span in spans} == {0, 1}
    assert spans[0]["ts"] == 0.0
    assert spans[1]["ts"] == pytest.approx(1.0, abs=0.3)


def begin_at(path, rank, monotonic_ns, wall_ns):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic_ns", lambda: monotonic_ns)
        patch.setattr("time.time_ns", lambda: wall_ns)
        return Trace(rank=rank, path=path)


def test_merging_uses_wall_clocks_between_machines(tmp_path):
    for name, monotonic_ns, wall_ns in (("a", 1_000, 50_000), ("b", 900_000, 50_000)):
        trace = begin_at(tmp_path / f"{name}.json", int(name == "b"), monotonic_ns, wall_ns)
        trace.span(name, "compute", monotonic_ns, monotonic_ns + 1)
        trace.close()
        text = (tmp_path / f"{name}.json").read_text()
        boot = next(json.loads(x.rstrip(","))["args"]["boot"] for x in text.splitlines() if "syncline_clock" in x)
        (tmp_path / f"{name}.json").write_text(text.replace(f'"boot": "{boot}"', f'"boot": "{name}"'))
    merge_traces([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "all.json")
    assert [span["ts"] for span in spans_of(tmp_path / "all.json")] == [0.0, 0.0]


def test_containers_of_one_boot_may_have_clocks_of_their_own(tmp_path, monkeypatch):
    """A time namespace begins the monotonic clock where it likes, so only the wall clock joins two of them."""
    for rank, monotonic_ns in enumerate((1_000, 900_000)):
        namespace = tmp_path / f"namespace-{rank}"
        namespace.symlink_to(f"time:[{rank}]")
        monkeypatch.setattr("syncline.observe.trace._TIME_NAMESPACE", namespace)
        trace = begin_at(tmp_path / f"{rank}.json", rank, monotonic_ns, 50_000)
        trace.span("step", "compute", monotonic_ns, monotonic_ns + 1)
        trace.close()
    merge_traces([tmp_path / f"{rank}.json" for rank in range(2)], tmp_path / "all.json")
    assert [span["ts"] for span in spans_of(tmp_path / "all.json")] == [0.0, 0.0]


def test_what_hosts_have_merged_is_merged_as_their_ranks_would_be(tmp_path):
    for rank, wall_ns in enumerate((50_000_000, 53_000_000)):
        trace = begin_at(tmp_path / "own.json", rank, 1_000 + rank, wall_ns)
        trace.span("step", "compute", 1_000 + rank, 2_000)
        trace.close()
        text = (tmp_path / "own.json").read_text()
        (tmp_path / "own.json").write_text(text.replace('"boot": "', f'"boot": "{rank}'))
        merge_traces([tmp_path / "own.json"], tmp_path / f"host-{rank}.json")
    merge_traces([tmp_path / f"host-{rank}.json" for rank in range(2)], tmp_path / "all.json")
    merge_traces([tmp_path / "all.json"], tmp_path / "again.json")
    for name in ("all", "again"):
        assert [(span["pid"], span["ts"]) for span in spans_of(tmp_path / f"{name}.json")] == [(0, 0.0), (1, 3000.0)]


def test_a_trace_cut_by_a_kill_is_merged_as_far_as_it_goes(tmp_path):
    trace = Trace(path=tmp_path / "t.json")
    trace.span("whole", "compute", 0, 1)
    trace.span("cut", "compute", 2, 3)
    trace.flush()
    text = (tmp_path / "t.json").read_text()
    trace.close()
    (tmp_path / "t.json").write_text(text[:-9])
    assert merge_traces([tmp_path / "t.json"], tmp_path / "all.json") == 1


def test_merging_something_else_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"x\.json.*is not a trace"):
        merge_traces([tmp_path / "x.json"], tmp_path / "all.json")
    with pytest.raises(ConfigurationError, match="readable file"):
        merge_traces([tmp_path / "missing.json"], tmp_path / "all.json")


def test_a_trace_that_is_off_keeps_nothing_and_asks_no_clock(monkeypatch):
    trace = Trace()
    for clock in ("monotonic_ns", "time_ns"):
        monkeypatch.setattr(f"time.{clock}", lambda: pytest.fail("a trace that is off asks what time it is"))
    trace.span("x", "compute", 0, 1, step=1)
    trace.instant("x", "compute", step=1)
    trace.counter("x", 1.0)
    assert trace.num_dropped == 0
    assert trace._events == []


def test_a_forked_child_writes_nothing_into_its_parents_file(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path=path)
    trace.instant("once", "update")
    process = os.fork()
    if process == 0:
        trace.flush()
        trace.close()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    trace.close()
    names = [event["name"] for event in json.loads(path.read_text(encoding="utf-8"))]
    assert names.count("once") == 1


def test_a_trace_stays_where_it_began_when_the_program_goes_to_another_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trace = Trace(path="trace.json")
    monkeypatch.chdir(tmp_path / "elsewhere")
    trace.instant("peer lost", "communication")
    trace.close()
    assert [event["name"] for event in spans_of(tmp_path / "trace.json", "i")] == ["peer lost"]
