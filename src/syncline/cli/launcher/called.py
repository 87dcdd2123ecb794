"""What ``syncline.launch`` starts: one launcher, and through it the ranks, each with a part of the call in a folder."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
from pathlib import Path

import cloudpickle

from syncline.cli.launcher.function import CALL, REPORT, boot_command, result_file
from syncline.cli.launcher.launch import Request, launch
from syncline.cli.launcher.session import PR_SET_PDEATHSIG
from syncline.cli.launcher.supervisor import Limits
from syncline.cli.launcher.terminal import Terminal
from syncline.errors import SynclineError
from syncline.variables import process_variables

LIMITS = Limits(grace_s=3.0, stubborn_s=2.0)
"""With the time that Python takes to end, less than the 10 s that are promised."""


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
        sys.exit(launch(request, terminal=terminal))
    except SynclineError as error:
        terminal.say(str(error), is_error=True)
        sys.exit(1)


def call(argument: str) -> None:
    """Call the function as the rank that the environment names, and leave its result in the folder."""
    folder = Path(argument)
    function, args = pickle.loads((folder / CALL).read_bytes())  # noqa: S301 - the caller's own, in a folder of its own
    result_file(folder, int(process_variables()["RANK"])).write_bytes(cloudpickle.dumps(function(*args)))
