"""Gradients that the program keeps over another backward pass: as in one process, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.control import no_sync
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Sharded

WORLD = 2
Program = Callable[[nn.Module, Callable[[float], None]], list[torch.Tensor]]
"""Trains with a function that runs a backward pass of a scaled loss; returns what it kept, and what there is."""


def _shown(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def swap(model: nn.Module, backward: Callable[[float], None]) -> list[torch.Tensor]:
    backward(1.0)
    kept = _shown(model)
    model.zero_grad()
    backward(100.0)
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    backward(10.0)
    return [*kept, *_shown(model)]


def keep_each(model: nn.Module, backward: Callable[[float], None]) -> list[torch.Tensor]:
    """As gradient surgery does: the gradients of several tasks, one of them of one parameter alone and detached."""
    kept = []
    for scale in (1.0, 3.0, 5.0):
        backward(scale)
        kept += [gradient.detach() for gradient in _shown(model)][:2]
        model.zero_grad()
    return kept


def keep_uncleared(model: nn.Module, backward: Callable[[float], None]) -> list[torch.Tensor]:
    backward(1.0)
    kept = _shown(model)
    views = [gradient.detach() for gradient in kept]
    backward(2.0)
    return [*kept, *views, *_shown(model)]


def keep_some_uncleared(model: nn.Module, backward: Callable[[float], None]) -> list[torch.Tensor]:
    backward(1.0)
    kept = _shown(model)
    kept_views = [gradient.detach() for gradient in kept]
    next(model.parameters()).grad = None
    backward(2.0)
    return [*kept, *kept_views, *_shown(model)]


def keep_zeroed(model: nn.Module, backward: Callable[[float], None]) -> list[torch.Tensor]:
    backward(1.0)
    kept = [gradient.detach() for gradient in _shown(model)]
    model.zero_grad(set_to_none=False)
    backward(2.0)
    return [*kept, *_shown(model)]


def sharpness(model: nn.Module, backward: Callable[[float], None]) -> list[torch.Tensor]:
    """As SAM does: a step up along the gradient, another pass, and back along the one that was kept."""
    backward(1.0)
    kept = _shown(model)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.add_(gradient, alpha=0.1)
    model.zero_grad()
    backward(1.0)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.sub_(gradient, alpha=0.1)
    return [*kept, *_shown(model), *model.parameters()]


PROGRAMS: list[Program] = [swap, keep_each, keep_uncleared, keep_some_uncleared, keep_zeroed, sharpness]


def make() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    source = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=source))
    return model


def run(program: Program, model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    def backward(scale: float) -> None:
        (model(batch).square().mean() * scale).backward()

    return [tensor.detach().clone() for tensor in program(model, backward)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_kept_is_as_in_one_process(program: Program, run_fleets: Any) -> None:
    batch = torch.randn(WORLD * 3, 4, generator=torch.Generator().manual_seed(1))

    def body(fleet: Fleet) -> list[torch.Tensor]:
        model = make()
        model, _ = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(), fleet=fleet)
        return run(program, model, batch.chunk(WORLD)[fleet.rank])

    right = run(program, make(), batch)
    for found in run_fleets(WORLD, body):
        torch.testing.assert_close(found, right)


def test_what_is_kept_of_passes_under_no_sync_grows(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> bool:
        model = make()
        model, _ = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(), fleet=fleet)
        with no_sync(model):
            model(torch.ones(1, 4)).sum().backward()
        kept = model[0].weight.grad
        model(torch.ones(1, 4)).sum().backward()
        return kept is model[0].weight.grad

    assert all(run_fleets(WORLD, body))


def test_memory_of_gradients_is_used_again_where_nobody_keeps_them(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> int:
        model = make()
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(), fleet=fleet)
        places = set()
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
            places.add(model[0].weight.grad.data_ptr())
            optimizer.step()
            optimizer.zero_grad()
        return len(places)

    assert run_fleets(WORLD, body) == [1, 1]


@pytest.mark.parametrize("rule", [Sharded(), Sharded(overlap_forward=True)], ids=["sharded", "overlap"])
def test_a_kept_gradient_that_no_rank_has_is_refused_by_name(rule: Sharded, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> list[str]:
        model = make()
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        model(torch.ones(1, 4)).sum().backward()
        kept = [parameter.grad for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        model(torch.ones(1, 4)).sum().backward()
        assert model[0].weight.grad.norm() > 0
        told = []
        with pytest.raises(UpdateError) as raised:
            kept[0].norm()
        told.append(str(raised.value))
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
        with pytest.raises(UpdateError) as raised:
            optimizer.step()
        return [*told, str(raised.value)]

    for read, stepped in run_fleets(WORLD, body):
        assert "A gradient of '0.weight' was kept over another backward pass" in read
        assert "was replaced after backward()" in stepped


def test_what_stands_for_a_gradient_is_used_again_where_nobody_keeps_it(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> bool:
        model = make()
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Sharded(), fleet=fleet)
        seen = []
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            seen.append([id(parameter.grad) for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return seen[0] == seen[1] == seen[2]

    assert all(run_fleets(WORLD, body))
