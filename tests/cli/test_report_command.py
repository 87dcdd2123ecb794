"""``syncline run --report``, its variable under other launchers, ``syncline report`` and ``syncline explain``."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rank_scripts import run_python, run_script
from syncline.cli import explain
from syncline.errors import ConfigurationError
from syncline.observe import Trace

SCRIPT = """
import torch, torch.distributed as dist, syncline
dist.init_process_group("syncline")
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    weight.square().sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    syncline.note(loss=0.5)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script, a report of its run on 2 ranks, and the run's trace."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(SCRIPT)
    report, trace = str(folder / "run.html"), str(folder / "run.json")
    options = ("run", "--ranks", "2", "--report", report, "--trace", trace)
    done = run_python("-m", "syncline", *options, str(folder / "train.py"), splits=True)
    assert done.returncode == 0, done.stderr
    assert f"report: {report}" in done.stdout + done.stderr
    return folder


def assert_is_report(path: Path) -> None:
    page = path.read_text()
    assert "2 ranks" in page
    assert "3 steps" in page


def test_a_process_group_gets_a_report_with_an_option(folder: Path) -> None:
    assert_is_report(folder / "run.html")


def test_under_other_launchers_rank_0_writes_it(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "run.html"
    ended = run_script(folder / "train.py", 2, extra={"SYNCLINE_REPORT": str(target)}, finalizes=True)
    assert [code for code, _ in ended] == [0, 0], ended
    assert f"syncline: report: {target}" in ended[0][1]
    assert_is_report(target)
    assert list(tmp_path.iterdir()) == [target], "traces are gone"


def test_rank_0_writes_it_of_traces_that_are_kept(folder: Path, tmp_path: Path) -> None:
    target, traces = tmp_path / "run.html", tmp_path / "traces"
    traces.mkdir()
    extra = {"SYNCLINE_REPORT": str(target), "SYNCLINE_TRACE": str(traces)}
    ended = run_script(folder / "train.py", 2, extra=extra, finalizes=True)
    assert [code for code, _ in ended] == [0, 0], ended
    assert_is_report(target)
    assert sorted(path.name for path in traces.iterdir()) == ["trace-0.json", "trace-1.json"]
    extra["SYNCLINE_TRACE"] = str(tmp_path / "trace.json")
    for code, output in run_script(folder / "train.py", 2, extra=extra, finalizes=True):
        assert code == 1
        assert "let SYNCLINE_TRACE name a folder" in output


def test_a_trace_is_reported_and_explained_later(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "later.html"
    done = run_python("-m", "syncline", "report", str(folder / "run.json"), "--out", str(out), splits=True)
    assert done.returncode == 0, done.stderr
    assert_is_report(out)
    done = run_python("-m", "syncline", "explain", str(folder / "run.json"), splits=True)
    assert done.returncode == 0, done.stderr
    assert "A step took" in done.stdout
    assert "own time of each rank" in done.stdout


@pytest.mark.parametrize("command", ["report", "explain"])
def test_what_is_no_trace_is_refused(command: str, tmp_path: Path) -> None:
    done = run_python("-m", "syncline", command, str(tmp_path / "none.json"), splits=True)
    assert done.returncode == 2
    assert "cannot be read as a trace" in done.stderr


def write_trace(path: Path) -> None:
    trace = Trace(path=path)
    trace.span("forward", "compute", 0, 1000)
    trace.close()


def report_of(*args: str | Path) -> str:
    result = CliRunner().invoke(explain.app, ["report", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_folder_of_traces_is_reported_beside_it_also_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    write_trace(folder / "trace-0.json")
    target = folder.with_suffix(".html")
    assert report_of(folder) == f"report: {target}\n"
    page = target.read_text()
    target.unlink()
    monkeypatch.chdir(folder)
    assert report_of(".") == f"report: {target}\n"
    assert target.read_text() == page


def test_a_report_does_not_replace_its_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.html"
    write_trace(trace)
    write_trace(tmp_path / "trace-0.json")
    before = trace.read_text()
    for args in ([trace], [trace, "--out", trace], [tmp_path, "--out", tmp_path / "trace-0.json"]):
        with pytest.raises(ConfigurationError, match=r"would replace the trace '.*'; give another file \(--out\)"):
            report_of(*args)
    assert trace.read_text() == before
