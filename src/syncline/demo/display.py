"""What rank 0 shows while it trains: a progress bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """How the training stands after ``step`` steps."""

    step: int
    loss: float
    tokens_per_s: float
    waiting: float
    """Share of the time, from 0 to 1, that this rank waited for the network."""
    update: str = ""
    """How the update rule fares, if it has anything to say."""


class Display(Protocol):
    """A context manager that is told how the training goes on."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, moment: Moment) -> None:
        """Show the newest state."""

    def note(self, text: str) -> None:
        """Say something besides."""


class Silence:
    """The display of every other rank."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, moment: Moment) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""


class Bar:
    """A progress bar at the bottom of the terminal."""

    def __init__(self, *, first_step: int, num_steps: int) -> None:
        self._progress = Progress(
            TextColumn("[bold]training[/]"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}[/]"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TextColumn("waiting {task.fields[waiting]}"),
            TextColumn("{task.fields[update]}"),
            TimeRemainingColumn(),
            console=Console(),
            expand=True,
            refresh_per_second=2,  # drawing takes time from the training
        )
        self._task = self._progress.add_task(
            "", total=num_steps, completed=first_step, loss="-", rate="-", waiting="-", update=""
        )

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, moment: Moment) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            completed=moment.step,
            loss=f"{moment.loss:.3f}",
            rate=f"{moment.tokens_per_s:,.0f}",
            waiting=f"{moment.waiting:.0%}",
            update=moment.update,
        )

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        self._progress.console.print(text, highlight=False)


class Lines:
    """A line every few seconds, for files and pipes."""

    def __init__(
        self,
        *,
        first_step: int,
        num_steps: int,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], object] = print,
    ) -> None:
        self._first_step = first_step
        self._num_steps = num_steps
        self._clock = clock
        self._write = write
        self._began_s = self._shown_s = clock()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, moment: Moment) -> None:
        """Write a line if the last one is some seconds old, or if this is the end."""
        now_s = self._clock()
        if now_s - self._shown_s < LINE_INTERVAL_S and moment.step < self._num_steps:
            return
        self._shown_s = now_s
        left_s = (now_s - self._began_s) / (moment.step - self._first_step) * (self._num_steps - moment.step)
        self._write(
            f"step {moment.step}/{self._num_steps}  loss {moment.loss:.3f}  {moment.tokens_per_s:,.0f} tokens/s  "
            f"waiting {moment.waiting:.0%}  {moment.update + '  ' if moment.update else ''}{left_s:.0f} s left"
        )

    def note(self, text: str) -> None:
        """Write a line at once."""
        self._write(text)


def choose_display(rank: int, *, first_step: int, num_steps: int) -> Display:
    """Rank 0 shows what it can; the others are silent."""
    if rank != 0:
        return Silence()
    kind = Bar if sys.stdout.isatty() else Lines
    return kind(first_step=first_step, num_steps=num_steps)
