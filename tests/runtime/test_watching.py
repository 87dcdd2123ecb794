"""What ranks answer when rank 0 asks what they do, and what is known of a process from outside."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import threading
from pathlib import Path

import pytest

from rank_scripts import run_python
from syncline.errors import ConfigurationError
from syncline.fabric.progress import BACKWARD, ELSEWHERE, FORWARD, Progress
from syncline.report.explanation import explain
from syncline.report.job_trace import read_examination
from syncline.runtime import communicators_in_memory, control
from syncline.runtime.control import ControlError, ControlKind
from syncline.runtime.whereabouts import Looks, ThreadWatch, process_state, training_place


def test_all_ranks_answer_with_what_they_do_and_record_it_only_meanwhile() -> None:
    communicators = communicators_in_memory(2)
    try:
        first, second = communicators
        for communicator in communicators:
            communicator.watch_ranks()
        hanging = first.barrier(label="report")
        found = read_examination(first.examine(0.2))
        assert [one.rank for one in found.ranks] == [0, 1]
        assert not found.absent
        (call,) = found.ranks[0].calls
        assert not call["is_over"]
        assert not found.ranks[1].calls
        stack = found.ranks[0].stacks[found.ranks[0].thread]
        assert any("test_all_ranks_answer" in line for line in stack)
        assert found.job.topology == first.topology
        assert not explain(found.job).steps
        second.barrier(label="report").wait()
        hanging.wait()
        assert not first.trace.enabled
        with pytest.raises(ConfigurationError, match="rank 0 alone asks"):
            second.examine(0.1)
    finally:
        for communicator in communicators:
            communicator.close()


def test_threads_may_be_looked_at_while_garbage_is_collected() -> None:
    """Python 3.11 could hand on, as a frame, whatever had come into its memory; in a process that it may not harm."""
    done = run_python(Path(__file__).with_name("looked_at_process.py"))
    assert done.returncode == 0, done.stdout


def test_questions_and_answers_travel_and_nonsense_is_refused() -> None:
    kind, _, number, body = control.decode_head(control.encode_examine(7, 2.5))
    assert (kind, number, control.decode_examine(body)) == (ControlKind.EXAMINE, 7, 2.5)
    kind, _, number, body = control.decode_head(control.encode_answer(7, 1, 3, b"part"))
    assert (kind, number, control.decode_answer(body)) == (ControlKind.ANSWER, 7, (1, 3, b"part"))
    for nonsense in (b"", struct.pack("<d", -1.0), struct.pack("<d", float("nan"))):
        with pytest.raises(ControlError, match="cannot be read"):
            control.decode_examine(nonsense)
    with pytest.raises(ControlError, match="cannot be read"):
        control.decode_answer(b"1")


def test_a_process_that_is_stopped_or_gone_is_told_from_one_that_runs() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert "stopped" in process_state(process.pid)
    finally:
        process.kill()
        process.wait()
    assert "ended" in process_state(process.pid)
    assert process_state(os.getpid()) == ""


def test_a_place_is_that_of_the_programs_own_code() -> None:
    assert "test_a_place_is_that" in training_place(threading.get_ident())[1]
    assert training_place(None) == ("", "")


def test_a_thread_in_a_module_or_in_autograd_is_seen_to_compute() -> None:
    """Where no hook says when a forward pass begins, the files of torch in the stack do."""
    for path, phase in (("torch/nn/modules/linear.py", FORWARD), ("torch/autograd/graph.py", BACKWARD), ("a.py", "")):
        seen: list[tuple[str, str]] = []
        code = compile("look()", f"/venv/site-packages/{path}", "exec")
        exec(code, {"look": lambda seen=seen: seen.append(training_place(threading.get_ident()))})
        ((found, place),) = seen
        assert (found, "lambda" in place) == (phase, True)


def test_what_is_seen_to_compute_has_no_place_unless_forward_passes_are_told() -> None:
    for tells_forward, num_seen in ((False, 0), (True, 1)):
        progress = Progress()
        if tells_forward:
            progress.enter(FORWARD)
            progress.enter(ELSEWHERE)
        watch = ThreadWatch(progress)
        exec(compile("look()", "/venv/torch/nn/functional.py", "exec"), {"look": watch.look})
        assert watch.looks == Looks(num_looks=1, num_forward=1)
        assert watch.take_place()[1] == num_seen
        assert watch.take_place() == ("", 0)
