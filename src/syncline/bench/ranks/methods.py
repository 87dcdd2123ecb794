"""The ways to train the model on all ranks: none, this library's, and its peers', over gloo and over our backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.bench.ranks.model import LEARNING_RATE, build_model, build_optimizer
from syncline.bench.rows import COMPUTE_ALONE
from syncline.bench.task import ModelShape

PERIOD = 4
"""Steps between two averagings of PostLocalSGD; a row of steps has two of them, wherever it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """A model and its optimizer, ready to train."""

    model: Any
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


def ddp(shape: ModelShape, group: dist.ProcessGroup) -> Trainee:
    """Train by DistributedDataParallel with its defaults."""
    model = DistributedDataParallel(build_model(shape), process_group=group)
    return Trainee(model=model, optimizer=build_optimizer(model))


def zero(shape: ModelShape, group: dist.ProcessGroup) -> Trainee:
    """Train by DistributedDataParallel with the optimizer's state divided among the ranks."""
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
    model = DistributedDataParallel(build_model(shape), process_group=group)
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
DIVIDED = frozenset({"Syncline Sharded", "Syncline Sharded, overlap_forward"})
"""Those of them that reduce-scatter gradients and all-gather parameters."""


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


def _by_syncline(shape: ModelShape, update: syncline.Sharded | syncline.AllReduce) -> Trainee:
    model = build_model(shape)
    model, optimizer = syncline.distribute(model, build_optimizer(model), update=update)
    return Trainee(model=model, optimizer=optimizer, finish=syncline.synchronize)
