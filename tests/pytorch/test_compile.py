"""``torch.compile`` around a model, within it, and before it is distributed: the same steps as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Sharded, UpdateRule

# What Dynamo says where it cannot compile a hook and goes on after it: of gradients that it looks for, and of the clock
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning"),
]
BACKEND = "aot_eager"
CASE = CASES["perceptron"]
BATCHES = CASE.batches(4, 8)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    """Begin without what other tests had compiled: code that was made for their models would be tried first."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Not Adam, which corrects its bias in float32 while Dynamo compiles anything, be it in another thread."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Callable[..., Any], optimizer: Any) -> None:
    for inputs, targets in BATCHES:
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["before", "around", "within"])
@pytest.mark.parametrize(
    "rule", [Sharded(bucket_bytes=1000), AllReduce(bucket_bytes=1000)], ids=["sharded", "all_reduce"]
)
def test_a_compiled_model_takes_the_same_steps(rule: UpdateRule, how: str, run_fleets: Any) -> None:
    template = CASE.make()
    (model,) = copies(template, 1)
    train(template, sgd(template))

    def body(fleet: Fleet) -> None:
        whole: Any = torch.compile(model, backend=BACKEND) if how == "before" else model
        inner = sgd(model)
        distributed, optimizer = distribute(whole, inner, rule, fleet=fleet)
        if how == "within":
            distributed.compile(backend=BACKEND)
        train(torch.compile(distributed, backend=BACKEND) if how == "around" else distributed, optimizer)
        optimizer.synchronize()

    run_fleets(1, body)
    for ours, theirs in zip(model.parameters(), template.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "rule", [Sharded(bucket_bytes=1000), AllReduce(bucket_bytes=1000)], ids=["sharded", "all_reduce"]
)
@pytest.mark.parametrize("what", ["recompiled", "backward", "step"])
def test_what_is_compiled_meets_gradients(rule: UpdateRule, what: str, run_fleets: Any) -> None:
    """It is compiled anew while ``p.grad`` is there, or runs the backward pass itself, or the whole step."""
    template = CASE.make()
    (model,) = copies(template, 1)
    train(template, sgd(template))

    def body(fleet: Fleet) -> None:
        distributed, optimizer = distribute(model, sgd(model), rule, fleet=fleet)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            loss_of(distributed, inputs, targets).backward()

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            scaler.scale(loss_of(distributed, inputs, targets)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        compiled: Any = torch.compile(
            {"recompiled": distributed, "backward": backward, "step": step}[what], backend=BACKEND
        )
        for inputs, targets in BATCHES:
            if what == "recompiled":
                loss_of(compiled, inputs, targets).backward()
                torch.compiler.reset()
                compiled(inputs)
            else:
                compiled(inputs, targets)
            if what != "step":
                optimizer.step()
                optimizer.zero_grad()
        optimizer.synchronize()

    run_fleets(1, body)
    for ours, theirs in zip(model.parameters(), template.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-11, atol=1e-12)


def test_compiled_autograd_is_refused(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(2, 1)
        distribute(model, sgd(model), fleet=fleet)

        def backward() -> None:
            model(torch.ones(3, 2)).sum().backward()

        refused = pytest.raises(UpdateError, match=r"leave torch\._dynamo\.config\.compiled_autograd off")
        with torch._dynamo.config.patch(compiled_autograd=True), refused:
            torch.compile(backward, backend=BACKEND)()

    run_fleets(1, body)
