"""Where NaN or infinity begins, and ranks with the same batches: told once, to whom it concerns, changing nothing."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of
from torch import nn

from syncline.errors import SynclineWarning, UpdateError
from syncline.pytorch.distribute import distribute
from syncline.pytorch.flatten import flatten, plan_model
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.watch import StepWatch
from syncline.updates import AllReduce, Overlapped, Sharded, UpdateRule

CASE = CASES["perceptron"]
RULES: list[UpdateRule] = [Sharded(bucket_bytes=1000), AllReduce(bucket_bytes=1000)]
by_rule = pytest.mark.parametrize("rule", RULES, ids=["sharded", "all_reduce"])


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied: trouble that begins in the middle of a backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class Poisoned(nn.Module):
    """A perceptron whose gradients before its last layer are multiplied by ``factor``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 17), nn.Linear(17, 3)
        self.factor = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(Scaled.apply(torch.tanh(self.first(inputs)), self.factor))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect warnings of Syncline: ranks are threads, for which Python has one list of filters."""
    found: list[str] = []

    def keep(message: str, kind: type[Warning], **_: Any) -> None:
        assert kind is SynclineWarning
        found.append(message)

    monkeypatch.setattr(warnings, "warn", keep)
    return found


def train(
    run_fleets: Any,
    rule: UpdateRule,
    factors: dict[tuple[int, int], float],
    *,
    world: int = 3,
    use: Callable[[Any, Any, int], None] = lambda _, optimizer, __: optimizer.step(),
) -> list[nn.Module]:
    """Make four steps; ``factors`` poison those of (rank, number). A rule may refuse what is not finite in the end."""
    torch.manual_seed(1)
    models, batches = copies(Poisoned().double(), world), CASE.batches(4, 2 * world)

    def body(fleet: Fleet) -> None:
        inner = torch.optim.SGD(models[fleet.rank].parameters(), lr=0.01)
        model, optimizer = distribute(models[fleet.rank], inner, rule, fleet=fleet)
        for number, (inputs, targets) in enumerate(batches if not optimizer.is_server else ()):
            model.factor = factors.get((fleet.rank, number), 1.0)
            loss_of(model, inputs.chunk(world)[fleet.rank], targets.chunk(world)[fleet.rank]).backward()
            use(model, optimizer, number)
            optimizer.zero_grad()
        optimizer.synchronize()
        if optimizer.is_server:
            optimizer.serve()

    run_fleets(world, body, accept=UpdateError)
    return models


@by_rule
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_the_rank_and_the_parameter_where_it_began_are_told_once(
    rule: UpdateRule, factor: float, told: list[str], run_fleets: Any
) -> None:
    models = train(run_fleets, rule, {(1, 2): factor, (2, 3): factor})
    assert len(told) == 2, "the rank where it began, and rank 0"
    for text in told:
        assert re.match(r"NaN or infinity began in the gradients of rank 1 at step 3, first in parameter 'first", text)
    for model in models:
        assert not model.first.weight.isfinite().all(), "as in DDP"


@by_rule
def test_rank_0_is_told_once_for_itself(rule: UpdateRule, told: list[str], run_fleets: Any) -> None:
    train(run_fleets, rule, {(0, 1): float("nan"), (2, 1): float("nan")})
    assert len(told) == 2, "ranks 0 and 2"
    assert all("of rank 0 at step 2, first in parameter 'first.bias' (ranks 0 and 2 have some)" in one for one in told)


@pytest.mark.parametrize(
    ("values", "note"), [([3e38, 3e38, 1.0], 0), ([1.0, float("inf"), 1.0], 2), ([float("-inf"), 1.0, float("inf")], 3)]
)
def test_a_sum_that_overflows_is_looked_at_again(values: list[float], note: int) -> None:
    parameters = {nn.Parameter(torch.zeros(1)): (name, 0) for name in "abc"}
    (bucket,) = flatten(parameters, plan_model(parameters, bucket_bytes=4096))
    bucket.gradients[:] = torch.tensor(values)
    watch = StepWatch([bucket], rank=0, ranks=[0])
    watch.look(bucket)
    assert watch.notes()[0] == note


@by_rule
def test_it_is_told_of_any_pass_that_a_step_adds_up(rule: UpdateRule, told: list[str], run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        inner = torch.optim.SGD(models[fleet.rank].parameters(), lr=0.01)
        model, optimizer = distribute(models[fleet.rank], inner, rule, fleet=fleet)
        for number, (inputs, targets) in enumerate(CASE.batches(2, 4)):
            model.factor = float("nan") if (fleet.rank, number) == (1, 0) else 1.0
            with optimizer.no_sync() if number == 0 else contextlib.nullcontext():
                loss_of(model, inputs.chunk(2)[fleet.rank], targets.chunk(2)[fleet.rank]).backward()
        optimizer.step()

    models = copies(Poisoned().double(), 2)
    run_fleets(2, body)
    assert len(told) == 2
    assert "of rank 1 at step 1" in told[0]


@by_rule
def test_a_step_that_is_not_made_is_not_told(rule: UpdateRule, told: list[str], run_fleets: Any) -> None:
    """GradScaler leaves such a step out; the next one is sound."""

    def use(model: Any, optimizer: Any, number: int) -> None:
        if number != 1:
            optimizer.step()
        elif isinstance(rule, AllReduce):
            model.zero_grad()

    models = train(run_fleets, rule, {(1, 1): float("inf")}, use=use)
    assert told == []
    assert all(bool(parameter.isfinite().all()) for model in models for parameter in model.parameters())


@by_rule
def test_grad_scaler(rule: UpdateRule, told: list[str], run_fleets: Any) -> None:
    scalers: dict[Any, Any] = {}

    def use(model: Any, optimizer: Any, _: int) -> None:
        scaler = scalers.setdefault(model, torch.amp.GradScaler("cpu", init_scale=1.0))
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()

    models = train(run_fleets, rule, {(1, 1): float("inf")}, use=use)
    assert told == []
    assert all(scaler.get_scale() == 0.5 for scaler in scalers.values())
    assert all(bool(parameter.isfinite().all()) for model in models for parameter in model.parameters())


@pytest.mark.parametrize("servers", ["shared", "dedicated:1"])
@pytest.mark.parametrize("kind", ["swap", "rebase"])
def test_a_rule_that_never_waits_names_whom_it_came_from(
    servers: str, kind: Any, told: list[str], run_fleets: Any
) -> None:
    """Rank 0 makes NaN of its own as soon as it has taken in that of rank 1."""
    rule = Overlapped(period=100, max_staleness=1, servers=servers, rule=kind, bucket_bytes=1000)
    train(run_fleets, rule, {(1, 1): float("nan")}, world=3 if servers != "shared" else 2)
    assert len(told) == 2
    for text in told:
        assert text.startswith("NaN or infinity began in the gradients of rank 1 at step 2, first in parameter 'first")


def read_batches(run_fleets: Any, batches: list[list[Any]]) -> None:
    """Train on ``batches`` of each rank."""
    models = copies(CASE.make(), len(batches))

    def body(fleet: Fleet) -> None:
        inner = torch.optim.SGD(models[fleet.rank].parameters(), lr=0.01)
        model, optimizer = distribute(models[fleet.rank], inner, AllReduce(), samples="batch", fleet=fleet)
        for inputs in batches[fleet.rank]:
            if inputs is not None:
                model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    run_fleets(len(batches), body)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_ranks_that_read_the_same_data_are_named(told: list[str], run_fleets: Any) -> None:
    read_batches(run_fleets, [[batch(rank % 2 + 2 * step) for step in range(4)] for rank in range(4)])
    assert len(told) == 2, "each set of equal ranks, once, on rank 0 alone"
    assert told[0].startswith("Ranks 0 and 2 were given the same first batches")
    assert told[1].startswith("Ranks 1 and 3 were given the same first batches")
    assert "syncline.data.sampler(dataset)" in told[0]


@pytest.mark.parametrize(
    "batches",
    [
        [[batch(0), batch(1)], [batch(0), batch(2)]],
        [[batch(0), batch(1)], [batch(1), batch(0)]],
        [[torch.ones(3, 6, dtype=torch.float64)] * 3] * 2,
        [[batch(0), batch(1)], [batch(0), None]],
        [[batch(0), None, batch(1)], [batch(0), None, batch(1)], [batch(2), batch(3), batch(4)]],
        [[batch(0), batch(1)], [batch(0)[:2], batch(1)]],
    ],
    ids=["one_in_common", "other_order", "always_the_same", "no_second", "no_second_on_both", "other_size"],
)
def test_what_may_be_equal_is_not_told(batches: list[list[Any]], told: list[str], run_fleets: Any) -> None:
    read_batches(run_fleets, batches)
    assert told == []


def test_batches_of_other_sizes_are_told_on_rank_0(told: list[str], run_fleets: Any) -> None:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> None:
        inner = torch.optim.SGD(models[fleet.rank].parameters(), lr=0.01)
        model, optimizer = distribute(models[fleet.rank], inner, AllReduce(), fleet=fleet)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)[: 3 - fleet.rank]).square().mean().backward()
            optimizer.step()

    run_fleets(2, body)
    assert len(told) == 1
    assert "(2 to 3 samples)" in told[0]


def test_tensors_without_memory_are_not_compared(run_fleets: Any) -> None:
    models = copies(CASE.make(), 1)

    def body(fleet: Fleet) -> torch.Tensor:
        inner = torch.optim.SGD(models[0].parameters(), lr=0.01)
        model, _ = distribute(models[0], inner, AllReduce(), fleet=fleet)
        return torch.func.vmap(model)(batch(0))

    assert run_fleets(1, body)[0].shape == (3, 3)


@by_rule
def test_a_norm_that_is_refused_says_where_it_began(rule: UpdateRule, run_fleets: Any) -> None:
    models = copies(Poisoned().double(), 3)

    def body(fleet: Fleet) -> list[str]:
        model = models[fleet.rank]
        model.factor = float("nan") if fleet.rank == 1 else 1.0  # type: ignore[assignment]
        _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        model(torch.full((2, 6), fleet.rank + 1.0).double()).sum().backward()
        with pytest.raises((UpdateError, RuntimeError)) as caught:
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        optimizer.zero_grad()
        return caught.value.__notes__

    for (note,) in run_fleets(3, body):
        assert re.match(r"NaN or infinity began in the gradients of rank 1 at step 1, first in parameter 'first", note)
