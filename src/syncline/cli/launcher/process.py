"""One rank's process: started in its own process group, watched through a pidfd, ended with all its children.

A rank dies with its launcher, however that ends: the kernel sends SIGKILL (``PR_SET_PDEATHSIG``). That is set between
fork and exec, where only what needs no lock is allowed: one foreign call, prepared before, and ``os.getppid``. The
launcher has a single thread, so no lock can be held by another one at that moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from syncline.cli.launcher.supervisor import Exit
from syncline.errors import LaunchError

PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 127


class RankHandle:
    """A running rank: its output pipes (None where it writes to the terminal itself) and its pidfd."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.stdout = process.stdout
        self.stderr = process.stderr
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    def send_signal(self, signal_number: int) -> None:
        """Signal the whole process group; a group that is gone is no error."""
        try:
            os.killpg(self._process.pid, signal_number)
        except ProcessLookupError:
            return
        if signal_number == signal.SIGTERM:
            os.killpg(self._process.pid, signal.SIGCONT)  # a stopped process would not notice

    def take_exit(self) -> Exit:
        """How the process ended; call once, after the pidfd became readable. Kills what is left of its group.

        The process stays a zombie until its group is swept, so that its number cannot belong to somebody else.
        """
        result = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.send_signal(signal.SIGKILL)
        self._process.wait()
        os.close(self.pidfd)
        if result is not None and result.si_code == os.CLD_EXITED:
            return Exit(code=result.si_status)
        return Exit(signal_number=-self._process.returncode)


def start_rank(command: Sequence[str], *, environment: Mapping[str, str], owns_terminal: bool, name: str) -> RankHandle:
    """Start ``command``; with ``owns_terminal`` its standard output is the launcher's own."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if owns_terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=_die_with_parent(),  # noqa: PLW1509  (safe here: see this module's docstring)
        )
    except OSError as error:
        raise LaunchError(f"{name} cannot be started: '{command[0]}': {error.strerror}") from error
    return RankHandle(process)


def _die_with_parent() -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl
    launcher = os.getpid()

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died in between
            os._exit(CANNOT_EXECUTE)

    return prepare
