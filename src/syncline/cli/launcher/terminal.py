"""Writes whole lines to the launcher's own standard output and error, each with the name of the rank that wrote it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from syncline.cli.launcher.job import Job
from syncline.variables import is_coloured

# The colours that read well on dark and light ground; ranks share them in turn.
RANK_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
RED = 31


class Terminal:
    """The launcher's output. ``is_broken`` tells that nobody reads it any more (``syncline run ... | head``)."""

    def __init__(self, *, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._stdout = stdout or sys.stdout or _nowhere()
        self._stderr = stderr or sys.stderr or _nowhere()
        self.is_broken = False
        self._shown: list[str] = []
        """Lines that stay below all others."""

    @property
    def is_screen(self) -> bool:
        """Whether a person sees what is written as it changes."""
        return self._stderr.isatty() and self._stdout.isatty()

    def show(self, lines: list[str]) -> None:
        """Keep ``lines`` below all that is written, in place of those before; for a screen alone."""
        size, hidden = shutil.get_terminal_size(), self._hidden()
        self._shown = [line[: size.columns - 1] for line in lines[: size.lines - 2]]
        self._put(self._stderr, hidden + self._below())

    def _hidden(self) -> str:
        return f"\x1b[{len(self._shown)}F\x1b[J" if self._shown else ""

    def _below(self) -> str:
        return "".join(f"{line}\n" for line in self._shown)

    def write_lines(self, lines: list[str], *, label: str, colour: int, is_error: bool) -> None:
        """Write a rank's ``lines``, each after ``label``."""
        stream = self._stderr if is_error else self._stdout
        prefix = _painted(label, colour, stream)
        self._write(stream, "".join(f"{prefix} {line}\n" if label else f"{line}\n" for line in lines))

    def say(self, text: str, *, is_error: bool = False) -> None:
        """Write the launcher's own words."""
        stream = self._stderr
        self._write(stream, f"{_painted('syncline:', RED if is_error else 1, stream)} {text}\n")

    def _write(self, stream: TextIO, text: str) -> None:
        if text:
            self._put(stream, self._hidden() + text + self._below())

    def _put(self, stream: TextIO, text: str) -> None:
        if not text or self.is_broken:
            return
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            self.is_broken = isinstance(error, BrokenPipeError)
            # Python flushes once more at exit, which would raise again
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not self.is_broken:  # a full disk must not end the job
                self.say(f"standard output ends here: {error.strerror}", is_error=True)


def _nowhere() -> TextIO:
    """Open what takes the place of an output that is closed, for as long as this process lives."""
    return Path(os.devnull).open("w")


def labels(job: Job, *, is_in_lab: bool = False) -> Mapping[int, str]:
    """Label each rank ``"[2]"``, or ``"[b1:2]"`` where the topology names several hosts (the lab says them itself)."""
    hosts = {process.host for process in job.processes}
    has_hosts = job.topology is not None and (len(hosts) > 1 or (job.num_machines > 1 and not is_in_lab))
    return {
        process.rank: f"[{process.host}:{process.rank}]" if has_hosts else f"[{process.rank}]"
        for process in job.processes
    }


def colour_of(rank: int) -> int:
    """Choose the colour of a rank's label, as an ANSI number."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def _painted(text: str, colour: int, stream: TextIO) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if is_coloured(stream) else text
