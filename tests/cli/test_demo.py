"""The main job on real processes, with very few steps; and what ``syncline demo`` refuses before it starts any."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from rank_scripts import forked_python, run_python
from syncline.bench.rows import COMPUTE_ALONE, Row
from syncline.bench.task import Pace
from syncline.cli.commands import make_folder
from syncline.cli.demo import choose_network, compare, comparison_table, explain
from syncline.demo import Update
from syncline.errors import ConfigurationError, LabError
from syncline.lab import operations
from syncline.pytorch.checkpoint.manifest import read_manifest
from syncline.topology import Topology

TIMEOUT_S = 120.0


def demo(*options):
    return [sys.executable, "-m", "syncline", "demo", *map(str, options)]


def run_demo(*options):
    done = run_python("-m", "syncline", "demo", *options, splits=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def progress_of(output):
    return read_manifest(output / "checkpoint").extra


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Six steps of four ranks on the two racks; the folder, and what was printed."""
    output = tmp_path_factory.mktemp("demo")
    return output, run_demo("--no-lab", "--steps", 6, "--output", output, "--trace", output / "trace.json")


def test_the_demo_says_what_it_does_trains_and_sums_up(first_run):
    output, shown = first_run
    assert "4 processes on this machine" in shown
    assert "rack-b  200 Mbit/s" in shown
    assert "step 6/6" in shown
    assert "All 4 ranks hold the same parameters" in shown
    assert str(output / "checkpoint") in shown.replace("\n", "")
    assert "A step took" in (output / "report.html").read_text()
    losses = dict(progress_of(output)["losses"])
    assert 5.4 < losses[1] < 5.7
    assert losses[6] < losses[1] - 0.8


def test_the_rack_of_one_sends_gradients_and_parameters_once(first_run):
    """Per step S/2 of gradients and S/2 of parameters go up; the start adds the first broadcast of the model."""
    row = re.search(r"rack-a +([\d.]+) MiB +([\d.]+) MiB +200 Mbit/s +\S+ s +([\d.]+) MiB", first_run[1])
    model_mib = 1_426_752 * 4 / (1 << 20)
    assert 6 * model_mib < float(row[1]) < 8 * model_mib
    assert float(row[3]) == pytest.approx(6 * 1.5 * model_mib, rel=0.001)  # twice 3/4 of the model, on a ring of four


@pytest.fixture(scope="module")
def trace_events(first_run):
    events = json.loads((first_run[0] / "trace.json").read_text())
    return events["traceEvents"] if isinstance(events, dict) else events


def test_the_trace_is_what_perfetto_reads(trace_events):
    required = {"X": {"name", "cat", "ts", "dur", "pid", "tid"}, "M": {"name", "pid", "args"}}
    assert {event["ph"] for event in trace_events} <= {"X", "M", "i", "C"}
    for event in trace_events:
        assert required.get(event["ph"], {"name", "pid", "ts"}) <= event.keys(), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event


def test_the_trace_shows_each_bucket_of_each_rank_on_rows_that_have_names(trace_events):
    spans = [event for event in trace_events if event["ph"] == "X"]
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in trace_events if event["name"] == "thread_name"
    }
    assert {rank for rank, _ in rows} == {0, 1, 2, 3}
    for rank in range(4):
        names = {rows[rank, span["tid"]].split()[0]: set() for span in spans if span["pid"] == rank}
        for span in spans:
            if span["pid"] == rank:
                names[rows[rank, span["tid"]].split()[0]].add(span["name"])
        buckets = {name.removeprefix("update of ") for name in names["update"]}
        assert len(buckets) > 1
        assert {"forward", "backward"} <= names["compute"]
        assert names["wait"]
        for what in ("reduce_scatter", "all_gather"):
            assert {f"{what} of {bucket}" for bucket in buckets} <= {
                name.split(",")[0] for name in names["communication"]
            }


def test_spans_of_one_row_of_the_trace_lie_one_after_another_or_one_in_another(trace_events):
    rows = {}
    for event in trace_events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row, spans in rows.items():
        open_ends = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.01, (row, start, end)
            open_ends.append(end)


def test_the_demo_explains_every_update_rule(tmp_path, capsys):
    for update in Update:
        explain(None, 2, update, tmp_path)
        assert capsys.readouterr().out.rpartition("Each rank takes a part of every batch, ")[2].count(" ") > 10


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ("overlapped", "stale"),
        ("clustered", "servers"),
        ("allreduce", "all step"),
        ("local-steps", "rounds in 3 steps"),
    ],
)
def test_the_demo_shows_every_update_rule(update, said, tmp_path):
    """With the overlapped one, the line of progress tells its staleness; its checkpoint is at a period's end."""
    shown = run_demo("--update", update, "--ranks", 2, "--steps", 3, "--output", tmp_path)
    assert "step 3/3" in shown
    assert said in shown
    assert "All 2 ranks hold the same parameters" in shown
    if update == "overlapped":
        assert "step 4/4" in run_demo("--resume", "--ranks", 2, "--steps", 4, "--output", tmp_path)


def test_the_demo_goes_on_with_another_number_of_ranks(first_run, tmp_path):
    output, _ = first_run
    shown = run_demo("--resume", "--ranks", 2, "--steps", 8, "--output", output)
    assert "2 processes on this machine" in shown
    assert "step 8/8" in shown
    assert "All 2 ranks hold the same parameters" in shown
    losses = dict(progress_of(output)["losses"])
    assert losses[7] < losses[1] - 0.8
    assert list(losses) == [1, 5, 6, 7, 8]


def test_ctrl_c_ends_the_demo_with_a_checkpoint(tmp_path):
    command = [forked_python(forks=True), *demo("--ranks", 2, "--steps", 100_000, "--output", tmp_path)[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "training" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    stopped = re.search(r"stopped after step (\d+)", out)
    assert progress_of(tmp_path)["step"] == int(stopped[1])
    assert "Traceback" not in error


def test_resuming_nothing_is_refused_before_any_rank_starts(tmp_path):
    command = demo("--resume", "--output", tmp_path / "none")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no checkpoint in")


def test_resuming_what_is_done_is_refused_before_any_rank_starts(first_run, tmp_path):
    done_steps = progress_of(first_run[0])["step"]
    command = demo("--resume", "--steps", done_steps, "--output", first_run[0])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: the checkpoint in")
    assert f"go on with --resume --steps {2 * done_steps}" in done.stderr


def test_an_output_that_cannot_be_written_is_refused_before_any_rank_starts(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="give another --output"):
        make_folder(tmp_path / "file" / "folder", "--output")


@pytest.mark.parametrize(
    ("topology", "ranks", "expected"),
    [
        (None, None, ("demo-1-3", 4)),
        (None, 4, ("demo-1-3", 4)),
        (None, 2, (None, 2)),
        ("flat-8", None, ("flat-8", None)),
        ("flat-8", 8, ("flat-8", 8)),
    ],
)
def test_the_network_is_two_racks_unless_something_else_is_said(topology, ranks, expected):
    assert choose_network(topology, ranks) == expected


PAIR = Topology.parse("topology: pair\nswitch: core\nchildren:\n  - {host: 'h[0-1]', uplink: 200 Mbit/s}\n")
METHOD = "Syncline Sharded"


def test_the_demo_ends_in_the_lab_with_ddp_beside_it(capsys):
    if os.geteuid() != 0:
        pytest.fail("the lab makes network namespaces and needs root; run with sudo (it is never skipped)")
    compare(PAIR, METHOD, pace=Pace(num_rounds=1, num_warm_ups=0))
    shown = capsys.readouterr().out
    assert re.search(r"Syncline makes \d+\.\d\d times as many as DDP", shown.replace("\n", " "))
    for name in (METHOD, "DDP", COMPUTE_ALONE):
        rate, step_s = map(float, re.search(rf"{name} +([\d.]+) +([\d.]+)", shown).groups())
        assert rate == pytest.approx(1 / step_s, rel=0.02)
    busiest = re.search(rf"{METHOD} .* h[01] (?:up|down) ([\d.]+) MiB", shown)
    assert float(busiest[1]) > 1_426_752 * 4 / (1 << 20)  # gradients of one half, and parameters of the other


def test_steps_per_second_stand_side_by_side():
    def row(method, step_s):
        return Row(
            subject="training step", order="topology", size_bytes=4, method=method, times_s=(step_s,), bound_s=0.1
        )

    table = comparison_table([row(COMPUTE_ALONE, 0.1), row(METHOD, 0.25), row("DDP", 0.5)], METHOD)
    assert "2.00 times as many as DDP" in table.title
    assert [*table.columns[1].cells] == ["4.00", "2.00", "10.00"]


def test_without_root_a_line_says_how_to_see_ddp_beside_it(capsys, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    compare(PAIR, METHOD)
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    assert "sudo" in shown


def test_a_lab_that_cannot_be_built_leaves_the_demo_as_it_ended(capsys, monkeypatch):
    def refuse(*_, **__):
        raise LabError("the kernel lacks namespaces")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(operations, "run", refuse)
    compare(PAIR, METHOD)
    assert "DDP is not shown beside it: the kernel lacks namespaces" in capsys.readouterr().err


def test_a_network_without_rates_has_nothing_to_show(capsys):
    compare(Topology.flat(2), METHOD)
    assert capsys.readouterr().out == ""
