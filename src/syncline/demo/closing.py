"""What the training ends with: the curve, bytes on each link and DDP's there, lines by the model, who agrees."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

import syncline
from syncline.demo.gpt import GPT, sample
from syncline.report import draw_line_plot, link_table
from syncline.schedule import Collective, plan_ring
from syncline.schedule.traffic import link_bytes
from syncline.topology import DirectedLink, Direction, Topology

PROMPT = b"    def __init__(self"
NUM_SAMPLED_BYTES = 260
TEMPERATURE = 0.7
SAMPLE_SEED = 2
MAX_WIDTH = 100
NUM_LAST_LOSSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What the ranks found out together."""

    losses: Mapping[int, float]
    validation_loss: float
    link_bytes: Mapping[DirectedLink, int]
    num_steps: int
    """Steps of this run."""
    digests: tuple[int, ...]
    """A hash of each rank's parameters."""


def parameter_digests(fleet: syncline.Fleet, model: nn.Module) -> tuple[int, ...]:
    """Hash every rank's parameters, which must be synchronized; all ranks get the numbers of all."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    digests = torch.zeros(fleet.world_size, dtype=torch.int64)
    digests[fleet.rank] = int.from_bytes(digest.digest()[:7], "big")
    fleet.all_reduce(digests)
    return tuple(digests.tolist())


def fleet_link_bytes(fleet: syncline.Fleet) -> dict[DirectedLink, int]:
    """Sum the payload that all ranks put on each link."""
    ways: tuple[Direction, ...] = ("up", "down")
    links = [DirectedLink(name, way) for name, _ in fleet.topology.links() for way in ways]
    own = fleet.statistics().link_bytes
    counts = torch.tensor([own.get(link, 0) for link in links], dtype=torch.int64)
    fleet.all_reduce(counts)
    return dict(zip(links, counts.tolist(), strict=True))


def ring_link_bytes(topology: Topology, num_bytes: int, num_steps: int) -> dict[DirectedLink, int]:
    """Return what as many all-reduces of ``num_bytes`` on a ring put on each link, as those of gloo and NCCL do."""
    ring = plan_ring(topology, Collective.ALL_REDUCE).draft
    return {link: num_steps * amount for link, amount in link_bytes(ring, topology, num_bytes).items()}


def show_closing(closing: Closing, topology: Topology, model: GPT, checkpoint: Path) -> None:
    """Print everything; rank 0 does."""
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    _show_curve(console, closing)
    ring_bytes = ring_link_bytes(topology, 4 * model.num_parameters, closing.num_steps)
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


def _agreement(digests: tuple[int, ...]) -> str:
    if len(set(digests)) == 1:
        return f"[green]All {len(digests)} ranks hold the same parameters[/]: hash {digests[0]:014x}"
    shown = ", ".join(f"rank {rank}: {digest:014x}" for rank, digest in enumerate(digests))
    return f"[bold red]The ranks' parameters differ[/]: {shown}"


def _printable(text: bytes) -> str:
    lines = text.decode(errors="replace").splitlines()
    return "\n".join("    " + "".join(c if c.isprintable() else " " for c in line) for line in lines)
