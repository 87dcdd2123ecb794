"""What commands have in common: an output that cannot be written is refused, before the work where that is long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

import syncline
from syncline.cli import bench, topology
from syncline.cli.commands import make_folder, writing
from syncline.errors import ConfigurationError


def start(app: object, *args: object) -> None:
    CliRunner().invoke(app, [*map(str, args)], catch_exceptions=False)  # type: ignore[arg-type]


def too_late(*_: object, **__: object) -> NoReturn:
    pytest.fail("the work has begun")


def test_an_output_folder_is_made_and_what_is_no_folder_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b", "--output")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"file' cannot be written: File exists; give another --output"):
        make_folder(tmp_path / "file", "--output")


def test_a_file_that_cannot_be_written_is_named_with_its_option() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"^'/dev/full' cannot be written: No space .*; give another --record$"),
        writing(Path("/dev/full"), "--record"),
    ):
        Path("/dev/full").write_text("a report")


@pytest.mark.parametrize("place", ["/none/net.yaml", "/proc/net.yaml"])
def test_no_topology_is_written_where_none_can_be(place: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n")
    with pytest.raises(ConfigurationError, match=r"there is no folder /none|'/proc/net.yaml' cannot be written"):
        start(topology.app, "import", tmp_path / "hosts", "--from", "hostfile", "--output", place)


def test_where_the_topology_goes_is_looked_at_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncline, "init", too_late)
    with pytest.raises(ConfigurationError, match=r"--output /none/net.yaml: there is no folder /none"):
        start(topology.app, "measure", "--output", "/none/net.yaml")


def test_a_record_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "choose_place", too_late)
    with pytest.raises(ConfigurationError, match=r"'/proc/x' cannot be written: .*; give another --record"):
        start(bench.app, "collectives", "flat-8", "--record", "/proc/x")
    monkeypatch.setattr(bench, "run_orders", too_late)
    with pytest.raises(pytest.fail.Exception):
        start(bench.app, "collectives", "flat-8", "--record", tmp_path / "record")
    assert not (tmp_path / "record").exists(), "nothing was measured"


def run_syncline(*args: str, output: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "syncline", *args]
    with Path(output).open("wb") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.PIPE, env=variables, check=False)


@pytest.mark.parametrize("args", [("topology", "show", "flat-8"), ("--version",), ("plan", "flat-8", "--json")])
def test_an_output_that_is_full_is_told_in_one_line(args: tuple[str, ...]) -> None:
    done = run_syncline(*args, output="/dev/full")
    assert done.returncode == 2
    assert done.stderr == b"error: standard output cannot be written: No space left on device; write to another file\n"


@pytest.mark.parametrize("args", [("topology", "show", "two-racks-5-3"), ("plan", "two-racks-5-3")])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_has_not_is_replaced(args: tuple[str, ...], encoding: str, tmp_path: Path) -> None:
    target = tmp_path / "shown"
    done = run_syncline(*args, output=str(target), PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "??? rack-a" in target.read_text(encoding)
