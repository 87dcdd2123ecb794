"""A small regression, trained by ranks that are threads on the in-memory fabric, or by one process alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.runtime import communicators_in_memory
from syncline.topology import Topology

JOIN_S = 60.0


def run_fleets(
    num_ranks: int, body: Callable[[Fleet], Any], *, accept: type[BaseException] | None = None, **options: Any
) -> list[Any]:
    """Run ``body`` on every rank; return what each returned, or the error it ended with if that is to be accepted."""
    torch.set_num_threads(1)
    options.setdefault("timeout_s", 20.0)
    topology = options.pop("topology", None) or Topology.flat(num_ranks)
    fleets = [Fleet(communicator) for communicator in communicators_in_memory(num_ranks, topology, **options)]
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def main(fleet: Fleet) -> None:
        try:
            with fleet:
                results[fleet.rank] = body(fleet)
        except BaseException as error:
            results[fleet.rank] = error
            if accept is None or not isinstance(error, accept):
                errors.append(error)

    threads = [threading.Thread(target=main, args=(fleet,), daemon=True) for fleet in fleets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in threads), f"ranks hang; errors so far: {errors}"
    if errors:
        raise errors[0]
    return results


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def batch(rank: int, step: int, size: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks see different distributions."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64) + 0.3 * rank
    targets = torch.sin(inputs[:, :3] * (1 + 0.2 * rank))
    return inputs.to(dtype), targets.to(dtype)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((model(inputs) - targets) ** 2).mean()


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def size_of(rank: int, step: int) -> int:
    """Batches differ in size, from rank to rank and from step to step."""
    return 3 + rank + step % 2


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def start(fleet: Fleet, rule: Any, make: Callable[..., Any] = make_sgd, dtype: torch.dtype = torch.float64) -> Any:
    model = make_model(dtype)
    return distribute(model, make(model.parameters()), rule, fleet=fleet)


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
