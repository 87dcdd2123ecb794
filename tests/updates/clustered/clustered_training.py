"""A small non-IID regression on clusters: trained by ranks that are threads, or by one process from the formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from small_regression import batch as batch_of, loss_of, make_model, make_sgd, parameters_of
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates.clustered.means import DECAY, MIN_WEIGHT
from syncline.updates.clustered.rule import Clustered


class KilledError(Exception):
    """Ends a rank as if it were killed."""


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batches differ in size, from rank to rank and from step to step."""
    return batch_of(rank, step, 3 + rank % 3 + step % 2)


def train(
    fleet: Fleet, rule: Any, num_steps: int, make: Callable[..., Any] = make_sgd, before_step: Any = None
) -> tuple[list[torch.Tensor], Any]:
    """Train on this rank; return its parameters after each step, and the statistics at the end."""
    model = make_model()
    model, optimizer = distribute(model, make(model.parameters()), rule, samples="batch", fleet=fleet)
    trajectory = []
    for step in range(num_steps):
        loss_of(model, *batch(fleet.rank, step)).backward()
        if before_step is not None:
            before_step(fleet.rank, step, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        trajectory.append(parameters_of(model))
    return trajectory, optimizer.statistics()


# The book: one process that holds a model for each cluster.


@dataclass
class _Cluster:
    ranks: tuple[int, ...]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    mean: torch.Tensor
    total: torch.Tensor
    forecast: torch.Tensor
    """Before it is weighted."""
    weight: float = 1.0
    product: float = 0.0
    square: float = 0.0
    samples: float = 0.0
    samples_of_term: float = 0.0


def train_by_the_book(
    rule: Clustered, clusters: Sequence[Sequence[int]], num_steps: int, make: Callable[..., Any] = make_sgd
) -> list[list[torch.Tensor]]:
    """Return each cluster's parameters after each step, reckoned from the formulas of the clustered update."""
    start = make_model()
    size = parameters_of(start).numel()
    book = []
    for ranks in clusters:
        model = copy.deepcopy(start)
        zeros = torch.zeros(size, dtype=torch.float64)
        book.append(_Cluster(tuple(ranks), model, make(model.parameters()), zeros, zeros.clone(), zeros.clone()))
    table = torch.zeros(len(book), len(book), dtype=torch.float64)
    trajectories: list[list[torch.Tensor]] = [[] for _ in book]
    averages = (rule.period > 1 or rule.is_literal) if rule.averages is None else rule.averages
    for step in range(num_steps):
        for cluster in book:
            _cluster_mean(cluster, step)
        is_last = (step + 1) % rule.period == 0
        step_on = (
            _outer(rule, book, table)
            if is_last
            else [cluster.mean + cluster.weight * cluster.forecast for cluster in book]
        )
        for cluster, gradient in zip(book, step_on, strict=True):
            _set_gradient(cluster.model, gradient)
            cluster.optimizer.step()
        if averages and (step + 1) % (rule.period * rule.reelect_every) == 0:
            _average(book)
        for trajectory, cluster in zip(trajectories, book, strict=True):
            trajectory.append(parameters_of(cluster.model))
    return trajectories


def _cluster_mean(cluster: _Cluster, step: int) -> None:
    mean, samples = torch.zeros_like(cluster.mean), 0.0
    for rank in cluster.ranks:
        cluster.model.zero_grad()
        inputs, targets = batch(rank, step)
        loss_of(cluster.model, inputs, targets).backward()
        mean += len(inputs) * torch.cat([parameter.grad.reshape(-1) for parameter in cluster.model.parameters()])
        samples += len(inputs)
    cluster.mean = mean / samples
    cluster.total = cluster.total + cluster.mean
    cluster.samples += samples
    cluster.samples_of_term += samples


def _learn(cluster: _Cluster, weight: float | str, told: torch.Tensor) -> None:
    if weight != "auto":
        cluster.weight = float(weight)
    else:
        cluster.product = 0.9 * cluster.product + float(told @ cluster.forecast)
        cluster.square = 0.9 * cluster.square + float(cluster.forecast @ cluster.forecast)
        if cluster.square:
            cluster.weight = round(256 * min(1.0, max(0.0, cluster.product / cluster.square))) / 256
    cluster.forecast = told


def _outer(rule: Clustered, book: list[_Cluster], table: torch.Tensor) -> list[torch.Tensor]:
    brought = [cluster.mean if rule.is_literal else cluster.total for cluster in book]
    step_on = []
    for c, cluster in enumerate(book):
        weights = [1.0] * len(book)
        own = float(table[c, c])
        if rule.is_literal and own > 0:
            weights = [min(1.0, max(MIN_WEIGHT, float(table[c, k]) / own)) if k != c else 1.0 for k in range(len(book))]
        shares = [other.samples * weight for other, weight in zip(book, weights, strict=True)]
        mean = sum(share * vector for share, vector in zip(shares, brought, strict=True)) / sum(shares)
        step_on.append(cluster.mean + mean - brought[c] - (rule.period - 1) * cluster.weight * cluster.forecast)
        if rule.forecast and rule.period > 1 and not rule.is_literal:
            _learn(cluster, rule.forecast, (mean - brought[c]) / rule.period)
    for c in range(len(book)):
        for k in range(len(book)):
            cosine = torch.nn.functional.cosine_similarity(brought[c], brought[k], dim=0)
            table[c, k] = DECAY * table[c, k] + (1 - DECAY) * max(0.0, float(cosine))
    for cluster in book:
        cluster.total, cluster.samples = torch.zeros_like(cluster.total), 0.0
    return step_on


def _average(book: list[_Cluster]) -> None:
    total = sum(cluster.samples_of_term for cluster in book)
    mean = sum(parameters_of(cluster.model) * cluster.samples_of_term for cluster in book) / total
    for cluster in book:
        torch.nn.utils.vector_to_parameters(mean.clone(), cluster.model.parameters())
        cluster.samples_of_term = 0.0


def _set_gradient(model: nn.Module, gradient: torch.Tensor) -> None:
    start = 0
    for parameter in model.parameters():
        parameter.grad = gradient[start : start + parameter.numel()].view_as(parameter).clone()
        start += parameter.numel()
