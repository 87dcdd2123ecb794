"""``doctor --path`` and ``--listen`` as processes: what they print, and what they end with."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from syncline.cli.path_diagnosis import PathMark, class_names, judge_path
from syncline.priorities.settings import Priorities

DOCTOR = [sys.executable, "-m", "syncline", "doctor"]
RELAY = [sys.executable, str(Path(__file__).with_name("bleaching_relay.py"))]


@contextmanager
def running(command, **popen):
    """Start a program and yield its first line; it is ended with the block."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **popen) as process:
        try:
            yield process.stdout.readline()
        finally:
            process.kill()


@contextmanager
def listening(**popen):
    with running([*DOCTOR, "--listen", "--port", "0", "--for", "60"], **popen) as line:
        assert line.startswith("answering on port ")
        yield line.split()[3]


def ask(endpoint, *more):
    return subprocess.run([*DOCTOR, "--path", endpoint, *more], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_marks_are_kept_on_loopback(host):
    with listening() as port:
        asked = ask(f"{host}:{port}")
    assert asked.returncode == 0, asked
    assert f"{host}:{port}" in asked.stdout
    assert asked.stdout.count("kept") == 4
    assert "control, class 0" in asked.stdout
    assert "All marks survive in both directions" in asked.stdout


def test_marks_that_are_cleared_are_told_with_what_to_do():
    with listening() as port, running([*RELAY, "127.0.0.1", port]) as relay_port:
        asked = ask(f"127.0.0.1:{relay_port.strip()}", "--json")
    assert asked.returncode == 1
    found = json.loads(asked.stdout)
    assert [(one["sent"], one["arrived"], one["returned"]) for one in found["marks"]] == [
        (46, 0, 0),
        (34, 0, 0),
        (18, 0, 0),
        (8, 0, 0),
    ]
    assert "46, 34, 18, 8 on the way there; 46, 34, 18, 8 on the way back" in found["verdict"]
    assert "trust DSCP" in found["verdict"]


def test_asking_and_answering_exclude_each_other():
    asked = ask("127.0.0.1", "--listen")
    assert asked.returncode == 2
    assert "give one of them" in asked.stderr


def test_no_answer_says_what_to_start():
    nothing = [PathMark(sent=46, arrived=None, returned=None)]
    assert "run `syncline doctor --listen --port 7` there" in judge_path(nothing, "::1", 7)
    assert "No answer from [::1]:7" in judge_path(nothing, "::1", 7)


def test_one_direction_alone():
    found = [PathMark(sent=46, arrived=0, returned=46), PathMark(sent=8, arrived=8, returned=8)]
    assert "changed or lost: 46 on the way there." in judge_path(found, "h", 7)


def test_each_mark_is_named_by_what_it_is_for():
    assert class_names(Priorities()) == {46: "control, class 0", 34: "class 1", 18: "class 2", 8: "class 3"}
