"""What rank 0 shows: while it trains a progress bar on a terminal, else a line every few seconds; and in the end more.

The end has the curve, bytes on each link and DDP's there, lines by the model, and whether all ranks agree.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import syncline
from syncline.demo.gpt import GPT, sample
from syncline.report import draw_line_plot, link_table
from syncline.report.terminal import new_console
from syncline.schedule import PLANNERS, Collective
from syncline.schedule.traffic import link_bytes
from syncline.topology import DirectedLink, Topology

LINE_INTERVAL_S = 5.0
PROMPT = b"    def __init__(self"
NUM_SAMPLED_BYTES = 260
TEMPERATURE = 0.7
SAMPLE_SEED = 2
NUM_LAST_LOSSES = 5


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


Display = Bar | Lines
"""A context manager that is told how the training goes on."""


def choose_display(rank: int, *, first_step: int, num_steps: int) -> Display:
    """Rank 0 shows what it can; the others are silent."""
    if rank != 0:
        return Lines(first_step=first_step, num_steps=num_steps, write=lambda _: None)
    kind = Bar if sys.stdout.isatty() else Lines
    return kind(first_step=first_step, num_steps=num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What the ranks found out together."""

    losses: Mapping[int, float]
    validation_loss: float
    link_bytes: Mapping[DirectedLink, int]
    num_steps: int
    """Steps of this run."""
    digests: tuple[str, ...]
    """A hash of each rank's parameters."""


def parameter_digests(fleet: syncline.Fleet, model: nn.Module) -> tuple[str, ...]:
    """Hash every rank's parameters, which must be synchronized; all ranks get the numbers of all."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return tuple(fleet.all_gather_object(digest.hexdigest()[:14]))


def fleet_link_bytes(fleet: syncline.Fleet) -> Mapping[DirectedLink, int]:
    """Sum the payload that all ranks put on each link."""
    return sum(map(Counter, fleet.all_gather_object(dict(fleet.statistics().link_bytes))), Counter[DirectedLink]())


def _ring_link_bytes(topology: Topology, num_bytes: int, num_steps: int) -> dict[DirectedLink, int]:
    """Return what as many all-reduces of ``num_bytes`` on a ring put on each link, as those of gloo and NCCL do."""
    ring = PLANNERS["ring"].plan(topology, Collective.ALL_REDUCE).draft
    return {link: num_steps * amount for link, amount in link_bytes(ring, topology, num_bytes).items()}


def show_closing(closing: Closing, topology: Topology, model: GPT, checkpoint: Path) -> None:
    """Print everything; rank 0 does."""
    console = new_console()
    _show_curve(console, closing)
    ring_bytes = _ring_link_bytes(topology, 4 * model.num_parameters, closing.num_steps)
    title = "Bytes per link in this run, all ranks together, and what DDP would have put there"
    console.print(link_table(topology, closing.link_bytes, title=title, beside={"DDP": ring_bytes}))
    console.print(
        "[dim]needs: the time of these bytes at the topology's rates; here all ranks share a machine.\n"
        "DDP: an all-reduce of the gradients in each step, on a ring of the ranks in their best order[/]\n"
    )
    _show_sample(console, model)
    console.print(_agreement(closing.digests))
    console.print(f"Checkpoint: {checkpoint}")
    console.print("[dim]to go on from there, on any number of ranks: --resume with more --steps[/]")


def _show_curve(console: Console, closing: Closing) -> None:
    steps, losses = list(closing.losses), list(closing.losses.values())
    console.print("\n[bold]Loss[/] in nats per byte, mean of all ranks")
    console.print(escape(draw_line_plot(steps, losses, x_label="steps")))
    last = losses[-NUM_LAST_LOSSES:]
    console.print(
        f"from {losses[0]:.2f} to [bold]{sum(last) / len(last):.2f}[/]; "
        f"on files that it never saw: [bold]{closing.validation_loss:.2f}[/]\n"
    )


def _show_sample(console: Console, model: GPT) -> None:
    text = sample(model, PROMPT, num_bytes=NUM_SAMPLED_BYTES, temperature=TEMPERATURE, seed=SAMPLE_SEED)
    console.print(f"[bold]A few lines by the model[/], after {PROMPT.decode().strip()!r}")
    console.print(escape(_printable(PROMPT + text)), style="cyan", no_wrap=True, overflow="ellipsis")
    console.print()


def _agreement(digests: tuple[str, ...]) -> str:
    if len(set(digests)) == 1:
        return f"[green]All {len(digests)} ranks hold the same parameters[/]: hash {digests[0]}"
    shown = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
    return f"[bold red]The ranks' parameters differ[/]: {shown}"


def _printable(text: bytes) -> str:
    lines = text.decode(errors="replace").splitlines()
    return "\n".join("    " + "".join(c if c.isprintable() else " " for c in line) for line in lines)
