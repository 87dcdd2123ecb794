r"""The overlapped update's rules on a network that takes so many iterations to bring a global gradient, in one process.

    python benchmarks/overlapped_simulated.py --task digits --delays 1 2 4 --rules swap rebase --seeds 0 1 2

No network and no clock: the decisions of a fleet in which every push comes back after a fixed number of iterations are
written down, and what the tests replay recorded runs with carries them out, with the rules as they are. Prints
the loss at each period's end. Delay 0 is synchronous training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests/updates/overlapped"))

from overlapped_recording import Recorder, Redo, ServerNote, WorkerDecision
from overlapped_replay import Replica, replay
from overlapped_tasks import TASKS, Task

from syncline.pytorch.flatten import flatten, plan_model, trained_parameters
from syncline.updates import Overlapped
from syncline.updates.overlapped.server import Push
from syncline.updates.overlapped.worker import Keep, Send, Use

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--split", choices=("labels", "mixed"), default="labels", help="what a rank sees of the digits")
    parser.add_argument("--rules", nargs="+", default=["swap", "rebase"])
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--period", type=int, default=32)
    parser.add_argument("--periods", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=32, help="of the GPT")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--rate", type=float, default=1e-3)
    return parser.parse_args()


def instructions(iteration: int, delay: int, period: int) -> list[WorkerDecision]:
    """Return what a worker does in an iteration: push its gradient, use the one of ``delay`` iterations ago."""
    num_places = delay + 1
    place = iteration % num_places
    push = Push(worker=0, period=period, round_number=iteration, iteration=iteration, weight=1.0)
    done: list[WorkerDecision] = [Keep(place=place, add=False), Send(place=place, push=push)]
    closed = iteration - delay
    if closed > 0:
        subtract = closed % num_places if delay else None
        done.append(Use(closed=closed, subtract=subtract, replaces=not delay, run_length=1, num_own=1))
    out = range(max(closed, 0) + 1, iteration + 1)
    return [*done, Redo(runs=tuple((round_number % num_places, 1) for round_number in out))]


def recorders(options: argparse.Namespace, delay: int, num_buckets: int) -> list[Recorder]:
    """Write down the decisions of the whole fleet."""
    found = [Recorder() for _ in range(options.ranks)]
    members = tuple((rank, 1.0) for rank in range(options.ranks))
    for recorder in found:
        for step in range(options.periods * options.period):
            period, before = divmod(step, options.period)
            made = instructions(before + 1, delay, period)
            recorder.steps.append([(bucket, one) for bucket in range(num_buckets) for one in made])
        recorder.ends = [(number + 1) * options.period for number in range(options.periods)]
    for bucket in range(num_buckets):
        for period in range(options.periods):
            folds = [("fold", round_number) for round_number in range(1, options.period + 1)]
            for what, number in (*folds, *(("average", part) for part in range(3))):
                note = ServerNote(bucket=bucket, what=what, period=period, number=number, members=members)
                found[0].servers.append(note)
    return found


def make_replica(task: Task, rank: int, options: argparse.Namespace, losses: list[float]) -> Replica:
    """Return a worker; rank 0 judges the model when a period begins."""
    optimizer = OPTIMIZERS[options.optimizer](task.model.parameters(), lr=options.rate)
    named = trained_parameters(task.model, optimizer)
    buckets = flatten(named, plan_model(named, bucket_bytes=512 * 1024))

    def backward(step: int) -> None:
        if rank == 0 and step and step % options.period == 0:
            losses.append(judge(task))
        optimizer.zero_grad()
        with torch.enable_grad():
            task.loss(task.model, *task.batch(step)).backward()
        for bucket in buckets:
            for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True):
                assert tensor.grad is not None, "every parameter takes part in the loss"
                bucket.gradient(slot).copy_(tensor.grad)
                tensor.grad = bucket.gradient(slot)

    return Replica(rank=rank, buckets=buckets, optimizer=optimizer, backward=backward)


def judge(task: Task) -> float:
    """Return the loss on all data."""
    with torch.no_grad():
        return task.judge(task.model)


def simulate(rule: Any, delay: int, options: argparse.Namespace, seed: int) -> list[float]:
    """Train; return the loss at each period's end."""
    losses: list[float] = []
    options.seed = seed
    tasks = [TASKS[options.task](rank, options.ranks, options) for rank in range(options.ranks)]
    with torch.no_grad():
        replicas = [make_replica(task, rank, options, losses) for rank, task in enumerate(tasks)]
        chosen = Overlapped(rule=rule, period=options.period)
        replay(recorders(options, delay, len(replicas[0].buckets)), replicas, chosen)
    return [*losses, judge(tasks[0])]


def main() -> None:
    """Simulate each rule with each delay."""
    options = parse()
    torch.set_num_threads(1)
    for delay in options.delays:
        for rule in options.rules:
            runs = [simulate(rule, delay, options, seed) for seed in options.seeds]
            means = [statistics.mean(column) for column in zip(*runs, strict=True)]
            ends = [run[-1] for run in runs]
            print(
                f"{options.task}, {options.optimizer}, delay {delay}, {rule}: "
                f"{', '.join(f'{mean:.3f}' for mean in means)} ({min(ends):.3f} to {max(ends):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
