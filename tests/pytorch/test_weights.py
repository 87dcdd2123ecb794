"""How much each rank's gradient counts: alike by default, by samples on request, nothing without a pass."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import ConfigurationError, SynclineWarning, UpdateError
from syncline.pytorch.control import batch_size
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.samples import first_dimension
from syncline.updates import AllReduce, Sharded, UpdateRule

RULES: list[UpdateRule] = [Sharded(), AllReduce()]
by_rule = pytest.mark.parametrize("rule", RULES, ids=["sharded", "all_reduce"])


@dataclass
class Output:
    """What some models return: no container that PyTorch knows."""

    logits: torch.Tensor


class Line(nn.Module):
    """Its gradient is the mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> Output:
        return Output(self.slope * inputs)

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.slope * inputs).mean()


def run(run_fleets: Any, rule: UpdateRule, act: Any, **options: Any) -> list[float]:
    """Let each of two ranks act once, and return the gradient that both stepped on."""

    def body(fleet: Fleet) -> float:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = distribute(model, optimizer, rule, fleet=fleet, **options)  # type: ignore[assignment]
        act(model, fleet.rank)
        optimizer.step()
        return -float(model.slope.detach())

    return run_fleets(2, body)


def own(rank: int) -> torch.Tensor:
    """Rank 0 has one sample of 1, rank 1 three of 5."""
    return torch.full((1, 1), 1.0) if rank == 0 else torch.full((3, 1), 5.0)


def one_pass(model: Any, rank: int) -> None:
    model(own(rank)).logits.mean().backward()


@by_rule
def test_ranks_count_alike_and_are_told_once_how_else(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> float:
        model = Line()
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), rule, fleet=fleet)
        for _ in range(3):
            one_pass(model, fleet.rank)
            optimizer.step()
            optimizer.zero_grad()
        return -float(model.slope.detach())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run_fleets(2, body) == [9.0, 9.0]
    (warning,) = [one for one in caught if issubclass(one.category, SynclineWarning)]
    assert "(1 to 3 samples)" in str(warning.message)
    assert 'samples="batch"' in str(warning.message)


@by_rule
@pytest.mark.parametrize("samples", ["batch", len], ids=["batch", "function"])
def test_weights_by_samples(rule: UpdateRule, samples: Any, run_fleets: Any) -> None:
    assert run(run_fleets, rule, one_pass, samples=samples) == [4.0, 4.0]


@by_rule
def test_weights_that_are_told(rule: UpdateRule, run_fleets: Any) -> None:
    def act(model: Any, rank: int) -> None:
        batch_size(3 - 2 * rank, model)
        one_pass(model, rank)

    assert run(run_fleets, rule, act) == [2.0, 2.0]


@by_rule
@pytest.mark.parametrize("samples", [None, "batch"])
def test_a_forward_pass_that_is_thrown_away_counts_nothing(rule: UpdateRule, samples: Any, run_fleets: Any) -> None:
    def act(model: Any, rank: int) -> None:
        kept = model(torch.zeros(100 if rank == 0 else 1, 1))
        model(torch.full((2, 1), 1.0 + rank)).logits.mean().backward()
        assert kept.logits.requires_grad

    assert run(run_fleets, rule, act, samples=samples) == [1.5, 1.5]


@by_rule
def test_several_forward_passes_of_one_loss(rule: UpdateRule, run_fleets: Any) -> None:
    def act(model: Any, rank: int) -> None:
        first, second = model(own(rank)).logits, model(own(rank)).logits
        (first.mean() + second.mean()).backward()

    assert run(run_fleets, rule, act, samples="batch") == [8.0, 8.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_number_before_the_batch_is_no_batch() -> None:
    batch = torch.zeros(3, 2)
    nested = torch.nested.nested_tensor([batch, batch], layout=torch.strided)
    assert [first_dimension(torch.tensor(0.5), one) for one in (batch, nested)] == [3.0, 2.0]
    assert first_dimension(torch.tensor(0.5), scale=2.0) == 1.0


@by_rule
def test_a_loss_without_a_call_of_the_model(rule: UpdateRule, run_fleets: Any) -> None:
    assert run(run_fleets, rule, lambda model, rank: model.loss(own(rank)).backward()) == [3.0, 3.0]


@by_rule
def test_samples_that_nobody_saw_are_asked_for(rule: UpdateRule, run_fleets: Any) -> None:
    def act(model: Any, rank: int) -> None:
        with pytest.raises(UpdateError, match=r"batch_size\(n\)"):
            model.loss(own(rank)).backward()
        raise KeyError("the end")

    with pytest.raises(KeyError):
        run(run_fleets, rule, act, samples="batch")


@by_rule
def test_a_rank_without_a_backward_pass_counts_nothing(rule: UpdateRule, run_fleets: Any) -> None:
    def act(model: Any, rank: int) -> None:
        if rank:
            one_pass(model, rank)

    assert run(run_fleets, rule, act) == [5.0, 5.0]


def test_what_is_no_count_is_refused(run_fleets: Any) -> None:
    with pytest.raises(ConfigurationError, match='samples must be a function, "batch", or None, not'):
        run(run_fleets, Sharded(), one_pass, samples="tokens")
