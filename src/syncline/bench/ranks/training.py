"""Training steps: every method steps the same model on the same batch, some steps in a row, in turns.

The methods are none, this library's, and its peers', over gloo and over our backend. The model is residual MLP blocks,
or the demo's GPT, and the batch stays the same.

A method may let one step's communication run under the next step's computation, so steps are timed in a row:
``NUM_LEADING`` steps that are not timed, then those that are. What the last of them leaves under way is waited
for outside the time, as what the step before them left was waited for inside it. The first step of a row waits for
nothing, so the second one finds more under way than later ones do: neither is timed. Ranks begin a row some
milliseconds apart, which the slowest rank's time contains: the longer the row, the less it weighs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812 - as PyTorch's users have it
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline import Fleet
from syncline.bench.ranks.timing import LinkMeter, measure_rounds, predicted_s, predicted_step_s, wire_bound_s
from syncline.bench.rows import COMPUTE_ALONE, Carried, Row
from syncline.bench.task import ModelShape, Task
from syncline.demo import gpt
from syncline.schedule import Collective

NUM_LEADING = 2

Batch = tuple[Tensor, Tensor]

SEED = 0
LEARNING_RATE = 1e-4
PERIOD = 4
"""Steps between two averagings of PostLocalSGD; a row of steps has two of them, wherever it begins."""


class Block(nn.Module):
    """``width`` to 4 x ``width`` and back, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward = nn.Linear(width, 4 * width)
        self.outward = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is (batch, width), and so is the result."""
        out: Tensor = x + self.outward(self.inward(x).relu())
        return out


def build_model(shape: ModelShape) -> nn.Module:
    """Build the model with the same numbers on every rank and for every method."""
    torch.manual_seed(SEED)
    if shape.is_demo:
        return gpt.GPT(gpt.GPTShape())
    return nn.Sequential(*(Block(shape.width) for _ in range(shape.num_blocks)))


def build_batch(shape: ModelShape, rank: int) -> tuple[Tensor, Tensor]:
    """Return this rank's inputs and targets."""
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    if shape.is_demo:
        size = (2, shape.batch_size, gpt.GPTShape().context_length)
        inputs, targets = torch.randint(gpt.NUM_SYMBOLS, size, generator=generator)
    else:
        inputs, targets = torch.randn(2, shape.batch_size, shape.width, generator=generator)
    return inputs, targets


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of either model."""
    return (
        F.mse_loss(model(inputs), targets) if targets.is_floating_point() else gpt.nats_per_byte(model, inputs, targets)
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, as every method has it."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """A model and its optimizer, ready to train."""

    model: Any
    optimizer: Any
    finish: Callable[[], None] = lambda: None
    """Waits for what the last step left under way."""


def build_own(shape: ModelShape, update: syncline.Sharded | syncline.AllReduce | None) -> Trainee:
    """Train by a rule of this library's; without one nothing is communicated, and the ranks' models go apart."""
    model = build_model(shape)
    if update is None:
        return Trainee(model=model, optimizer=build_optimizer(model))
    model, optimizer = syncline.distribute(model, build_optimizer(model), update=update)
    return Trainee(model=model, optimizer=optimizer, finish=syncline.synchronize)


def ddp(shape: ModelShape, group: dist.ProcessGroup) -> Trainee:
    """Train by DistributedDataParallel with its defaults."""
    model = DistributedDataParallel(build_model(shape), process_group=group)
    return Trainee(model=model, optimizer=build_optimizer(model))


def zero(shape: ModelShape, group: dist.ProcessGroup) -> Trainee:
    """Train by DistributedDataParallel with the optimizer's state divided among the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its module warns of itself

    model = DistributedDataParallel(build_model(shape), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=LEARNING_RATE)
    return Trainee(model=model, optimizer=optimizer)


def fsdp2(shape: ModelShape, group: dist.ProcessGroup) -> Trainee:
    """Train by fully_shard, each block by itself."""
    model = build_model(shape)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trainee(model=model, optimizer=build_optimizer(model))


def post_local_sgd(shape: ModelShape, group: dist.ProcessGroup) -> Trainee:
    """Step alone, and average the models every few steps; this is another algorithm, which sends less."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # likewise

    model = DistributedDataParallel(build_model(shape), process_group=group)
    alone, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
    state = PostLocalSGDState(  # type: ignore[no-untyped-call]
        process_group=None, subgroup=alone, start_localSGD_iter=0, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    return Trainee(model=model, optimizer=PostLocalSGDOptimizer(build_optimizer(model), averager))


OWN: Mapping[str, syncline.Sharded | syncline.AllReduce | None] = MappingProxyType(
    {
        COMPUTE_ALONE: None,
        "Syncline Sharded": syncline.Sharded(),
        "Syncline Sharded, overlap_forward": syncline.Sharded(overlap_forward=True),
        "Syncline AllReduce": syncline.AllReduce(),
    }
)
"""The rules of this library's methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer: how the table calls it, how it is built, and the backend of the process group that it is built on."""

    title: str
    build: Callable[[ModelShape, dist.ProcessGroup], Trainee]
    backend: str = "gloo"


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "ddp": Peer(title="DDP", build=ddp),
        "ddp-syncline": Peer(title="DDP on syncline", build=ddp, backend="syncline"),
        "zero": Peer(title="DDP + ZeroRedundancyOptimizer", build=zero),
        "zero-syncline": Peer(title="DDP + ZeRO on syncline", build=zero, backend="syncline"),
        "fsdp2": Peer(title="FSDP2", build=fsdp2),
        "fsdp2-syncline": Peer(title="FSDP2 on syncline", build=fsdp2, backend="syncline"),
        "post-local-sgd": Peer(title=f"PostLocalSGD, period {PERIOD}", build=post_local_sgd),
    }
)
"""Peers by their names on the command line."""


def measure_training(task: Task, fleet: Fleet) -> Iterator[list[Row]]:
    """Build every method once, and measure all of them in turns; the rows are complete on rank 0."""
    batch = build_batch(task.shape, fleet.rank)
    chosen = {COMPUTE_ALONE, *(task.methods or OWN)}
    trainees = {name: build_own(task.shape, rule) for name, rule in OWN.items() if name in chosen}
    peers = [PEERS[name] for name in task.peers]
    groups = {backend: dist.new_group(backend=backend) for backend in dict.fromkeys(peer.backend for peer in peers)}
    trainees |= {peer.title: peer.build(task.shape, groups[peer.backend]) for peer in peers}
    timed = {name: partial(_time_steps, trainee, batch, task.num_steps) for name, trainee in trainees.items()}
    seconds = measure_rounds(timed, pace=task.pace)
    meter = LinkMeter(fleet.rank)
    carried = {
        name: meter.measure(partial(_run_steps, trainee, batch, task.num_steps)) for name, trainee in trainees.items()
    }
    num_bytes = sum(parameter.nbytes for parameter in trainees[COMPUTE_ALONE].model.parameters())
    rows = [_row(task, fleet, name, num_bytes, seconds[name], carried[name]) for name in trainees]
    median_s = rows[0].median_s
    yield [replace(row, compute_s=median_s) for row in rows]


def _row(task: Task, fleet: Fleet, name: str, num_bytes: int, seconds: tuple[float, ...], carried: Carried) -> Row:
    link_bytes = {link: total // task.num_steps for link, total in carried.link_bytes.items()}
    per_step = replace(carried, link_bytes=link_bytes, sent_bytes=carried.sent_bytes // task.num_steps)
    return Row(
        subject="training step",
        size_bytes=num_bytes,
        method=name,
        times_s=seconds,
        bound_s=wire_bound_s(fleet, Collective.ALL_REDUCE, num_bytes),
        predicted_s=_predict_wire(fleet, name, num_bytes) if name in OWN and name != COMPUTE_ALONE else None,
        **asdict(per_step),
    )


def _predict_wire(fleet: Fleet, name: str, num_bytes: int) -> float:
    """Predict the communication of one step alone, as if its buckets were one."""
    if isinstance(OWN[name], syncline.Sharded):
        return predicted_step_s(fleet, num_bytes)
    schedule = fleet.communicator.plan(Collective.ALL_REDUCE, num_bytes)
    return predicted_s(fleet, schedule, num_bytes)


def _time_steps(trainee: Trainee, batch: Batch, num_steps: int) -> float:
    for _ in range(NUM_LEADING):
        _step(trainee, batch)
    start = time.perf_counter()
    for _ in range(num_steps):
        _step(trainee, batch)
    elapsed = time.perf_counter() - start
    trainee.finish()
    return elapsed / num_steps


def _run_steps(trainee: Trainee, batch: Batch, num_steps: int) -> None:
    for _ in range(num_steps):
        _step(trainee, batch)
    trainee.finish()


def _step(trainee: Trainee, batch: Batch) -> None:
    inputs, targets = batch
    loss_of(trainee.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
