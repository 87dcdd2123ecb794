"""What the training ends with: the curve, the bytes on each link, some lines by the model, the ranks' agreement."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

import syncline
from syncline.demo.gpt import GPT, sample
from syncline.report import draw_line_plot, link_table
from syncline.topology import DirectedLink, Direction, Topology

PROMPT = b"class "
NUM_SAMPLED_BYTES = 320
TEMPERATURE = 0.7


def parameter_digests(fleet: syncline.Fleet, model: nn.Module) -> list[int]:
    """Hash every rank's parameters; the list has a number for each rank, on all of them.

    ``model`` must be synchronized.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy())
    digests = torch.zeros(fleet.world_size, dtype=torch.int64)
    digests[fleet.rank] = int.from_bytes(digest.digest()[:7], "big")
    fleet.all_reduce(digests)
    return digests.tolist()


def fleet_link_bytes(fleet: syncline.Fleet) -> dict[DirectedLink, int]:
    """Sum the payload that all ranks put on each link."""
    ways: tuple[Direction, ...] = ("up", "down")
    links = [DirectedLink(name, way) for name, _ in fleet.topology.links() for way in ways]
    own: Mapping[DirectedLink, int] = fleet.statistics().link_bytes
    counts = torch.tensor([own.get(link, 0) for link in links], dtype=torch.int64)
    fleet.all_reduce(counts)
    return dict(zip(links, counts.tolist(), strict=True))


def show_curve(console: Console, losses: Mapping[int, float], validation_loss: float) -> None:
    """Draw how the loss fell."""
    console.print("\n[bold]Loss[/] in nats per byte, mean of all ranks")
    console.print(escape(draw_line_plot(list(losses), list(losses.values()), x_label="steps")), highlight=False)
    first, last = next(iter(losses.values())), list(losses.values())[-5:]
    console.print(
        f"from {first:.2f} to {sum(last) / len(last):.2f}; on files that it never saw: [bold]{validation_loss:.2f}[/]\n"
    )


def show_links(console: Console, topology: Topology, amounts: Mapping[DirectedLink, int]) -> None:
    """Show what crossed each link."""
    console.print(link_table(topology, amounts, title="Bytes per link, all ranks together"))
    console.print(
        "[dim]needs: the time that these bytes take at the topology's rates; here all ranks share one machine[/]\n",
        highlight=False,
    )


def show_sample(console: Console, model: GPT, seed: int) -> None:
    """Let the model write."""
    text = sample(model, PROMPT, num_bytes=NUM_SAMPLED_BYTES, temperature=TEMPERATURE, seed=seed)
    console.print(f"[bold]A few lines by the model[/], after {PROMPT.decode()!r}")
    console.print(escape(_printable(PROMPT + text)), style="cyan", highlight=False)
    console.print()


def show_agreement(console: Console, digests: list[int]) -> None:
    """Say whether all ranks ended with the same parameters."""
    if len(set(digests)) == 1:
        console.print(f"[green]All {len(digests)} ranks hold the same parameters[/]: hash {digests[0]:014x}")
        return
    shown = ", ".join(f"rank {rank}: {digest:014x}" for rank, digest in enumerate(digests))
    console.print(f"[bold red]The ranks' parameters differ[/]: {shown}")


def _printable(text: bytes) -> str:
    lines = text.decode(errors="replace").splitlines()
    return "\n".join("    " + "".join(c if c.isprintable() else " " for c in line) for line in lines)
