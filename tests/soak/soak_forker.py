"""The other end of the nursery: which processes were forked there, and how each of them ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rank_scripts import script_environment

HERE = Path(__file__).parent
START_S = 120.0


class Forker:
    """The process that forks ranks."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(HERE), script_environment()["PYTHONPATH"]])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "soak_nursery.py")],
            env=script_environment() | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._rest = b""
        self.ended: dict[int, int] = {}
        self.pid = self._process.pid
        self._hear_begun(START_S)

    @property
    def handle(self) -> int:
        """What can be read when a process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self, orders: list[dict[str, Any]]) -> dict[str, int]:
        """Fork the processes; return their ids by name."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(orders).encode() + b"\n")
        self._process.stdin.flush()
        return self._hear_begun(START_S)

    def read(self) -> list[dict[str, Any]]:
        """Read what it says; ends of processes are noted in ``ended``."""
        data = os.read(self.handle, 1 << 16)
        assert data, "the nursery has ended"
        *lines, self._rest = (self._rest + data).split(b"\n")
        said = [json.loads(line) for line in lines]
        for one in said:
            if "ended" in one:
                self.ended[one["ended"]] = one["status"]
            for process in one.get("begun", {}).values():  # it may have the number of one that has ended long ago
                self.ended.pop(process, None)
        return said

    def end(self) -> None:
        """End it, and with it whatever it forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _hear_begun(self, timeout_s: float) -> dict[str, int]:
        deadline_s = time.monotonic() + timeout_s
        while select.select([self.handle], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            for one in self.read():
                if "begun" in one:
                    begun: dict[str, int] = one["begun"]
                    return begun
        raise AssertionError(f"the nursery began nothing within {timeout_s:g} s")
