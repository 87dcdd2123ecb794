"""``syncline.launch``: call a function on several ranks of this machine, from a notebook or a script.

Forked ranks would inherit the caller's threads of OpenMP, CUDA and open fleets, none of which survives a fork; ranks
that are started afresh do not know what a notebook's cell defines. So they are started afresh, and the function travels
by value (cloudpickle), as do the results. They belong to a launcher process of their own, the one of ``syncline run``:
a notebook's kernel has threads and an event loop already, and if it dies, the launcher ends the ranks. The launcher and
the ranks begin here too, each with a part of the call in a folder: in :func:`supervise` and :func:`call`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

import cloudpickle

from syncline.arguments import Count, checked
from syncline.cli.launcher.scratch import own_folder
from syncline.cli.launcher.supervisor import Limits
from syncline.cli.launcher.terminal import Terminal
from syncline.errors import ConfigurationError, LaunchError, SynclineError
from syncline.topology import Topology
from syncline.variables import process_variables

Result = TypeVar("Result")

DEFAULT_RANKS = 4
END_S = 10.0
"""The launcher ends all ranks faster; this is for one that does not answer."""
CALL, REPORT = "call.pickle", "report"
LIMITS = Limits(grace_s=3.0, stubborn_s=2.0)
"""With the time that Python takes to end, less than the 10 s that are promised."""
BOOT = """
import json, sys
folder, sys.path[:] = sys.argv[2], json.loads(sys.argv[3])
from syncline.cli.launcher import function
getattr(function, sys.argv[1])(folder)
"""


@checked
def launch(
    function: Callable[..., Result],
    args: Sequence[Any] = (),
    ranks: Count | None = None,
    topology: str | Path | Topology | None = None,
) -> list[Result]:
    """Call ``function(*args)`` on each of ``ranks`` processes of this machine; return the results in rank order.

    The function calls ``syncline.init()`` as a script would. It may be defined anywhere, a notebook's cell included;
    what it refers to, its arguments and its results are copied to and from the ranks. ``topology``: a file, the name of
    a shipped topology, or a :class:`Topology`, all of whose ranks start here. ``ranks``: default 4, or the topology's.
    What the ranks print appears here, each line after its rank.

    Raises ``ConfigurationError`` and ``TopologyError`` for what cannot be started, and :class:`LaunchError` if a rank
    fails, with the rank and its traceback, after all others have been ended: at most 10 s after the failure. On Ctrl-C
    (a notebook's "interrupt") it ends all ranks too.

    >>> def meet(number):
    ...     with syncline.init() as fleet:
    ...         return fleet.all_gather_object(number + fleet.rank)
    >>> syncline.launch(meet, (10,), ranks=2)
    [[10, 11], [10, 11]]
    """
    shape = topology if isinstance(topology, Topology) or topology is None else Topology.load(topology)
    if shape is not None and ranks is not None:
        shape.check_world_size(ranks)
    with own_folder() as folder:
        (folder / CALL).write_bytes(_pickled_call(function, args))
        written = folder / "topology.yaml"
        if shape is not None:
            written.write_text(shape.to_yaml())
        asked = {
            "ranks": DEFAULT_RANKS if ranks is None and shape is None else ranks,
            "topology": None if shape is None else str(written),
            "folder": str(folder),
            "parent": os.getpid(),
        }
        code = _run(boot_command("supervise", json.dumps(asked)))
        if code:
            report = folder / REPORT
            raise LaunchError(report.read_text() if report.exists() else f"the launcher ended with exit code {code}")
        num_ranks = len(list(folder.glob("result-*.pickle")))
        return [pickle.loads(result_file(folder, rank).read_bytes()) for rank in range(num_ranks)]  # noqa: S301


def boot_command(entry: str, argument: str) -> tuple[str, ...]:
    """Return what starts a process that calls ``entry(argument)`` here, and finds all modules that this one finds."""
    return (sys.executable, "-c", BOOT, entry, argument, json.dumps([str(place) for place in sys.path]))


def result_file(folder: Path, rank: int) -> Path:
    """Say where ``rank`` leaves its result."""
    return folder / f"result-{rank}.pickle"


def _pickled_call(function: Callable[..., object], args: Sequence[Any]) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps((function, tuple(args)))
    except Exception as error:  # a class can raise anything there
        raise ConfigurationError(
            f"{function!r} and its arguments must be copied to the ranks, but cannot be pickled: {error}; make what "
            "cannot be copied (open files, locks, fleets) inside the function"
        ) from error
    return pickled


def _run(command: Sequence[str]) -> int:
    """Run the launcher, and write what it writes to this process's (or this notebook's) output."""
    # a group of its own: Ctrl-C comes here alone, and the launcher is told once
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = threading.Thread(target=_copy, args=(process.stderr, sys.stderr), name="syncline launch", daemon=True)
    errors.start()
    try:
        _copy(process.stdout, sys.stdout)
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()  # which ends the ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()
        errors.join(END_S)
        process.stdout.close()
        process.stderr.close()


def _copy(pipe: IO[bytes], stream: TextIO) -> None:
    for line in pipe:
        stream.write(line.decode(errors="replace"))
        stream.flush()


class _Reporting(Terminal):
    """Keeps what went wrong for the caller's exception, the last of which is the whole report."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def say(self, text: str, *, is_error: bool = False) -> None:
        if is_error:
            (self._folder / REPORT).write_text(text)
        else:
            super().say(text)


def supervise(argument: str) -> None:
    """Start the ranks and wait for them; end them if the caller ends, however that happens."""
    from syncline.cli.launcher.launch import (
        Request,  # which neither the caller nor the ranks need
        launch as launch_ranks,
    )
    from syncline.cli.launcher.session import PR_SET_PDEATHSIG

    asked = json.loads(argument)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != asked["parent"]:  # it died in between
        sys.exit(1)
    folder = Path(asked["folder"])
    request = Request(
        command=boot_command("call", str(folder)),
        topology=asked["topology"],
        num_ranks=asked["ranks"],
        starts_all=True,
        limits=LIMITS,
    )
    terminal = _Reporting(folder)
    try:
        sys.exit(launch_ranks(request, terminal=terminal))
    except SynclineError as error:
        terminal.say(str(error), is_error=True)
        sys.exit(1)


def call(argument: str) -> None:
    """Call the function as the rank that the environment names, and leave its result in the folder."""
    folder = Path(argument)
    function, args = pickle.loads((folder / CALL).read_bytes())  # noqa: S301 - the caller's own, in a folder of its own
    result_file(folder, int(process_variables()["RANK"])).write_bytes(cloudpickle.dumps(function(*args)))
