"""One rank of a comparison of update rules: trains, keeps snapshots, and writes what it measured to a folder.

Started by ``overlapped_compare.py`` and ``overlapped_straggler.py`` through ``syncline run``; every rank writes
``rank_<k>.json``. Snapshots of the parameters are taken while training and judged afterwards, so that judging costs no
time that is measured. Modes:

    synchronous   all ranks step on the mean gradient (AllReduce)
    ddp           the same with torch's DistributedDataParallel on gloo
    swap          Overlapped(rule="swap")
    at-once       the same with spread=False: a global gradient is fed in one step, for however many it stands
    rebase        Overlapped(rule="rebase")
    additive      Overlapped(rule="additive")
    periodic      own gradients alone; parameters averaged at each period's end
    local         own gradients alone, never averaged: what a rank computes when nothing is exchanged
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import syncline
from syncline.demo.corpus import load_corpus
from syncline.demo.gpt import GPT, GPTShape, nats_per_byte

MODES = ("synchronous", "ddp", "swap", "at-once", "rebase", "additive", "periodic", "local")
OVERLAPPED = ("swap", "at-once", "rebase", "additive")
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, this rank's data, and how the whole is judged."""

    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    judge: Callable[[nn.Module], float]
    batch_size: int


@dataclass
class Log:
    """What one rank measured."""

    snapshots: list[tuple[int, int, float, torch.Tensor]] = field(default_factory=list)
    """Iteration, own samples, seconds since the start, parameters."""
    num_steps: int = 0
    seconds: float = 0.0
    counted: dict[str, Any] = field(default_factory=dict)


def digits_task(rank: int, world_size: int, options: argparse.Namespace) -> Task:
    """Handwritten digits; split by label, no rank sees more than a few of them."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    everything = torch.argsort(labels, stable=True) if options.split == "labels" else torch.arange(len(labels))
    own = everything.tensor_split(world_size)[rank]
    torch.manual_seed(options.seed)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step * 1009 + rank)
        chosen = own[torch.randint(len(own), (options.batch_size,), generator=generator)]
        return images[chosen], labels[chosen]

    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs), targets)

    def judge(model: nn.Module) -> float:
        return loss(model, images, labels).item()

    return Task(model=nn.Sequential(*layers), batch=batch, loss=loss, judge=judge, batch_size=options.batch_size)


def gpt_task(rank: int, world_size: int, options: argparse.Namespace) -> Task:  # noqa: ARG001 - ranks share the text
    """Python's own source, byte by byte; ranks draw their own windows."""
    corpus = load_corpus()
    shape = GPTShape(width=64, num_layers=2, num_heads=4, context_length=48)
    torch.manual_seed(options.seed)
    model = GPT(shape)
    held_out = corpus.validation_batch(num_sequences=128, context_length=shape.context_length)

    def batch(step: int) -> Batch:
        seed = options.seed * 1_000_003 + step * 1009 + rank
        return corpus.batch(num_sequences=options.batch_size, context_length=shape.context_length, seed=seed)

    def judge(model: nn.Module) -> float:
        return nats_per_byte(model, *held_out).item()

    return Task(model=model, batch=batch, loss=nats_per_byte, judge=judge, batch_size=options.batch_size)


TASKS = {"digits": digits_task, "gpt": gpt_task}


class Trainee:
    """The model under one of the modes; ``step`` makes a step, ``iteration`` says how far the fleet is."""

    def __init__(self, task: Task, mode: str, options: argparse.Namespace, fleet: syncline.Fleet | None) -> None:
        self.task, self.mode, self.options, self.fleet = task, mode, options, fleet
        self.optimizer: Any = torch.optim.Adam(task.model.parameters(), lr=options.rate)
        self.model: nn.Module = task.model
        self.num_steps = 0
        if mode == "ddp":
            self.model = nn.parallel.DistributedDataParallel(task.model)
        elif mode not in ("periodic", "local"):
            self.model, self.optimizer = syncline.distribute(task.model, self.optimizer, self._rule(), fleet=fleet)

    def _rule(self) -> Any:
        if self.mode == "synchronous":
            return syncline.AllReduce()
        options = self.options
        staleness = None if options.max_staleness < 0 else options.max_staleness
        return syncline.Overlapped(
            period=options.period,
            quorum=options.quorum or None,
            rule="swap" if self.mode == "at-once" else self.mode,
            spread=self.mode != "at-once",
            max_staleness=staleness,
        )

    @property
    def iteration(self) -> int:
        """Iterations of the fleet."""
        return self.optimizer.iteration if self.mode in (*OVERLAPPED, "synchronous") else self.num_steps

    def step(self) -> None:
        """Make one step on this rank's next batch."""
        inputs, targets = self.task.batch(self.num_steps)
        self.optimizer.zero_grad()
        self.task.loss(self.model, inputs, targets).backward()
        emulate_compute(self.options)
        self.optimizer.step()
        self.num_steps += 1
        if self.mode == "periodic" and self.num_steps % self.options.period == 0:
            self.average()

    def average(self) -> None:
        """Average the parameters over all ranks."""
        with torch.no_grad():
            flat = nn.utils.parameters_to_vector(self.model.parameters())
            self.fleet.all_reduce(flat, op="mean")
            nn.utils.vector_to_parameters(flat, self.model.parameters())

    def end(self) -> None:
        """Make all ranks' parameters equal, where the mode does so."""
        if self.mode in OVERLAPPED:
            self.optimizer.end_period()
        elif self.mode == "periodic":
            self.average()


def emulate_compute(options: argparse.Namespace) -> None:
    """Take as long as an accelerator would: the processor is free meanwhile. One rank may be slower than the others."""
    factor = options.slow_factor if int(os.environ["RANK"]) == options.slow_rank else 1.0
    for _ in range(round(options.compute_ms * factor / 2)):
        time.sleep(0.002)  # short ones, so that a process that is stopped does not compute meanwhile


@contextlib.contextmanager
def stopped_in_turns(options: argparse.Namespace) -> Iterator[None]:
    """Let a child stop this rank and let it go on, so that it has ``1 - stop_duty`` of the time."""
    if options.stop_duty <= 0 or int(os.environ["RANK"]) != options.slow_rank:
        yield
        return
    code = (
        "import os, signal, sys, time\n"
        "pid, duty = int(sys.argv[1]), float(sys.argv[2])\n"
        "while os.getppid() == pid:\n"
        "    os.kill(pid, signal.SIGSTOP); time.sleep(0.2 * duty)\n"
        "    os.kill(pid, signal.SIGCONT); time.sleep(0.2 * (1 - duty))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid()), str(options.stop_duty)])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def train(trainee: Trainee, options: argparse.Namespace, *, barrier: Callable[[], None]) -> Log:
    """Train for so many iterations of the fleet, or seconds; snapshots are taken on the way."""
    log = Log()
    next_snapshot = 0
    barrier()
    start_s = time.perf_counter()

    def elapsed_s() -> float:
        return time.perf_counter() - start_s

    while trainee.iteration < options.iterations and (options.seconds <= 0 or elapsed_s() < options.seconds):
        if trainee.iteration >= next_snapshot:
            keep(log, trainee, elapsed_s())
            next_snapshot += options.snapshot_every
        trainee.step()
    log.num_steps, log.seconds = trainee.num_steps, elapsed_s()
    if options.seconds <= 0:
        trainee.end()
        keep(log, trainee, elapsed_s())
    return log


def keep(log: Log, trainee: Trainee, seconds: float) -> None:
    """Take a snapshot."""
    values = nn.utils.parameters_to_vector(trainee.task.model.parameters()).detach().clone()
    log.snapshots.append((trainee.iteration, trainee.num_steps * trainee.task.batch_size, seconds, values))


def judged(log: Log, task: Task) -> list[dict[str, float]]:
    """Judge every snapshot."""
    rows = []
    with torch.no_grad():
        for iteration, samples, seconds, values in log.snapshots:
            nn.utils.vector_to_parameters(values, task.model.parameters())
            rows.append(
                {"iteration": iteration, "samples": samples, "seconds": seconds, "loss": task.judge(task.model)}
            )
    return rows


@contextlib.contextmanager
def joined(mode: str) -> Iterator[syncline.Fleet | None]:
    """Connect to the other ranks, as the mode wants it."""
    if mode == "ddp":
        dist.init_process_group("gloo")
        try:
            yield None
        finally:
            dist.destroy_process_group()
        return
    with syncline.init(insecure=True) as fleet:
        yield fleet


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--split", choices=("labels", "mixed"), default="labels", help="what a rank sees of the digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long, without a last average")
    parser.add_argument("--period", type=int, default=64)
    parser.add_argument("--quorum", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=8, help="-1: none")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--compute-ms", type=float, default=0.0)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-factor", type=float, default=1.0)
    parser.add_argument(
        "--stop-duty", type=float, default=0.0, help="share of the time in which the slow rank is stopped"
    )
    parser.add_argument("--snapshot-every", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    """Train in one mode and write what was measured."""
    options = parse()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    task = TASKS[options.task](rank, world_size, options)
    with joined(options.mode) as fleet:
        trainee = Trainee(task, options.mode, options, fleet)
        with stopped_in_turns(options):
            log = train(trainee, options, barrier=fleet.barrier if fleet is not None else dist.barrier)
        if options.mode in OVERLAPPED:
            counted = trainee.optimizer.statistics()
            log.counted = {name: getattr(counted, name) for name in counted.__dataclass_fields__}
        if fleet is not None:
            fleet.barrier()  # with a time limit ranks end at different steps; none may leave another in the middle
    result = {"rank": rank, "num_steps": log.num_steps, "seconds": log.seconds, "counted": log.counted}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"rank_{rank}.json").write_text(json.dumps(result | {"rows": judged(log, task)}, indent=1))


if __name__ == "__main__":
    main()
