"""``torch.compile`` around a model, within it, and before it is distributed: the same steps as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of
from torch import nn

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
