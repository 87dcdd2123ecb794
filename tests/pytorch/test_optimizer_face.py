"""What the returned optimizer is to the rest of PyTorch: schedulers, state, errors, other optimizers, failures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of
from torch import nn

from syncline.errors import PeerLostError, UpdateError
from syncline.observe import Trace, gather_events
from syncline.pytorch.control import synchronize
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, LocalSteps, Sharded, UpdateRule

WITHIN = LocalSteps(period=100, parties=0, within=Sharded(bucket_bytes=1000))
"""One party, which divides what ``Sharded()`` does."""
RULES: list[UpdateRule] = [Sharded(bucket_bytes=1000), AllReduce(bucket_bytes=1000), WITHIN]
by_rule = pytest.mark.parametrize("rule", RULES, ids=["sharded", "all_reduce", "within"])
CASE = CASES["perceptron"]
PARTS = [3, 5]


def parts(batch: tuple[torch.Tensor, torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0].split(PARTS)[rank], batch[1].split(PARTS)[rank]


def check_same(models: list[nn.Module], reference: nn.Module) -> None:
    for model in models:
        for name, value in reference.named_parameters():
            torch.testing.assert_close(dict(model.named_parameters())[name], value, rtol=1e-11, atol=1e-12, msg=name)


@by_rule
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedulers_reach_every_step(rule: UpdateRule, scheduler_first: bool, run_fleets: Any) -> None:
    batches = CASE.batches(5, sum(PARTS))
    reference = CASE.make()
    models = copies(reference, 2)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)

    def body(fleet: Fleet) -> None:
        inner = make(models[fleet.rank])
        scheduler = schedule(inner) if scheduler_first else None
        model, optimizer = distribute(models[fleet.rank], inner, rule, samples="batch", fleet=fleet)
        scheduler = scheduler or schedule(optimizer)
        for batch in batches:
            loss_of(model, *parts(batch, fleet.rank)).backward()
            optimizer.step()
            scheduler.step()  # at once: the step that is under way keeps the rate that it began with
            optimizer.zero_grad()
        optimizer.synchronize()

    optimizer = make(reference)
    scheduler = schedule(optimizer)
    for batch in batches:
        loss_of(reference, *batch).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run_fleets(2, body)
    check_same(models, reference)


@by_rule
def test_state_of_an_optimizer_that_has_stepped_is_taken_over(rule: UpdateRule, run_fleets: Any) -> None:
    batches = CASE.batches(4, sum(PARTS))
    reference = CASE.make()
    models = copies(reference, 2)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in (reference, *models)]
    for model, optimizer in zip((reference, *models), optimizers, strict=True):
        for batch in batches[:2]:
            loss_of(model, *batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(
            models[fleet.rank], optimizers[fleet.rank + 1], rule, samples="batch", fleet=fleet
        )
        for batch in batches[2:]:
            loss_of(model, *parts(batch, fleet.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()

    for batch in batches[2:]:
        loss_of(reference, *batch).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    run_fleets(2, body)
    check_same(models, reference)


@by_rule
def test_state_dict_goes_round(rule: UpdateRule, run_fleets: Any) -> None:
    """Save after two steps, go on for two; load on three ranks and go on: the same parameters."""
    batches = CASE.batches(4, sum(PARTS))
    template = CASE.make()
    models, others = copies(template, 2), copies(template, 3)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.05)

    def first(fleet: Fleet) -> tuple[Any, Any]:
        model, optimizer = distribute(models[fleet.rank], make(models[fleet.rank]), rule, samples="batch", fleet=fleet)
        for number, batch in enumerate(batches):
            if number == 2:
                saved = {k: v.clone() for k, v in model.state_dict().items()}, copy.deepcopy(optimizer.state_dict())
            loss_of(model, *parts(batch, fleet.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return saved

    saved_model, saved_state = run_fleets(2, first)[0]

    def second(fleet: Fleet) -> None:
        model, optimizer = distribute(others[fleet.rank], make(others[fleet.rank]), rule, samples="batch", fleet=fleet)
        model.load_state_dict(saved_model)
        optimizer.load_state_dict(copy.deepcopy(saved_state))  # torch keeps what it is given
        for inputs, targets in batches[2:]:
            loss_of(model, inputs.tensor_split(3)[fleet.rank], targets.tensor_split(3)[fleet.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()

    run_fleets(3, second)
    check_same(others, models[0])


def test_whole_parameters_for_an_optimizer_of_matrices(run_fleets: Any) -> None:
    """Two optimizers on one model: Muon for the matrices, AdamW for the rest."""
    batches = CASE.batches(3, sum(PARTS))
    reference = CASE.make()
    models = copies(reference, 2)

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]

    def body(fleet: Fleet) -> None:
        model = models[fleet.rank]
        muon, adamw = make(model)
        model, muon = distribute(
            model, muon, Sharded(align="parameter", bucket_bytes=1000), samples="batch", fleet=fleet
        )
        model, adamw = distribute(model, adamw, samples="batch", fleet=fleet)
        for batch in batches:
            loss_of(model, *parts(batch, fleet.rank)).backward()
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()
        synchronize(model)

    optimizers = make(reference)
    for batch in batches:
        loss_of(reference, *batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    run_fleets(2, body)
    for model in models:  # Muon itself computes in bfloat16
        for ours, alone in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, alone, rtol=1e-2, atol=1e-3)


Act = Callable[..., Any]


def run_pair(run_fleets: Any, rule: UpdateRule, act: Act, make: Callable[..., Any] = torch.optim.SGD) -> list[Any]:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> Any:
        model, optimizer = distribute(
            models[fleet.rank], make(models[fleet.rank].parameters(), lr=0.1), rule, fleet=fleet
        )
        return act(model, optimizer, torch.ones(2, 6).double(), fleet)

    return run_fleets(2, body)


@by_rule
def test_what_cannot_be_done_is_refused(rule: UpdateRule, run_fleets: Any) -> None:
    def act(model: nn.Module, optimizer: Any, inputs: torch.Tensor, fleet: Fleet) -> None:
        with pytest.raises(UpdateError, match="Parameter groups"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(UpdateError, match="once"):
            distribute(model, optimizer, fleet=fleet)
        model[0].weight.data = model[0].weight.data.float()
        with pytest.raises(UpdateError, match=r"'0\.weight' was replaced .* torch\.float32"):
            optimizer.step()

    run_pair(run_fleets, rule, act)


@by_rule
def test_data_that_was_assigned_is_taken_into_its_bucket(rule: UpdateRule, run_fleets: Any) -> None:
    def act(model: nn.Module, optimizer: Any, inputs: torch.Tensor, fleet: Fleet) -> torch.Tensor:
        place = model[0].weight.data_ptr()
        model[0].weight.data = torch.full_like(model[0].weight, 0.5)
        model(inputs).sum().backward()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        assert model[0].weight.data_ptr() == place
        return model[0].weight.detach().clone()

    for value in run_pair(run_fleets, rule, act):
        torch.testing.assert_close(value, torch.full_like(value, 0.5), rtol=0, atol=0)


def test_optimizers_that_cannot_be_divided_are_refused(run_fleets: Any) -> None:
    class Special(torch.optim.SGD):
        pass

    def body(fleet: Fleet) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(UpdateError, match='align="parameter"'):
            distribute(model, Special(model.parameters(), lr=0.1), fleet=fleet)
        with pytest.raises(UpdateError, match=r"LBFGS .* use update=AllReduce\(\)"):
            distribute(model, torch.optim.LBFGS(model.parameters()), fleet=fleet)
        with pytest.raises(UpdateError, match=r"SparseAdam .* update=AllReduce\(\)"):
            distribute(model, torch.optim.SparseAdam(list(model.parameters())), fleet=fleet)
        frozen = nn.Linear(2, 2).requires_grad_(False)
        with pytest.raises(UpdateError, match="nothing to distribute"):
            distribute(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1), fleet=fleet)

    run_fleets(1, body)


@by_rule
def test_parameters_that_are_unfrozen_later_are_refused(rule: UpdateRule, run_fleets: Any) -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)) for _ in range(2)]

    def body(fleet: Fleet) -> None:
        model = models[fleet.rank]
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        model[1].requires_grad_(True)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UpdateError, match=r"Parameter '1\.weight' was frozen at distribute"):
            optimizer.step()

    run_fleets(2, body)


@by_rule
@pytest.mark.parametrize("in_second", [False, True])
def test_what_is_unfrozen_later_trains_as_the_error_says(rule: UpdateRule, in_second: bool, run_fleets: Any) -> None:
    batches = CASE.batches(4, sum(PARTS))
    reference = CASE.make()
    models = copies(reference, 2)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)

    def train(model: nn.Module, take: Callable[[torch.optim.Optimizer], Any], of: Callable[[Any], Any]) -> None:
        first, *others = model.parameters()
        first.requires_grad_(not in_second)
        optimizers = [take(make(others if in_second else model.parameters()))]
        first.requires_grad_(False)
        for number, batch in enumerate(batches):
            if number == 2:
                first.requires_grad_(True)
                optimizers += [take(make([first]))] if in_second else []
            loss_of(model, *of(batch)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def body(fleet: Fleet) -> None:
        model = models[fleet.rank]
        train(
            model,
            lambda optimizer: distribute(model, optimizer, rule, samples="batch", fleet=fleet)[1],
            lambda batch: parts(batch, fleet.rank),
        )
        synchronize(model)

    train(reference, lambda optimizer: optimizer, lambda batch: batch)
    run_fleets(2, body)
    check_same(models, reference)


def test_an_optimizer_that_fails_without_the_closure_is_told_why_it_got_none(run_fleets: Any) -> None:
    class Sharpness(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert closure is not None, "a closure is needed"
            return super().step(closure)

    def body(fleet: Fleet) -> None:
        model = nn.Linear(2, 2)
        model, optimizer = distribute(model, Sharpness(model.parameters(), lr=0.1), LocalSteps(), fleet=fleet)

        def closure() -> torch.Tensor:
            loss: torch.Tensor = model(torch.ones(1, 2)).sum()
            loss.backward()
            return loss

        with pytest.raises(AssertionError, match="a closure is needed") as caught:
            optimizer.step(closure)
        (note,) = caught.value.__notes__
        assert note.startswith("With LocalSteps() the closure is evaluated once, before the step, and Sharpness.step()")
        assert note.endswith("is served by update=AllReduce()")

    run_fleets(1, body)


def test_ranks_with_different_models_are_told_the_difference(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> str:
        model = nn.Linear(3, 2 + (fleet.rank == 1))
        with pytest.raises(UpdateError) as caught:
            distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet=fleet)
        return str(caught.value)

    for text in run_fleets(3, body):
        assert "rank 1" in text
        assert "parameter weight: (3, 3)" in text
        assert "rank 2" not in text


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_error_of_the_update_thread_comes_out_as_it_is(overlaps: bool, run_fleets: Any) -> None:
    class Broken(torch.optim.SGD):
        is_broken = False

        def step(self, closure: Any = None) -> None:
            if self.is_broken:
                raise ZeroDivisionError("broken")

    def act(model: nn.Module, optimizer: Any, inputs: torch.Tensor, fleet: Fleet) -> None:
        Broken.is_broken = True  # not when distribute() tries it
        model(inputs).sum().backward()
        if overlaps:
            optimizer.step()
            with pytest.raises(ZeroDivisionError, match="broken"):
                model(inputs)
        else:
            with pytest.raises(ZeroDivisionError, match="broken"):
                optimizer.step()
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="broken"):
                optimizer.synchronize()
        raise KeyError("the end")

    with pytest.raises(KeyError):
        run_pair(run_fleets, Sharded(align="parameter", overlap_forward=overlaps), act, Broken)


@by_rule
def test_a_lost_rank_is_named_where_training_goes_on(rule: UpdateRule, run_fleets: Any) -> None:
    models = copies(CASE.make(), 3)

    def body(fleet: Fleet) -> int:
        model, optimizer = distribute(
            models[fleet.rank], torch.optim.SGD(models[fleet.rank].parameters(), lr=0.1), rule, fleet=fleet
        )
        for step in range(50):
            if fleet.rank == 1 and step == 2:
                fleet.close(is_failing=True)
                return 1
            try:
                model(torch.ones(2, 6).double()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            except PeerLostError as error:
                fleet.close(is_failing=True)
                return error.rank
        return -1

    assert run_fleets(3, body) == [1, 1, 1]


def test_a_model_is_plain_again_after_close(run_fleets: Any) -> None:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(
            models[fleet.rank], torch.optim.SGD(models[fleet.rank].parameters(), lr=0.1), fleet=fleet
        )
        model(torch.ones(2, 6).double()).sum().backward()
        optimizer.step()

    run_fleets(2, body)
    assert all(
        torch.equal(one, other) for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )
    models[0](torch.ones(2, 6).double()).sum().backward()
    assert all(parameter.grad is not None for parameter in models[0].parameters())


def test_the_trace_shows_what_a_step_is_made_of(run_fleets: Any, tmp_path: Path) -> None:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(
            models[fleet.rank], torch.optim.Adam(models[fleet.rank].parameters()), samples="batch", fleet=fleet
        )
        for batch in CASE.batches(2, sum(PARTS)):
            loss_of(model, *parts(batch, fleet.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        state = optimizer.training.updater.state
        owned = sum(value.nbytes for values in state.values() for value in values.values() if value.dim())
        assert 0 < owned < optimizer.num_state_bytes

    trace = Trace(rank=0, path=tmp_path / "trace.json")
    run_fleets(2, body, trace=trace)
    trace.close()
    names = {event["name"] for event in gather_events([tmp_path / "trace.json"])}
    assert {"forward", "backward", "step", "step 0", "step 1", "update of bucket 0"} <= names
    assert any("all_gather of bucket 0" in name for name in names), sorted(names)
    assert any("reduce_scatter of bucket 0" in name for name in names)


@by_rule
def test_parameters_that_are_distributed_are_not_distributed_again(rule: UpdateRule, run_fleets: Any) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2)]

    def body(fleet: Fleet) -> None:
        model = models[fleet.rank]
        distribute(model, torch.optim.SGD(model[0].parameters(), lr=0.1), rule, fleet=fleet)
        with pytest.raises(UpdateError, match=r"2 of 4 parameters of this Sequential \(first: '0.weight'\) were given"):
            distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        distribute(model, torch.optim.SGD(model[1].parameters(), lr=0.1), rule, fleet=fleet)  # the rest is free

    run_fleets(2, body)
    run_fleets(2, body)  # closing a fleet frees them
