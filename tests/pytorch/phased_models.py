"""Models of stages, one process that holds all of one, and pairs of ranks that do not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from syncline.pytorch.fleet import Fleet
from syncline.pytorch.phased import phase

WIDTHS = (6, 40, 3, 17, 9, 25, 8, 4, 12, 5)
"""Stages of unequal size; the last one is the number of targets."""

Batch = tuple[torch.Tensor, torch.Tensor]


def make_stages(num_stages: int, *, dropout: float = 0.0, seed: int = 3) -> list[nn.Module]:
    """Return stages in double precision; every third has but one layer."""
    generator = torch.Generator().manual_seed(seed)
    widths = [*WIDTHS[:num_stages], 3]
    stages: list[nn.Module] = []
    for number, (first, second) in enumerate(pairwise(widths)):
        layers: list[nn.Module] = [nn.Linear(first, second)]
        if number % 3 != 2:
            layers += [nn.Tanh(), nn.Linear(second, second), nn.Dropout(dropout)]
        stages.append(nn.Sequential(*layers).double())
    for stage in stages:
        for parameter in stage.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(values / (parameter.shape[-1] ** 0.5))
    return stages


def squared(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((output - targets) ** 2).mean()


def make_batches(num_steps: int, num_pairs: int, *, width: int = 3) -> list[list[Batch]]:
    """Return, for each step and pair, a batch: unequal ones, different in each step."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for step in range(num_steps):
        sizes = [2 + (3 * pair + step) % 4 for pair in range(num_pairs)]
        batches.append(
            [
                (
                    torch.randn(size, WIDTHS[0], generator=generator, dtype=torch.float64) + 0.3 * pair,
                    torch.randn(size, width, generator=generator, dtype=torch.float64),
                )
                for pair, size in enumerate(sizes)
            ]
        )
    return batches


def train_alone(
    stages: Sequence[nn.Module],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: Sequence[Sequence[Batch]],
) -> list[list[float]]:
    """Train as one process on the union of the batches; return each pair's loss in each step."""
    model = nn.Sequential(*stages)
    optimizer = make_optimizer([one for one in model.parameters() if one.requires_grad])
    losses = []
    for step in batches:
        total = sum(len(inputs) for inputs, _ in step)
        parts = [squared(model(inputs), targets) for inputs, targets in step]
        sum(part * (len(inputs) / total) for part, (inputs, _) in zip(parts, step, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([float(part.detach()) for part in parts])
    return losses


def train_in_pairs(
    stages: Sequence[nn.Module],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: Sequence[Sequence[Batch]],
    run_fleets: Callable[..., list[Any]],
    *,
    world: Any = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train on pairs of ranks; return what each rank ended with."""
    num_pairs = len(batches[0])
    world = 2 * num_pairs if world is None else world
    copies = [copy.deepcopy(list(stages)) for _ in range(2 * num_pairs)]

    def body(fleet: Fleet) -> dict[str, Any]:
        trainer = phase(copies[fleet.rank], make_optimizer, loss=squared, fleet=fleet, **options)
        pair = fleet.rank // 2
        losses = [trainer.step(*step[pair]) for step in batches]
        return {
            "losses": losses,
            "stages": dict(trainer.stage_states()),
            "statistics": trainer.statistics(),
        }

    return run_fleets(world, body)


def check_stages_equal(
    results: Sequence[dict[str, Any]], stages: Sequence[nn.Module], *, tolerance: float = 1e-12
) -> None:
    """Compare every stage, on every rank that has it, with the reference; together the ranks of a pair have all."""
    for first, second in zip(results[::2], results[1::2], strict=True):
        assert sorted([*first["stages"], *second["stages"]]) == list(range(len(stages)))
    for result in results:
        for number, state in result["stages"].items():
            expected = stages[number].state_dict()
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance)


def largest_of(stages: Sequence[nn.Module], side: int) -> int:
    """Return the bytes of the largest stage of one side."""
    return max(sum(parameter.nbytes for parameter in stage.parameters()) for stage in list(stages)[side::2])
