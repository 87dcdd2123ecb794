"""One rank of a comparison of update rules: trains, keeps snapshots, and writes what it measured to a folder.

Started by ``overlapped_compare.py`` and ``overlapped_straggler.py`` through ``syncline run``; every rank writes
``rank_<k>.json``. The modes that are asked for run one after another in the same processes. Before and after each,
all ranks train a copy by themselves for a while, all at once and with the fleet connected but idle (*alone*), so that
the speed of a mode can be compared with compute alone on the same processors at about the same time. Snapshots of the
parameters are taken while training and judged afterwards, so that judging costs no time that is measured. Modes:

    synchronous   all ranks step on the mean gradient (AllReduce)
    ddp           the same with torch's DistributedDataParallel on gloo
    swap          Overlapped(rule="swap")
    rebase        Overlapped(rule="rebase")
    periodic      own gradients alone; parameters averaged at each period's end
    local         own gradients alone, never averaged
"""

from __future__ import annotations

import argparse
import contextlib
import copy
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
from overlapped_tasks import TASKS, Task, on_accelerator
from torch import nn

import syncline

OVERLAPPED = ("swap", "rebase")
MODES = ("synchronous", "ddp", *OVERLAPPED, "periodic", "local")
WARM_UP_STEPS = 8
"""Before what is measured alone: the first steps of a process or of a new model are slower."""


@dataclass
class Log:
    """What one rank measured in one mode."""

    snapshots: list[tuple[int, int, float, torch.Tensor]] = field(default_factory=list)
    """Iteration, own samples, seconds since the start, parameters."""
    num_steps: int = 0
    seconds: float = 0.0
    moments: list[float] = field(default_factory=list)
    """When it began, and when each step ended; of the machine's clock, that of all ranks in a lab or on loopback."""
    alone: list[list[float]] = field(default_factory=list)
    """The same by itself, just before and just after."""
    counted: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)


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
            self.model, self.optimizer = syncline.distribute(
                task.model, self.optimizer, self._rule(), samples="batch", fleet=fleet
            )

    def _rule(self) -> Any:
        if self.mode == "synchronous":
            return syncline.AllReduce()
        options = self.options
        staleness = None if options.max_staleness < 0 else options.max_staleness
        rule: Any = self.mode
        return syncline.Overlapped(
            period=options.period,
            quorum=options.quorum or None,
            rule=rule,
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
        self.optimizer.step()
        self.num_steps += 1
        if self.mode == "periodic" and self.num_steps % self.options.period == 0:
            self.average()

    def average(self) -> None:
        """Average the parameters over all ranks."""
        assert self.fleet is not None, "DDP, which joins no fleet, has no averages"
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
        "    os.kill(pid, signal.SIGSTOP); time.sleep(0.1 * duty)\n"
        "    os.kill(pid, signal.SIGCONT); time.sleep(0.1 * (1 - duty))\n"
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", code, str(os.getpid()), str(options.stop_duty)])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def train_alone(
    model: nn.Module, task: Task, options: argparse.Namespace, *, barrier: Callable[[], None]
) -> list[float]:
    """Train ``model``, which no one distributed, on this rank while all others do so too; return its moments."""
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    moments: list[float] = []
    for number in range(-WARM_UP_STEPS, options.alone_steps):
        if number == 0:
            barrier()
            moments = [time.monotonic()]
        inputs, targets = task.batch(number)
        optimizer.zero_grad()
        task.loss(model, inputs, targets).backward()
        optimizer.step()
        moments.append(time.monotonic())
    return moments


def train(trainee: Trainee, options: argparse.Namespace, log: Log, *, barrier: Callable[[], None]) -> None:
    """Train for so many iterations of the fleet, or seconds; snapshots are taken on the way."""
    fewer = dict(one.split("=") for one in options.fewer)
    num_iterations = int(fewer.get(trainee.mode, options.iterations))
    next_snapshot = 0
    barrier()
    log.moments = [time.monotonic()]

    def elapsed_s() -> float:
        return time.monotonic() - log.moments[0]

    while trainee.iteration < num_iterations and (options.seconds <= 0 or elapsed_s() < options.seconds):
        if trainee.iteration >= next_snapshot:
            keep(log, trainee, elapsed_s())
            next_snapshot += options.snapshot_every
        trainee.step()
        log.moments.append(time.monotonic())
    log.num_steps, log.seconds = trainee.num_steps, elapsed_s()
    if options.seconds <= 0:
        trainee.end()
        keep(log, trainee, elapsed_s())


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
            loss = task.judge(task.model)
            rows.append({"iteration": iteration, "samples": samples, "seconds": seconds, "loss": loss})
    return rows


@contextlib.contextmanager
def joined(mode: str) -> Iterator[syncline.Fleet | None]:
    """Connect to the other ranks, as the mode wants it."""
    if mode == "ddp":
        dist.init_process_group("gloo")
        try:
            yield None
        finally:
            dist.barrier()
            dist.destroy_process_group()
        return
    with syncline.init(insecure=True) as fleet:
        yield fleet


def run(mode: str, options: argparse.Namespace) -> Log:
    """Train in one mode, and judge what came out."""
    task = TASKS[options.task](int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options)
    if options.accelerator_ms > 0:
        task = on_accelerator(task, options.accelerator_ms / 1000)
    log, plain = Log(), copy.deepcopy(task.model)
    with joined(mode) as fleet:
        barrier = fleet.barrier if fleet is not None else dist.barrier
        if options.alone_steps:
            log.alone.append(train_alone(plain, task, options, barrier=barrier))
        trainee = Trainee(task, mode, options, fleet)
        with stopped_in_turns(options):
            train(trainee, options, log, barrier=barrier)
        if mode in OVERLAPPED:
            counted = trainee.optimizer.statistics()
            log.counted = {name: getattr(counted, name) for name in counted.__dataclass_fields__}
        if os.environ["RANK"] == "0":
            print(f"{mode}: {log.num_steps} steps in {log.seconds:.1f} s", flush=True)
        barrier()  # with a time limit ranks end at different steps; none may leave another in the middle
        if options.alone_steps:
            log.alone.append(train_alone(plain, task, options, barrier=barrier))
    log.rows = judged(log, task)
    return log


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modes", choices=MODES, nargs="+", required=True)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--split", choices=("labels", "mixed"), default="labels", help="what a rank sees of the digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=512)
    parser.add_argument("--width", type=int, default=32, help="of the GPT")
    parser.add_argument("--fewer", nargs="*", default=[], metavar="MODE=ITERATIONS", help="modes that are cut short")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long, without a last average")
    parser.add_argument("--alone-steps", type=int, default=0, help="steps of each measurement of compute alone")
    parser.add_argument("--period", type=int, default=64)
    parser.add_argument("--quorum", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=8, help="-1: none")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--accelerator-ms", type=float, default=0.0, help="wait so long in each step, processors free")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument(
        "--stop-duty", type=float, default=0.0, help="share of the time in which the slow rank is stopped"
    )
    parser.add_argument("--snapshot-every", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    """Train in all modes and write what was measured."""
    options = parse()
    torch.set_num_threads(1)
    modes = sorted(options.modes, key="ddp".__eq__)  # it keeps its store open, in which syncline would not be met
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for mode in modes:
        log = run(mode, options)
        found[mode] = {
            "num_steps": log.num_steps,
            "seconds": log.seconds,
            "moments": log.moments,
            "alone": log.alone,
            "counted": log.counted,
            "rows": log.rows,
        }
        (options.out / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
