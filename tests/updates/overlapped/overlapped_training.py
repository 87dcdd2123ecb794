"""A small regression, trained by ranks that are threads on the in-memory fabric, or by one process alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from small_regression import batch, loss_of, make_adam, make_model, make_sgd, parameters_of
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.topology import Topology
from syncline.updates import Overlapped
from thread_fleets import run_fleets


def size_of(rank: int, step: int) -> int:
    """Batches differ in size, from rank to rank and from step to step."""
    return 3 + rank + step % 2


def start(
    fleet: Fleet, rule: Any, make: Callable[..., Any] = make_sgd, dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    model = make_model(dtype)
    return distribute(model, make(model.parameters()), rule, samples="batch", fleet=fleet, **options)


def one_step(model: nn.Module, optimizer: Any, rank: int, step: int, dtype: torch.dtype = torch.float64) -> None:
    loss_of(model, *batch(rank, step, size_of(rank, step), dtype)).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_alone(
    num_ranks: int, steps: range, make: Callable[..., Any] = make_sgd, model: nn.Module | None = None
) -> torch.Tensor:
    """Train as one process on the union of the ranks' batches."""
    model = model if model is not None else make_model()
    optimizer = make(model.parameters())
    for step in steps:
        parts = [batch(rank, step, size_of(rank, step)) for rank in range(num_ranks)]
        loss_of(model, torch.cat([inputs for inputs, _ in parts]), torch.cat([goal for _, goal in parts])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


def sites(*sizes: int) -> Topology:
    """Sites a, b, ... of so many hosts, joined by slow links."""
    rows = [
        f'  - {{switch: {name}, uplink: 20 Mbit/s, children: [{{host: "{name}[0-{size - 1}]", uplink: 1 Gbit/s}}]}}'
        for name, size in zip("abc", sizes, strict=False)
    ]
    return Topology.parse("\n".join(["switch: wide-area", "children:", *rows]))


def wait_for_silent(network: Any, silent: int) -> str:
    """Train until rank 0 gives up waiting for a rank that makes no step; return what it says."""
    release = threading.Event()

    def body(fleet: Fleet) -> None:
        model, optimizer = start(fleet, Overlapped(period=50, max_staleness=2), make_adam)
        if fleet.rank == silent:
            assert release.wait(60)
            return
        if fleet.rank == 0:
            optimizer.training.updater.client._timeout_s = 1.5  # now that the job stands, which may take as long
        try:
            for step in range(5):
                one_step(model, optimizer, fleet.rank, step)
        finally:
            release.set()

    return str(run_fleets(network, body, accept=BaseException)[0])
