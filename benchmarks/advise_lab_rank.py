"""One rank of the jobs that ``advise_lab.py`` times: the same model under one update rule after the other.

Its arguments are a model's name and a JSON list of rules as ``syncline advise`` writes them. Rank 0 prints a JSON
object for each: the seconds of each of its steps, in a row, once priority classes are chosen where a rule has them.

The models compute by sleeping, so that the processors of one machine stay free for what all ranks send and step. What
``advise`` knows of a model, the sizes of its layers and how long their forward passes take, is as real as of any other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncline

RING = "DDP's ring"
NUM_TIMED = 3
MEASURED_STEPS = 2
"""What a job measures before it chooses priority classes, for rules whose next forward pass waits for parameters."""
TIMES = "ADVISE_LAB_SLOWLY"
"""The variable that says how many times longer layers take."""
NUMBERS_PER_MIB = 1 << 18
BACKWARD_PER_FORWARD = 2.0
BATCH = 4
"""Samples of a rank; a pair has those of two."""
PHASED = "phase("


class Work(torch.autograd.Function):
    """What passes through unchanged after some time, and twice as long on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Sleep, and return a copy."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sleep for longer."""
        time.sleep(BACKWARD_PER_FORWARD * ctx.seconds)
        return gradients[0], None


class Layer(nn.Module):
    """So many numbers, and so long a forward pass."""

    def __init__(self, num_numbers: int, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_numbers,), 0.01))
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        """Compute; the gradient of the weight is there when the backward pass has slept."""
        seconds = self.forward_s * len(x) / BATCH
        passed: Tensor = Work.apply(x + self.weight.mean(), seconds)  # type: ignore[no-untyped-call]
        return passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Layers from the input on: MiB of parameters, and milliseconds of a forward pass."""

    mib: tuple[float, ...]
    forward_ms: tuple[float, ...]

    def makers(self) -> list[Callable[[], nn.Module]]:
        """Return what builds each layer; it is alike on all ranks."""
        times = int(os.environ[TIMES])
        pairs = zip(self.mib, self.forward_ms, strict=True)
        return [partial(Layer, round(mib * NUMBERS_PER_MIB), times * ms / 1000) for mib, ms in pairs]

    def build(self) -> nn.Module:
        """Build the model."""
        return nn.Sequential(*(make() for make in self.makers()))


MODELS = {
    "even": Shape(mib=(1.0,) * 8, forward_ms=(10.0,) * 8),
    "large first layer": Shape(mib=(5.0, *(0.5,) * 6), forward_ms=(2.0, *(15.0,) * 6)),
    "computes long": Shape(mib=(0.5,) * 8, forward_ms=(40.0,) * 8),
}


def even() -> tuple[nn.Module, Tensor]:
    """For ``syncline advise --model``."""
    return MODELS["even"].build(), torch.ones(BATCH, 1)


def large_first_layer() -> tuple[nn.Module, Tensor]:
    """Likewise."""
    return MODELS["large first layer"].build(), torch.ones(BATCH, 1)


def computes_long() -> tuple[nn.Module, Tensor]:
    """Likewise."""
    return MODELS["computes long"].build(), torch.ones(BATCH, 1)


def rule_of(text: str) -> Any:
    """Return the update rule that is written so, as in ``syncline advise``."""
    return eval(text, {name: getattr(syncline, name) for name in syncline.__all__})


def train_phased(name: str, rule: str) -> list[float]:
    """Likewise, on pairs, whose batch is as large as those of both ranks."""
    options = eval(rule, {"phase": dict})
    optimizer = partial(torch.optim.Adam, lr=1e-6)
    trainer = syncline.phase(MODELS[name].makers(), optimizer, loss=nn.functional.mse_loss, **options)
    x, ends_s = torch.ones(2 * BATCH, 1), []
    for _ in range(2 + NUM_TIMED):
        trainer.step(x, x)
        ends_s.append(time.perf_counter())
    trainer.synchronize()
    dist.barrier()
    return [after - before for before, after in pairwise(ends_s[1:])]


def train(name: str, rule: str) -> list[float]:
    """Return the seconds of each timed step, as this rank saw them."""
    if rule.startswith(PHASED):
        return train_phased(name, rule)
    model = MODELS[name].build()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-6)
    if rule == RING:
        model = DistributedDataParallel(model, bucket_cap_mb=1)
    else:
        model, optimizer = syncline.distribute(model, optimizer, update=rule_of(rule))
    x, ends_s = torch.ones(BATCH, 1), []
    leading = 2 + MEASURED_STEPS if "overlap_forward" in rule else 1
    for _ in range(leading + NUM_TIMED):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
    if rule != RING:
        syncline.synchronize()
    dist.barrier()
    return [after - before for before, after in pairwise(ends_s[leading - 1 :])]


def main() -> None:
    """Train by each rule in turn."""
    name, rules = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with syncline.init() as fleet:
        for rule in rules:
            seconds = train(name, rule)
            if fleet.rank == 0:
                print(json.dumps({"rule": rule, "steps_s": seconds}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
