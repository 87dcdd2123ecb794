"""The ways to train the model on all ranks: none, this library's, and its peers' over gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.bench.ranks.model import LEARNING_RATE, build_model, build_optimizer
from syncline.bench.rows import COMPUTE_ALONE
from syncline.bench.task import ModelShape

PERIOD = 4
"""Steps between two averagings of PostLocalSGD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """A model and its optimizer, ready to train."""

    model: Callable[..., Any]
    optimizer: Any
    finish: Callable[[], None] = lambda: None
    """Waits for what the last step left under way."""


def compute_alone(shape: ModelShape) -> Trainee:
    """Train without communication; the ranks' models go apart."""
    model = build_model(shape)
    return Trainee(model=model, optimizer=build_optimizer(model))


def syncline_sharded(shape: ModelShape) -> Trainee:
    """Train by this library's default."""
    return _by_syncline(shape, syncline.Sharded())


def syncline_overlapping(shape: ModelShape) -> Trainee:
    """Train by the same with all-gathers under the next forward pass."""
    return _by_syncline(shape, syncline.Sharded(overlap_forward=True))


def syncline_all_reduce(shape: ModelShape) -> Trainee:
    """Train by this library's all-reduce of gradients."""
    return _by_syncline(shape, syncline.AllReduce())


def ddp(shape: ModelShape) -> Trainee:
    """Train by DistributedDataParallel with its defaults."""
    model = DistributedDataParallel(build_model(shape))
    return Trainee(model=model, optimizer=build_optimizer(model))


def zero(shape: ModelShape) -> Trainee:
    """Train by DistributedDataParallel with the optimizer's state divided among the ranks."""
    model = DistributedDataParallel(build_model(shape))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE)
    return Trainee(model=model, optimizer=optimizer)


def fsdp2(shape: ModelShape) -> Trainee:
    """Train by fully_shard, each block by itself."""
    model = build_model(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trainee(model=model, optimizer=build_optimizer(model))


def post_local_sgd(shape: ModelShape) -> Trainee:
    """Step alone, and average the models every few steps; this is another algorithm, which sends less."""
    model = DistributedDataParallel(build_model(shape))
    alone, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
    state = PostLocalSGDState(  # type: ignore[no-untyped-call]
        process_group=None, subgroup=alone, start_localSGD_iter=0, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    return Trainee(model=model, optimizer=PostLocalSGDOptimizer(build_optimizer(model), averager))


OWN: Mapping[str, Callable[[ModelShape], Trainee]] = MappingProxyType(
    {
        COMPUTE_ALONE: compute_alone,
        "Syncline Sharded": syncline_sharded,
        "Syncline Sharded, overlap_forward": syncline_overlapping,
        "Syncline AllReduce": syncline_all_reduce,
    }
)

PEERS: Mapping[str, tuple[str, Callable[[ModelShape], Trainee]]] = MappingProxyType(
    {
        "ddp": ("DDP", ddp),
        "zero": ("DDP + ZeroRedundancyOptimizer", zero),
        "fsdp2": ("FSDP2", fsdp2),
        "post-local-sgd": (f"PostLocalSGD, period {PERIOD}", post_local_sgd),
    }
)
"""Peers by the name on the command line: how the table calls them, and how they are built."""


def _by_syncline(shape: ModelShape, update: syncline.Sharded | syncline.AllReduce) -> Trainee:
    model = build_model(shape)
    model, optimizer = syncline.distribute(model, build_optimizer(model), update=update)
    return Trainee(model=model, optimizer=optimizer, finish=syncline.synchronize)
