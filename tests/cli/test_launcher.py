"""The launcher on real processes: tiny scripts without torch, and no test that waits by the clock."""

import errno
import io
import json
import math
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launched_scripts import TWO_HOSTS, start

from syncline.cli.launcher.launch import Request, launch
from syncline.cli.launcher.supervisor import Limits
from syncline.cli.launcher.terminal import Terminal
from syncline.errors import ConfigurationError, LaunchError, TopologyError

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SYNCLINE_")]:
        monkeypatch.delenv(name)


def test_each_line_carries_its_rank_and_keeps_its_stream():
    code, out, error = start(
        """
        sys.stdout.write("half "); sys.stdout.flush(); print("and half")
        print("to stderr", file=sys.stderr)
        sys.stdout.write("no end")
        """
    )
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] half and half", "[0] no end", "[1] half and half", "[1] no end"]
    assert sorted(error.splitlines()) == ["[0] to stderr", "[1] to stderr"]


def test_lines_of_ranks_never_mix():
    code, out, _ = start("for k in range(300): print(str(rank) * 200)", num_ranks=3)
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 900
    assert set(lines) == {f"[{rank}] {str(rank) * 200}" for rank in range(3)}


def test_the_ranks_of_one_host_know_their_place(tmp_path):
    path = tmp_path / "net.yaml"
    path.write_text(TWO_HOSTS)
    script = "import json; print(json.dumps({k: v for k, v in os.environ.items()}))"
    code, out, _ = start(script, topology=str(path), host="b1", master="127.0.0.1:4000")
    assert code == 0
    told = {label: json.loads(rest) for label, rest in (line.split(" ", 1) for line in out.splitlines())}
    assert sorted(told) == ["[b1:1]", "[b1:2]"]
    last = told["[b1:2]"]
    assert [last[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["2", "1", "3", "2"]
    assert [last[name] for name in ("MASTER_PORT", "SYNCLINE_HOST")] == ["4000", "b1"]
    assert last["SYNCLINE_TOPOLOGY"] == str(path)


def test_ranks_share_a_secret_that_no_argument_shows():
    script = """
    path = os.environ["SYNCLINE_SECRET_FILE"]
    secret = open(path).read()
    assert secret not in open("/proc/self/cmdline").read()
    print(oct(os.stat(path).st_mode), secret)
    """
    code, out, _ = start(script)
    assert code == 0
    shown = {line.split(" ", 1)[1] for line in out.splitlines()}
    assert len(shown) == 1
    assert shown.pop().startswith("0o100600 ")


def test_no_other_program_gets_the_port_of_a_job():
    """Rank 0 may listen on it, as every server that sets SO_REUSEADDR; nobody else may, nor gets it from the kernel."""
    script = """
    import socket
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    other, server = socket.socket(), socket.socket()
    try:
        other.bind(address)
    except OSError as error:
        print("another program:", error.strerror)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(address)
    server.listen()
    print("rank 0 listens")
    """
    code, out, _ = start(script, num_ranks=1)
    assert code == 0
    assert out.splitlines() == ["[0] another program: Address already in use", "[0] rank 0 listens"]


def test_a_failure_is_reported_with_rank_code_and_traceback():
    code, _, error = start("if rank == 1: raise ValueError('boom')")
    assert code == 1
    assert "syncline: rank 1 ended with exit code 1" in error
    report = error[error.index("the job failed") :]
    assert report.startswith("the job failed: rank 1, exit code 1\n    Traceback (most recent call last):")
    assert "    ValueError: boom" in report


def test_survivors_may_say_what_they_saw_before_they_are_ended():
    script = "if rank == 1: sys.exit(3)\nprint('lost a peer', file=sys.stderr); sys.exit(4)"
    code, _, error = start(script, limits=Limits())
    assert code in {3, 4}  # whichever ended first
    assert "lost a peer" in error


def test_each_rank_has_a_log_of_its_own(tmp_path):
    script = "print('to see'); print('to fear', file=sys.stderr)"
    code, out, _ = start(script, log_folder=tmp_path / "logs")
    assert (code, out.count("to see")) == (0, 2)
    for rank in range(2):
        assert sorted((tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()) == ["to fear", "to see"]


def test_survivors_go_on_where_they_may():
    code, out, error = start("if rank == 1: sys.exit(3)\nprint('done')", limits=Limits(grace_s=math.inf))
    assert code == 0
    assert out == "[0] done\n"
    assert "the job went on without 1 of 2 ranks: rank 1, exit code 3" in error


def test_a_stubborn_rank_is_killed(tmp_path):
    os.mkfifo(tmp_path / "ready")
    code, _, error = start(
        f"""
        import signal
        if rank == 0:
            open({str(tmp_path / "ready")!r}).read()  # until the others have deaf ears
            os._exit(7)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(tmp_path / "ready")!r}, "w").close()
        while True: signal.pause()
        """
    )
    assert code == 7
    assert "then rank 1: ended by the launcher (killed by SIGKILL)" in error


def test_a_killed_rank_is_reported_with_its_signal():
    code, _, error = start("if rank == 1: os.kill(os.getpid(), 9)")
    assert code == 137
    assert "syncline: rank 1 was killed by SIGKILL" in error


def test_a_crash_in_native_code_leaves_a_traceback():
    code, _, error = start("if rank == 1: os.abort()")
    assert code == 134
    assert "the job failed: rank 1, killed by SIGABRT (abort)\n    Fatal Python error: Aborted" in error


def test_a_stopped_rank_is_ended_too():
    code, _, error = start("os.kill(os.getpid(), 19) if rank == 1 else sys.exit(5)")
    assert code == 5
    assert "then rank 1: ended by the launcher" in error


def test_what_a_rank_leaves_running_is_ended_with_it(tmp_path):
    script = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"],
                             stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid)
    """
    code, out, _ = start(script, num_ranks=1)
    assert code == 0
    wait_until_ended(int(out.split()[1]))


def test_one_rank_can_own_the_terminal(capfd):
    code, out, _ = start("print('from', rank)", terminal_rank=0)
    assert code == 0
    assert out == "[1] from 1\n"
    assert capfd.readouterr().out == "from 0\n"


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"num_ranks": None}, ConfigurationError, "say --ranks N or --topology FILE"),
        ({"num_ranks": 2, "host": "a1"}, ConfigurationError, "--host a1 needs a topology"),
        ({"num_ranks": 3, "topology": "demo-1-3"}, TopologyError, "4 ranks but the job has 3"),
        ({"num_ranks": 1, "trace": Path("/no/such/folder/x.json")}, ConfigurationError, "no folder /no/such/folder"),
        (
            {"num_ranks": 1, "secret_file": Path("/no/file")},
            ConfigurationError,
            "--secret-file '/no/file' cannot be read",
        ),
        ({"num_ranks": 2, "terminal_rank": 2}, ConfigurationError, "--foreground must be a rank from 0 to 1, got 2"),
        ({"num_ranks": 1, "command": ("/no/such/program",)}, LaunchError, "rank 0 cannot be started.*No such file"),
    ],
)
def test_what_cannot_be_started_is_refused_with_a_reason(said, error, message):
    with pytest.raises(error, match=message):
        launch(Request(**({"command": ("true",)} | said)), terminal=Terminal(stdout=io.StringIO()))


def test_a_limit_on_open_files_is_named_where_ranks_cannot_start(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(LaunchError, match=r"^rank 0 cannot be started: 'true': Too many open files; .*ulimit -n"):
        launch(Request(num_ranks=1, command=("true",)), terminal=Terminal(stdout=io.StringIO()))


class Launcher:
    """``syncline run`` in a process of its own, for signals."""

    def __init__(self, script, tmp_path, *options, under=()):
        path = tmp_path / "script.py"
        path.write_text("import os, signal, sys\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(script))
        command = [*under, sys.executable, "-m", "syncline", "run", "--ranks", "2", *options, str(path)]
        self.temporary = tmp_path / "temporary"
        self.temporary.mkdir(exist_ok=True)
        environment = os.environ | {"TMPDIR": str(self.temporary)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, env=environment)

    def lines(self, count):
        return sorted(self.process.stdout.readline().rstrip("\n") for _ in range(count))

    def finish(self):
        out, error = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, error


def test_ctrl_c_ends_all_ranks_cleanly(tmp_path):
    launcher = Launcher(
        """
        try:
            print("ready")
            while True: signal.pause()
        except KeyboardInterrupt:
            print("saved")
        """,
        tmp_path,
    )
    assert launcher.lines(2) == ["[0] ready", "[1] ready"]
    launcher.process.send_signal(signal.SIGINT)
    code, out, error = launcher.finish()
    assert (code, sorted(out.splitlines())) == (130, ["[0] saved", "[1] saved"])
    assert "Traceback" not in error


def test_the_second_ctrl_c_kills(tmp_path):
    launcher = Launcher(
        """
        signal.signal(signal.SIGINT, lambda *_: print("heard", flush=True))
        print("ready")
        while True: signal.pause()
        """,
        tmp_path,
    )
    launcher.lines(2)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.lines(2) == ["[0] heard", "[1] heard"]
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish()[0] == 130


@pytest.mark.parametrize("saves", [True, False])
def test_ranks_that_fail_when_they_are_told_to_end_are_reported(saves, tmp_path):
    """As where a save fails that a notice has asked for: those that have saved end with status 143."""
    launcher = Launcher(
        f"""
        def save(*_):
            if rank == 1 and not {saves}: sys.exit("CheckpointError: No space left on device")
            sys.exit(143)

        signal.signal(signal.SIGTERM, save)
        print("ready")
        while True: signal.pause()
        """,
        tmp_path,
    )
    launcher.lines(2)
    launcher.process.send_signal(signal.SIGTERM)
    code, _, error = launcher.finish()
    assert code == 143
    report = "syncline: the job failed: rank 1, exit code 1\n    CheckpointError: No space left on device\n"
    assert error.endswith(report) if not saves else "the job failed" not in error


def test_under_nohup_a_job_goes_on_when_its_terminal_is_closed(tmp_path):
    script = """
    signal.signal(signal.SIGUSR2, lambda *_: print("heard", flush=True))
    print("ready")
    while True: signal.pause()
    """
    launcher = Launcher(script, tmp_path, under=["nohup"])
    launcher.lines(2)
    launcher.process.send_signal(signal.SIGHUP)
    launcher.process.send_signal(signal.SIGUSR2)  # which is heard after the other
    assert launcher.lines(2) == ["[0] heard", "[1] heard"]
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.finish()[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_die_with_their_launcher(tmp_path, signal_number):
    launcher = Launcher("print(os.getpid())\nwhile True: signal.pause()", tmp_path)
    pidfds = [os.pidfd_open(int(line.split()[1])) for line in launcher.lines(2)]
    launcher.process.send_signal(signal_number)
    launcher.finish()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], DEADLINE_S)[0], "a rank outlived its launcher"
        os.close(pidfd)


def test_the_secret_of_a_killed_launcher_goes_when_the_next_one_starts(tmp_path):
    killed = Launcher("print('up')\nwhile True: signal.pause()", tmp_path)
    killed.lines(2)
    killed.process.kill()
    killed.finish()
    assert len(list(killed.temporary.glob("syncline-*/secret"))) == 1
    assert Launcher("pass", tmp_path).finish()[0] == 0
    assert not list(killed.temporary.iterdir())


@pytest.mark.parametrize(("signal_number", "name"), [(signal.SIGTERM, "t.json"), (signal.SIGKILL, "t.json.parts")])
@pytest.mark.parametrize("named_by", ["option", "variable", "variable, a folder"])
def test_a_job_that_is_killed_leaves_a_trace(tmp_path, monkeypatch, signal_number, name, named_by):
    file = tmp_path / ("trace.json" if named_by == "variable, a folder" else "t.json")
    script = """
    from syncline.observe import Trace
    trace = Trace(rank=rank, path=os.environ["SYNCLINE_TRACE"])
    trace.instant("here", "compute")
    trace.flush()
    print("up")
    while True: signal.pause()
    """
    if named_by != "option":
        monkeypatch.setenv("SYNCLINE_TRACE", str(tmp_path if named_by == "variable, a folder" else file))
    launcher = Launcher(script, tmp_path, *(("--trace", str(file)) if named_by == "option" else ()))
    launcher.lines(2)
    launcher.process.send_signal(signal_number)
    launcher.finish()
    (left,) = tmp_path.glob(f"{file.name}*")
    assert left.name == name.replace("t.json", file.name)
    parts = [left] if left.is_file() else sorted(left.iterdir())
    assert sum(part.read_text().count('"here"') for part in parts) == 2


def test_a_reader_that_goes_away_ends_the_job(tmp_path):
    launcher = Launcher("while True: print('again')", tmp_path)
    launcher.lines(1)
    launcher.process.stdout.close()
    assert launcher.process.wait(timeout=DEADLINE_S) == 128 + signal.SIGPIPE
    launcher.process.stderr.close()


def test_output_that_cannot_be_written_ends_and_the_job_goes_on():
    error = io.StringIO()
    with Path("/dev/full").open("w") as full:
        request = Request(command=(sys.executable, "-c", "print('lost')"), num_ranks=2)
        assert launch(request, terminal=Terminal(stdout=full, stderr=error)) == 0
    assert error.getvalue() == "syncline: standard output ends here: No space left on device\n"


def test_a_job_whose_standard_output_is_closed_ends(tmp_path):
    launcher = Launcher("print('lost')", tmp_path, under=["sh", "-c", 'exec "$@" >&-', "sh"])
    assert launcher.finish() == (0, "", "")


def wait_until_ended(pid):
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([pidfd], [], [], DEADLINE_S)[0], f"process {pid} still runs"
    os.close(pidfd)
