"""Local steps, and fewer bytes, on two slow sites: seconds of a step in the lab, and losses by samples in one process.

    syncline lab run NETWORK -- syncline run benchmarks/local_steps.py step --methods sharded clustered local ddp
    python benchmarks/local_steps.py loss --methods synchronous clustered local --steps 96 --seeds 0 1

``step``: each rank computes 0.1 s by a timer, and has the parameters of the GPT; the lab's ranks share too few
processors to compute the GPT itself. ``loss``: the GPT, ranks as threads on the fabric in memory, each reading its own
part of the library; the arithmetic, order of sums included, is that of a job. Of ranks that have different parameters
the first one's are judged. A time to a loss is the product of both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from accelerator import Timer
from torch import nn

import syncline
from syncline.demo.corpus import load_corpus
from syncline.demo.gpt import GPT, GPTShape, nats_per_byte
from syncline.pytorch.fleet import Fleet
from syncline.runtime import communicators_in_memory

SITES = ((0, 1, 2, 3), (4, 5, 6, 7))
CODES: tuple[Any, ...] = ("bf16", "int8", "int4", "auto")
RULES: dict[str, Callable[[], Any]] = {
    "synchronous": syncline.AllReduce,
    "sharded": syncline.Sharded,
    "clustered": lambda: syncline.Clustered(clusters=SITES, features=()),
    "forecast": lambda: syncline.Clustered(clusters=SITES, features=(), forecast=1.0),
    "local": syncline.LocalSteps,
    "quarters": lambda: syncline.LocalSteps(fragments=4),
    "in-turn": lambda: syncline.LocalSteps(fragments=1, overlap=False),
    "diloco": lambda: syncline.LocalSteps(fragments=1, overlap=False, outer=syncline.Nesterov()),
    "sites": lambda: syncline.LocalSteps(parties=SITES),
    "sites-in-turn": lambda: syncline.LocalSteps(parties=SITES, fragments=1, overlap=False),
    **{f"all-reduce-{codes}": partial(syncline.AllReduce, compress=codes) for codes in CODES},
    **{f"sharded-{codes}": partial(syncline.Sharded, compress=codes) for codes in CODES},
}
NUM_SEQUENCES = 2
SHAPE = GPTShape(width=96, num_layers=3, num_heads=4, context_length=48)


def time_step(method: str, options: argparse.Namespace) -> None:
    """Print the seconds of a step: all of them over their number, without the first period."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    if method == "ddp":
        torch.distributed.init_process_group("gloo")
        model, fleet = nn.parallel.DistributedDataParallel(model), None
    else:
        fleet = syncline.init(insecure=True)
        model, optimizer = syncline.distribute(model, optimizer, RULES[method](), fleet=fleet)
    start_s, moments = 0.0, []
    for step in range(16 + options.steps):
        if step == 16:
            start_s = time.monotonic()
        inputs = torch.randn(1, 300, requires_grad=True)
        compute: Any = Timer.apply
        compute(model(compute(inputs, 0.02, True)), 0.03, False).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        moments.append(time.monotonic())
    taken_s = (moments[-1] - start_s) / options.steps
    if int(os.environ["RANK"]) == 0:
        print(f"{method}: {taken_s:.3f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    if fleet is None:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    else:
        fleet.close()


def losses(method: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Return the validation loss after every so many steps."""
    corpus = load_corpus()
    parts = corpus.training.tensor_split(len(SITES) * len(SITES[0]))
    held_out = corpus.validation_batch(num_sequences=32, context_length=SHAPE.context_length)
    communicators = communicators_in_memory(len(parts), syncline.Topology.load("two-sites"), timeout_s=300.0)
    torch.manual_seed(seed)
    models = [GPT(SHAPE) for _ in parts]  # all go on from the first one's parameters

    def on_rank(rank: int) -> list[float]:
        with Fleet(communicators[rank]) as fleet:
            optimizer: Any = torch.optim.Adam(models[rank].parameters(), lr=2e-3)
            model, optimizer = syncline.distribute(
                models[rank], optimizer, RULES[method](), samples="batch", fleet=fleet
            )
            found = []
            for step in range(1, options.steps + 1):
                generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
                starts = torch.randint(
                    len(parts[rank]) - SHAPE.context_length - 1, (NUM_SEQUENCES,), generator=generator
                )
                windows = torch.stack([parts[rank][one : one + SHAPE.context_length + 1] for one in starts.tolist()])
                loss: Any = nats_per_byte(model, windows.long()[:, :-1], windows.long()[:, 1:])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % options.every == 0 and rank == 0:
                    with torch.no_grad():
                        found.append(float(nats_per_byte(model, *held_out)))
            return found

    with ThreadPoolExecutor(len(parts)) as pool:
        return next(iter(pool.map(on_rank, range(len(parts)))))


def main() -> None:
    """Measure each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "loss"])
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for method in options.methods:
        if options.what == "step":
            time_step(method, options)
            continue
        runs = [losses(method, seed, options) for seed in options.seeds]
        means = [f"{statistics.mean(column):.3f}" for column in zip(*runs, strict=True)]
        print(f"{method}: {', '.join(means)}, load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
