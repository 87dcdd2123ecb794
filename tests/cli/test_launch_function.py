"""``syncline.launch``: functions of a test, of a script and of a notebook on several processes, and their errors."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import syncline
from rank_scripts import script_environment
from syncline.errors import ConfigurationError, LaunchError, TopologyError

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SYNCLINE_")]:
        monkeypatch.delenv(name)


def place():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["LOCAL_RANK"]


def add(first, second):
    return first + second + int(os.environ["RANK"])


def fail(rank, folder):
    """Fail on one rank, after all have come; the others wait for ever."""
    own = int(os.environ["RANK"])
    (Path(folder) / f"{own}.pid").write_text(str(os.getpid()))
    syncline.init().barrier()
    if own != rank:
        signal.pause()
    raise ValueError("planted")


def is_alive(pid):
    return Path(f"/proc/{pid}").exists()


def test_results_come_in_rank_order_and_output_with_its_rank(capsys):
    assert syncline.launch(place) == [(rank, 4, str(rank)) for rank in range(4)]
    assert syncline.launch(add, (1, 2), ranks=2) == [3, 4]
    syncline.launch(print, ["seen"], ranks=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] seen", "[1] seen"]


def test_every_rank_of_a_topology_starts_here_and_is_told_of_it():
    def told():
        topology = syncline.Topology.load(os.environ["SYNCLINE_TOPOLOGY"])
        return topology.name, os.environ["SYNCLINE_HOST"]

    assert syncline.launch(told, topology="demo-1-3") == [("demo-1-3", f"h{rank}") for rank in range(4)]
    flat = syncline.Topology.flat(2)
    assert syncline.launch(told, topology=flat) == [(flat.name, flat.host_of(rank).name) for rank in range(2)]


def test_the_error_names_the_rank_with_its_traceback_and_no_process_is_left(tmp_path):
    with pytest.raises(LaunchError) as caught:
        syncline.launch(fail, (1, str(tmp_path)), ranks=3)
    text = str(caught.value)
    assert text.startswith("the job failed: rank 1, exit code 1\n")
    assert "Traceback (most recent call last):" in text
    assert "in fail" in text
    assert "ValueError: planted" in text
    assert "then ranks 0 and 2: ended by the launcher (killed by SIGTERM)" in text
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 3
    assert not any(is_alive(pid) for pid in pids)


def test_what_cannot_be_done_is_said_before_anything_starts():
    with pytest.raises(ConfigurationError, match="ranks must be a whole number from 1 up, or None, not 0"):
        syncline.launch(place, ranks=0)
    with pytest.raises(ConfigurationError, match=r"cannot be pickled.*inside the function"):
        syncline.launch(print, (threading.Lock(),))
    with pytest.raises(TopologyError, match="the topology has 4 ranks but the job has 3"):
        syncline.launch(place, ranks=3, topology="demo-1-3")


def test_a_result_that_cannot_be_sent_back_is_an_error_of_its_rank():
    def locked():
        return threading.Lock()

    with pytest.raises(LaunchError, match=r"rank 0, exit code 1[\s\S]*cannot pickle"):
        syncline.launch(locked, ranks=1)


SCRIPT = """
    import os
    import syncline

    FACTOR = 3

    class Result:
        def __init__(self, value):
            self.value = value

    def scaled(number):
        return Result(number * FACTOR + int(os.environ["RANK"]))

    results = syncline.launch(scaled, (5,), ranks=2)
    assert all(isinstance(result, Result) for result in results)
    print([result.value for result in results])
"""


@pytest.mark.parametrize("kind", ["script", "-c", "cell"])
def test_functions_of_a_script_or_a_notebooks_cell(kind, tmp_path):
    """A cell is compiled by itself and run in ``__main__``, by a process with a running event loop and threads."""
    code = textwrap.dedent(SCRIPT)
    if kind == "cell":
        code = f"""
import asyncio, threading
async def kernel():
    threading.Thread(target=asyncio.Event, daemon=True).start()
    exec(compile({code!r}, "<ipython-input-1>", "exec"), globals())
asyncio.run(kernel())
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, str(script)] if kind == "script" else [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=script_environment(), capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert done.stdout.splitlines() == ["[15, 16]"], done.stderr


WAITING = """
    import os, signal, sys
    import syncline

    def wait():
        print(os.getpid(), flush=True)
        signal.pause()

    syncline.launch(wait, ranks=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_caller(number, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(WAITING))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=script_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    endings = [os.pidfd_open(pid) for pid in pids]
    process.send_signal(number)
    _, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode in (-number, 1)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in error
        assert not any(is_alive(pid) for pid in pids)
    for ending in endings:
        signalled = _wait_for_end(ending)
        os.close(ending)
        assert signalled


def _wait_for_end(pidfd):
    return bool(select.select([pidfd], [], [], DEADLINE_S)[0])
