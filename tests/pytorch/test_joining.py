"""Loaders of different lengths: who is done follows the others, with no weight and their hyper-parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.control import join
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Clustered, Grace, LocalSteps, Overlapped, Sharded, UpdateRule

RULES: dict[str, UpdateRule] = {
    "sharded": Sharded(bucket_bytes=300),
    "overlapped_forward": Sharded(bucket_bytes=300, overlap_forward=True),
    "all_reduce": AllReduce(bucket_bytes=300),
}
by_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
CASE = CASES["perceptron"]
LENGTHS = [2, 5, 3]


def make(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def steps_of(model: Any, optimizer: Any, batches: list[Any], *, clips: bool) -> None:
    """Train with a schedule and, if asked, clipping; each element of ``batches`` is what this process has in a step."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for parts in batches:
        for part in parts:
            (loss_of(model, *part) / len(parts)).backward()
        if clips:
            clip = getattr(optimizer, "clip_grad_norm_", None)
            clip(0.1) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("clips", [False, True])
@by_rule
def test_uneven_loaders(rule: UpdateRule, clips: bool, run_fleets: Any) -> None:
    reference = CASE.make()
    models = copies(reference, 3)
    batches = {(rank, step): CASE.batches(15, 4)[5 * rank + step] for rank in range(3) for step in range(5)}

    def body(fleet: Fleet) -> tuple[int, float]:
        model, optimizer = distribute(models[fleet.rank], make(models[fleet.rank]), rule, fleet=fleet)
        own = [[batches[fleet.rank, step]] for step in range(LENGTHS[fleet.rank])]
        with join(model):
            steps_of(model, optimizer, own, clips=clips)
        optimizer.synchronize()
        return optimizer.iteration, optimizer.param_groups[0]["lr"]

    results = run_fleets(3, body)
    steps_of(
        reference,
        make(reference),
        [[batches[rank, step] for rank in range(3) if step < LENGTHS[rank]] for step in range(5)],
        clips=clips,
    )
    assert [iteration for iteration, _ in results] == [5, 5, 5]
    assert results[0][1] == pytest.approx(0.02 * 0.7**4), "of the last step's leader, whose schedule went on"
    for model in models:
        for name, value in reference.named_parameters():
            torch.testing.assert_close(dict(model.named_parameters())[name], value, rtol=1e-10, atol=1e-12, msg=name)


@by_rule
def test_buffers_while_the_root_is_done(rule: UpdateRule, run_fleets: Any) -> None:
    models = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(3)]

    def body(fleet: Fleet) -> torch.Tensor:
        model = models[fleet.rank]
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        generator = torch.Generator().manual_seed(fleet.rank)
        for _ in range(2):
            with join(model):
                for _ in range(1 + fleet.rank):
                    model(torch.randn(4, 2, generator=generator)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        optimizer.synchronize()
        return torch.cat([value.double().flatten() for value in model.state_dict().values()])

    first, *others = run_fleets(3, body)
    assert all(torch.equal(first, other) for other in others)


def test_an_error_within_leaves_at_once(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(2, 2)
        model, _ = distribute(model, make(model), fleet=fleet)
        with join(model):
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        run_fleets(2, body)


@pytest.mark.parametrize("rule", [Overlapped(period=4), LocalSteps(), LocalSteps(pace=Grace()), Clustered()])
def test_rules_of_which_ranks_need_not_join_are_refused(rule: UpdateRule, run_fleets: Any) -> None:
    message = rf"every rank makes every step, not {type(rule).__name__}\(\): .* give all ranks the same number"

    def body(fleet: Fleet) -> None:
        model = nn.Linear(2, 2)
        model, _ = distribute(model, make(model), rule, fleet=fleet)
        with pytest.raises(UpdateError, match=message), join(model):
            pass

    run_fleets(2, body)


def test_a_closure_that_is_evaluated_within_a_step_is_refused(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(2, 2)
        model, optimizer = distribute(model, make(model), AllReduce(), fleet=fleet)
        with join(model), pytest.raises(UpdateError, match="without a closure"):
            optimizer.step(lambda: torch.zeros(()))

    run_fleets(2, body)
