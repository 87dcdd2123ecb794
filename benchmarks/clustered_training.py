"""One rank that trains by one of several updates, and tells its loss over time.

    syncline lab run two-sites -- syncline run benchmarks/clustered_training.py --task digits --method clustered

Rank 0 prints one line of JSON: the seconds (without evaluation) and the validation loss at each evaluation, the bytes
that the ranks' programs sent as far as they know them, and the settings. Clusters see different data (non-IID): the
digits are sorted by label and dealt out in rank order; each rank of the GPT reads its own part of the library.
``digits`` is a small model with Adam, ``digits-wide`` one with as many parameters as the GPT, and SGD.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learnt."""

    model: nn.Module
    optimize: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    draw: Callable[[int], Batch]
    """The batch of a step."""
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    validation: Batch


def adam(learning_rate: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes Adam for some parameters."""
    return partial(torch.optim.Adam, lr=learning_rate)


def small_digits(rank: int, world_size: int, seed: int) -> Task:
    """Learn the digits with 85,000 parameters, by Adam."""
    return digits(rank, world_size, seed, width=256, optimize=adam(3e-3))


def wide_digits(rank: int, world_size: int, seed: int) -> Task:
    """Learn the digits with 650,000 parameters, by SGD."""
    return digits(rank, world_size, seed, width=768, optimize=partial(torch.optim.SGD, lr=0.5))


def digits(
    rank: int,
    world_size: int,
    seed: int,
    *,
    width: int,
    optimize: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> Task:
    """Handwritten digits; ranks next to each other see the same few labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[:360], order[360:]
    own = rest[torch.argsort(labels[rest], stable=True)].tensor_split(world_size)[rank]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def draw(step: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
        chosen = own[torch.randint(len(own), (16,), generator=generator)]
        return images[chosen], labels[chosen]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Task(model=model, optimize=optimize, draw=draw, loss=loss, validation=(images[held_out], labels[held_out]))


def gpt(rank: int, world_size: int, seed: int) -> Task:
    """Byte-level GPT of the demo, smaller; each rank reads its own part of the library."""
    from syncline.demo.gpt import GPT, GPTShape, load_corpus

    shape = GPTShape(width=128, num_layers=3, num_heads=4)
    corpus = load_corpus()
    own = corpus.training.tensor_split(world_size)[rank]
    torch.manual_seed(seed)
    model = GPT(shape)
    length = shape.context_length

    def draw(step: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
        starts = torch.randint(len(own) - length - 1, (2,), generator=generator)
        windows = torch.stack([own[start : start + length + 1] for start in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    validation = corpus.validation_batch(num_sequences=32, context_length=length)
    return Task(model=model, optimize=adam(1e-3), draw=draw, loss=loss, validation=validation)


TASKS = {"digits": small_digits, "digits-wide": wide_digits, "gpt": gpt}


class Plain:
    """PyTorch's own DDP on gloo."""

    def __init__(self, task: Task) -> None:
        names = [name for name, addresses in psutil.net_if_addrs().items() if name != "lo" and addresses]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0] if names else "lo")
        torch.distributed.init_process_group("gloo")
        self.model = nn.parallel.DistributedDataParallel(task.model)
        self.optimizer = task.optimize(task.model.parameters())

    def statistics(self) -> dict[str, Any]:
        """Count nothing."""
        return {}

    def close(self) -> None:
        """Leave together."""
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


class Ours:
    """One of Syncline's update rules."""

    def __init__(self, task: Task, update: Any) -> None:
        import syncline

        self._fleet = syncline.init()
        optimizer = task.optimize(task.model.parameters())
        self.model, self.optimizer = syncline.distribute(task.model, optimizer, update, samples="batch")

    def statistics(self) -> dict[str, Any]:
        """Return what the update rule counted."""
        counted: Any = self.optimizer.statistics()
        if counted is None:
            return {}
        return {
            "clusters": counted.clusters,
            "servers": counted.servers,
            "sent_bytes_inside": counted.sent_bytes_inside,
            "sent_bytes_between": counted.sent_bytes_between,
        }

    def close(self) -> None:
        """Finish, and leave."""
        self._fleet.close()


def start(options: argparse.Namespace, task: Task) -> Plain | Ours:
    """Begin to train by the chosen method."""
    if options.method == "ddp":
        return Plain(task)
    import syncline

    if options.method == "clustered":
        make_rule = syncline.Clustered.literal if options.literal else syncline.Clustered
        rule = make_rule(
            period=options.period,
            reelect_every=options.reelect_every,
            forecast=options.forecast,
            averages=False if options.no_averages else None,
        )
        return Ours(task, rule)
    return Ours(task, {"sharded": syncline.Sharded, "allreduce": syncline.AllReduce}[options.method]())


def main() -> None:
    """Train, evaluate now and then, and print the curve."""
    options = _options()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    task = TASKS[options.task](rank, world_size, options.seed)
    training = start(options, task)
    curve: list[tuple[int, float, float]] = []
    training_s = 0.0
    for step in range(options.steps):
        start_s = time.monotonic()
        task.loss(training.model, task.draw(step)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training_s += time.monotonic() - start_s
        if (step + 1) % options.evaluate_every == 0 and rank == 0:
            with torch.no_grad():
                curve.append((step + 1, round(training_s, 4), float(task.loss(task.model, task.validation))))
    statistics = training.statistics()
    training.close()
    if rank == 0:
        print("RESULT " + json.dumps({**vars(options), "curve": curve, "statistics": statistics}), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--method", choices=["ddp", "sharded", "allreduce", "clustered"], default="clustered")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--evaluate-every", type=int, default=32)
    parser.add_argument("--period", type=int, default=16)
    parser.add_argument("--reelect-every", type=int, default=1)
    parser.add_argument("--literal", action="store_true", help="exchange as the sources say")
    parser.add_argument("--forecast", type=float, default=0.0)
    parser.add_argument("--no-averages", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
