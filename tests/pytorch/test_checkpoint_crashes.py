"""A save that is killed or refused at any of its system calls leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rank_scripts import script_environment

HERE = Path(__file__).parent
COMPILER = shutil.which("cc")
LIMIT_S = 300

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler for what counts system calls")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "crash_points.so"
    assert COMPILER is not None
    command = [COMPILER, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, HERE / "crash_points.c", "-ldl"]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    return library


def run(shim: Path, folder: Path, *runs: str) -> list[dict[str, Any]]:
    """Run scenarios in one process; each is told as ``SCENARIO:KIND:EVERY``."""
    environment = script_environment() | {"LD_PRELOAD": os.fspath(shim)}
    found = subprocess.run(
        [sys.executable, HERE / "crash_process.py", folder, *runs],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_killed_at_every_call(shim: Path, tmp_path: Path) -> None:
    """One process over an older checkpoint, and in the background among others that are kept; some of two ranks."""
    replaced, kept, together = run(shim, tmp_path, "replaced:kill:1", "kept:kill:2", "two_ranks:kill:9")
    assert replaced["tried"] == replaced["calls"] > 20
    for counted in (replaced, kept):
        assert counted["killed, old"] + counted["killed, new"] == counted["tried"]
        assert counted["killed, new"] > 0
    assert together["killed, old"] > 2


def test_refused_at_some_calls(shim: Path, tmp_path: Path) -> None:
    """The disk fails once, or is full from then on: an error, and what was there before; or it is saved after all."""
    for counted in run(shim, tmp_path, "replaced:io_error:3", "kept:full_disk:3"):
        assert counted["refused, old"] > 5
        assert "killed, old" not in counted
