"""Parameters that no distributed optimizer has: their gradients are means over ranks too, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import PeerLostError, UpdateError
from syncline.pytorch.control import join, no_sync
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Clustered, LocalSteps, Overlapped, Sharded, UpdateRule

WORLD = 2
RULES: list[UpdateRule] = [
    AllReduce(),
    Sharded(),
    Sharded(overlap_forward=True),
    Sharded(step_in_backward=True),
    Sharded(align="parameter"),
    Sharded(spares=1),
]
by_rule = pytest.mark.parametrize("rule", RULES, ids=["all", "sharded", "overlap", "within", "aligned", "spares"])


def make() -> nn.Sequential:
    """Make the same model each time, also where ranks are threads that share PyTorch's generator."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    source = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=source))
    return model


def batches(number: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return [torch.randn(WORLD * 3, 4, generator=source) for _ in range(number)]


def step_by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model[0].parameters():  # type: ignore[index]
            parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]


def of_one_process(number: int) -> list[torch.Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    for batch in batches(number):
        model(batch).square().mean().backward()
        optimizer.step()
        step_by_hand(model)
        model.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@by_rule
def test_what_is_stepped_by_hand_is_as_in_one_process(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> list[torch.Tensor]:
        model = make()
        model, optimizer = distribute(model, torch.optim.SGD(model[2].parameters(), lr=0.1), rule, fleet=fleet)
        for batch in batches(4):
            model(batch.chunk(WORLD)[fleet.rank]).square().mean().backward()
            optimizer.step()
            step_by_hand(model)
            model.zero_grad()
        optimizer.synchronize()
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = run_fleets(WORLD, body)
    for one, other, right in zip(first, second, of_one_process(4), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, right)


@pytest.mark.parametrize("rule", RULES[:2], ids=["all", "sharded"])
def test_passes_add_up_and_unequal_weights_count(rule: UpdateRule, run_fleets: Any) -> None:
    """A pass under no_sync(), one outside and one more before the gradients are dropped; ranks have 1 and 3 samples."""
    (batch,) = batches(1)
    parts = batch[:1], batch[1:4]

    def body(fleet: Fleet) -> torch.Tensor:
        model = make()
        inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
        model, _ = distribute(model, inner, rule, samples="batch", fleet=fleet)
        part = parts[fleet.rank]
        with no_sync(model):
            model(part).square().mean().backward()
        model(part).square().mean().backward()
        kept = model[0].weight.grad
        model(part).square().mean().backward()
        assert kept is model[0].weight.grad
        assert isinstance(kept, torch.Tensor)
        return kept

    model = make()
    (3 * model(batch[:4]).square().mean()).backward()
    for gradient in run_fleets(WORLD, body):
        torch.testing.assert_close(gradient, model[0].weight.grad)


@pytest.mark.parametrize("rule", RULES[:2], ids=["all", "sharded"])
def test_a_rank_without_a_gradient_counts_zeros_and_gets_the_mean(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> list[torch.Tensor | None]:
        model = nn.ModuleDict({"head": nn.Linear(2, 1), "own": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
        distribute(model, torch.optim.SGD(model["head"].parameters(), lr=0.1), rule, fleet=fleet)
        loss = model["head"](torch.ones(1, 2)).sum()
        if fleet.rank == 1:
            loss = loss + model["own"](torch.ones(1, 2)).sum()
        loss.backward()
        return [model["own"].weight.grad, model["idle"].weight.grad]

    for own, idle in run_fleets(WORLD, body):
        assert own.tolist() == [[0.5, 0.5]]
        assert idle is None


def test_a_rank_that_is_done_follows(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> list[torch.Tensor]:
        model = make()
        model, optimizer = distribute(model, torch.optim.SGD(model[2].parameters(), lr=0.1), fleet=fleet)
        means = []
        with join(model):
            for batch in batches(1 + fleet.rank):
                model(batch.chunk(WORLD)[fleet.rank]).square().mean().backward()
                means.append(model[0].weight.grad.clone())
                optimizer.step()
                model.zero_grad()
        return means

    short, long = run_fleets(WORLD, body)
    assert torch.equal(short[0], long[0])
    assert len(long) == 2


def test_what_a_second_distributed_optimizer_trains_is_not_outside(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> list[str]:
        model = make()
        first, second = (torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2))
        model, one = distribute(model, first, fleet=fleet)
        model, other = distribute(model, second, fleet=fleet)
        model(batches(1)[0]).square().mean().backward()
        shown = [type(parameter.grad).__name__ for parameter in model.parameters()]
        one.step()
        other.step()
        return shown

    assert run_fleets(WORLD, body)[0] == ["DividedGradient"] * 4


@pytest.mark.parametrize("rule", [Overlapped(), Clustered(), LocalSteps()], ids=["overlapped", "clustered", "local"])
def test_where_ranks_step_by_themselves_it_is_refused_by_name(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> str:
        model = make()
        model, _ = distribute(model, torch.optim.SGD(model[2].parameters(), lr=0.1), rule, fleet=fleet)
        with pytest.raises(UpdateError) as raised:
            model(batches(1)[0]).square().mean().backward()
        return str(raised.value)

    for text in run_fleets(WORLD, body):
        assert "Parameter '0.weight' got a gradient, but no optimizer" in text or "'0.bias'" in text
        assert "requires_grad_(False)" in text


def test_an_elastic_job_refuses_it_by_name(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = make()
        inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
        model, _ = distribute(model, inner, AllReduce(), elastic=True, fleet=fleet)
        model(batches(1)[0]).square().mean().backward()

    for error in run_fleets(WORLD, body, accept=(UpdateError, PeerLostError)):
        assert isinstance(error, PeerLostError) or "elastic=True" in str(error)


@pytest.mark.parametrize("rule", RULES[:2], ids=["all", "sharded"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_ranks_whose_other_parameters_differ_are_told(rule: UpdateRule, is_frozen: bool, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> str:
        model = make()
        model[0].requires_grad_(not is_frozen)
        inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
        model, optimizer = distribute(model, inner, rule, check_every=1, fleet=fleet)
        model(batches(1)[0]).square().mean().backward()
        optimizer.step()
        if fleet.rank:
            model[0].weight.data += 1
        with pytest.raises(UpdateError) as raised:
            model(batches(1)[0]).square().mean().backward()
        return str(raised.value)

    for text in run_fleets(WORLD, body):
        assert "rank 1: it has 'parameter 0.weight: norm" in text
        assert "distribute() the model once more" in text


@pytest.mark.parametrize("rule", [AllReduce(), Sharded(), LocalSteps()], ids=["all", "sharded", "local"])
@pytest.mark.parametrize("is_new", [False, True])
def test_where_others_are_frozen_what_came_later_is_refused(rule: UpdateRule, is_new: bool, run_fleets: Any) -> None:
    """A new head, or a layer that was frozen at ``distribute()``, with an optimizer that nobody was given."""

    def body(fleet: Fleet) -> None:
        model = make()
        model[0].requires_grad_(False)
        distribute(model, torch.optim.SGD(model[2].parameters(), lr=0.1), rule, fleet=fleet)
        model[2].requires_grad_(False)
        if is_new:
            model.append(nn.Linear(2, 1))
        else:
            model[0].requires_grad_(True)
        with pytest.raises(
            UpdateError, match=r"'[30]\.(weight|bias)' got a gradient, but came into .* once more, with"
        ):
            model(batches(1)[0]).square().mean().backward()

    run_fleets(WORLD, body)
