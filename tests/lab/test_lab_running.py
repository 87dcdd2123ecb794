"""One command on every host: prefixes, failures and signals."""

import io
import signal
import subprocess
import sys

import pytest

from syncline.lab import operations, records
from syncline.lab.operations import run
from syncline.topology import Topology

RUN = """
import sys
from syncline.lab.operations import run
from syncline.topology import Topology
sys.exit(run(Topology.flat(2), [sys.executable, "-uc", sys.argv[1]], report=lambda text: print("!", text, flush=True)))
"""
BULK = """
import os, signal
def end(number, frame):
    print("got", number, flush=True)
    raise SystemExit(3)
signal.signal(signal.SIGINT, end)
print("ready", os.environ["SYNCLINE_LAB"], flush=True)
while True:
    signal.pause()
"""
STUBBORN = BULK.replace("    raise SystemExit(3)\n", "")


def run_here(code, topology=None, **options):
    output, errors, reports = io.StringIO(), io.StringIO(), []
    argv = [sys.executable, "-c", code]
    topology = topology or Topology.flat(2)
    status = run(topology, argv, output=output, errors=errors, report=reports.append, **options)
    return status, output.getvalue(), errors.getvalue(), reports


def test_lines_get_the_name_of_their_host():
    code = (
        "import os, sys\n"
        "print('one'); print('two\\r2', end='', flush=True); print('bad', file=sys.stderr, flush=True)\n"
        "os.write(1, b'\\xff')"
    )
    status, output, errors, reports = run_here(code)
    assert (status, reports) == (0, [])
    for host in ("h0", "h1"):
        lines = [line for line in output.splitlines() if line.startswith(host)]
        assert sorted(lines) == sorted([f"{host} | one", f"{host} | two", f"{host} | 2\ufffd"])
        assert f"{host} | bad\n" in errors


def test_the_user_is_told_what_is_left_out():
    _, _, _, reports = run_here("pass", Topology.parse("host: box\nranks: 2\nlocal: 1 GB/s\n"))
    assert reports == ["Ranks of one host talk over its loopback: the rates of rank 0, rank 1 are left out."]


def test_the_first_failure_is_the_status_and_is_told():
    status, _, _, reports = run_here("import os, sys; sys.exit(7 if os.environ['SYNCLINE_HOST'] == 'h1' else 0)")
    assert status == 7
    assert reports == ["h1 ended with status 7; the other hosts have 10 s to end"]


def test_hosts_that_stay_after_a_failure_are_ended(monkeypatch):
    sent = []

    def signal_groups(processes, number):
        sent.append(number)
        records.signal_groups(processes, number)

    monkeypatch.setattr(operations, "GRACE_S", 0.2)
    monkeypatch.setattr(operations, "signal_groups", signal_groups)
    code = "import os, signal\nif os.environ['SYNCLINE_HOST'] == 'h1':\n    raise SystemExit(9)\nsignal.pause()"
    status, _, _, reports = run_here(code)
    assert (status, reports) == (9, ["h1 ended with status 9; the other hosts have 0.2 s to end"])
    assert sent[0] == signal.SIGTERM


def test_a_pipe_that_a_daemon_holds_open_does_not_keep_the_run_waiting():
    code = "import os, signal\nif os.fork() == 0:\n    os.setsid()\n    signal.pause()\nprint('done', flush=True)"
    status, output, _, _ = run_here(code, Topology.flat(1))
    assert (status, output) == (0, "h0 | done\n")


@pytest.fixture
def start():
    processes = []

    def begin(code):
        argv = [sys.executable, "-c", RUN, code]
        processes.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        lab_id = processes[0].stdout.readline().split()[-1]
        assert "ready" in processes[0].stdout.readline()
        return processes[0], lab_id

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_the_lab_removed(start, is_gone, number):
    process, lab_id = start(BULK)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert sorted(output.splitlines()) == ["h0 | got 2", "h1 | got 2"]
    assert process.returncode == 130
    assert is_gone(lab_id)


def test_a_second_signal_does_not_wait(start, is_gone):
    process, lab_id = start(STUBBORN)
    process.send_signal(signal.SIGINT)
    assert "got 2" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert is_gone(lab_id)
