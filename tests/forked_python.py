"""What `python ARGUMENTS` does, in a process that was forked: what takes seconds to import is there already.

A process that is to start others may fork them too (:class:`ForkingPopen`): `syncline run` its ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_MOST_FILES = 1 << 16


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def enter_namespaces(files: Sequence[int]) -> None:
    """Move this process, which has one thread still, into the namespaces of these files, where they are others."""
    own = {os.stat(f"/proc/self/ns/{name}").st_ino for name in os.listdir("/proc/self/ns")}  # noqa: PTH116, PTH208
    for file in files:
        if os.fstat(file).st_ino not in own and _libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "this process cannot move into a host of the lab")


def set_environment(environment: Mapping[str, str]) -> None:
    """Have these variables and no others; where temporary files go is asked anew."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()  # a crash in native code tells where every thread was


def set_streams(files: Sequence[int]) -> None:
    """Make files the standard input, output and error."""
    for target, source in enumerate(files):
        os.dup2(source, target)


def run_python(arguments: Sequence[str]) -> None:
    """Run `SCRIPT ...`, `-m MODULE ...` or `-c CODE ...`, and return or raise as that does."""
    arguments = arguments[1:] if arguments[0] == "-u" else arguments
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = [*arguments]
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


def end_as_python(run: Callable[[], None]) -> Never:
    """Do ``run``, and end this process as an interpreter ends, but for freeing what it was forked with.

    That takes longer than most programs, as all memory would be copied first.
    """
    status = 0
    try:
        run()
    except SystemExit as end:
        status = _status_of(end.code)
    except BaseException as error:
        sys.last_value = error  # as an interpreter does, for exit functions
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _status_of(code: Any) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


class ForkingPopen(subprocess.Popen[Any]):
    """A `subprocess.Popen` whose Python programs are forks of this process; it has one thread."""

    def __init__(self, args: Any, *, env: Mapping[str, str] | None = None, **options: Any) -> None:
        prepare = options.pop("preexec_fn", None)
        if args[0] == sys.executable and not args[1].startswith("-S"):
            options["preexec_fn"] = lambda: _become(list(args[1:]), env, prepare)
        else:
            options["preexec_fn"] = prepare
        super().__init__(args, env=env, **options)


def _become(arguments: list[str], environment: Mapping[str, str] | None, prepare: Callable[[], None] | None) -> None:
    """Be the program that would be executed, to its end; runs between fork and exec."""
    if prepare is not None:
        prepare()
    gc.freeze()  # what the parent has stays: its files are closed here, and are not to be closed again
    gc.enable()
    os.closerange(3, _MOST_FILES)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if environment is not None:
        set_environment(environment)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of the parent
    _kept.extend((sys.stdin, sys.stdout, sys.stderr))  # never flushed: what is in them is the parent's
    sys.stdin, sys.stdout, sys.stderr = _standard_streams()
    end_as_python(lambda: run_python(arguments))


_kept: list[Any] = []


def _standard_streams() -> Iterator[Any]:
    writes_through = bool(os.environ.get("PYTHONUNBUFFERED"))
    yield io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    for number, errors in ((1, "strict"), (2, "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        yield io.TextIOWrapper(
            raw if writes_through else io.BufferedWriter(raw),  # type: ignore[arg-type]
            errors=errors,
            line_buffering=number == 2,
            write_through=writes_through,
        )
