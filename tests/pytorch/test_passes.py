"""Backward passes add up until somebody clears the gradients, closures are evaluated, and sparse gradients arrive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of
from torch import nn

from syncline.errors import ConfigurationError, UpdateError
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Clustered, LocalSteps, Sharded, UpdateRule

RULES: dict[str, UpdateRule] = {
    "sharded": Sharded(bucket_bytes=300),
    "whole_parameters": Sharded(bucket_bytes=300, align="parameter"),
    "overlapped_forward": Sharded(bucket_bytes=300, overlap_forward=True),
    "within": LocalSteps(period=100, parties=0, within=Sharded(bucket_bytes=300)),
    "clustered": Clustered(period=100, clusters=1, within=Sharded(bucket_bytes=300)),
    "all_reduce": AllReduce(bucket_bytes=300),
}
by_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
CASE = CASES["perceptron"]
Loop = Callable[[nn.Module, Any, list[tuple[torch.Tensor, torch.Tensor]]], Any]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def check_like_one_process(
    run_fleets: Any,
    rule: UpdateRule,
    loop: Loop,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
    template: nn.Module | None = None,
    batches: list[Any] | None = None,
) -> list[Any]:
    """Run ``loop`` on two ranks with half of each batch, and on one process with all of it; compare parameters."""
    reference = CASE.make() if template is None else template
    models = copies(reference, 2)
    whole = CASE.batches(6, 8) if batches is None else batches

    def body(fleet: Fleet) -> Any:
        model, optimizer = distribute(models[fleet.rank], make(models[fleet.rank]), rule, fleet=fleet)
        own = [tuple(part.chunk(2)[fleet.rank] for part in batch) for batch in whole]
        result = loop(model, optimizer, own)
        optimizer.synchronize()
        return result

    results = run_fleets(2, body)
    loop(reference, make(reference), whole)
    for model in models:
        for name, value in reference.named_parameters():
            torch.testing.assert_close(dict(model.named_parameters())[name], value, rtol=1e-10, atol=1e-12, msg=name)
    return results


@by_rule
def test_two_losses_of_one_step(rule: UpdateRule, run_fleets: Any) -> None:
    def loop(model: nn.Module, optimizer: Any, batches: Any) -> None:
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            loss_of(model, *first).backward()
            loss_of(model, *second).backward()
            optimizer.step()

    check_like_one_process(run_fleets, rule, loop)


@by_rule
def test_gradients_that_nobody_clears_add_up_over_steps(rule: UpdateRule, run_fleets: Any) -> None:
    def loop(model: nn.Module, optimizer: Any, batches: Any) -> None:
        for batch in batches:
            loss_of(model, *batch).backward()
            optimizer.step()

    check_like_one_process(run_fleets, rule, loop)


@by_rule
def test_a_second_step_on_the_same_gradients(rule: UpdateRule, run_fleets: Any) -> None:
    def loop(model: nn.Module, optimizer: Any, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
            optimizer.step()

    check_like_one_process(run_fleets, rule, loop)


@by_rule
def test_zeros_in_place_of_nothing(rule: UpdateRule, run_fleets: Any) -> None:
    """What has a gradient of zero decays and keeps its momentum; what has none stays as it is."""

    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        for number, batch in enumerate(batches):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            if number == 3:
                nn.functional.mse_loss(model[0](batch[0]), torch.ones(len(batch[0]), 17).double()).backward()
            else:
                loss_of(model, *batch).backward()
            optimizer.step()

    check_like_one_process(run_fleets, rule, loop)


@by_rule
def test_gradients_of_a_part_are_cleared_or_dropped(rule: UpdateRule, run_fleets: Any) -> None:
    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        for number, batch in enumerate(batches):
            loss_of(model, *batch).backward()
            if number == 2:
                model[2].zero_grad()  # the step leaves it out, and the next pass begins it anew
            optimizer.step()
            if number % 2:
                model[0].zero_grad()

    check_like_one_process(run_fleets, rule, loop)


@by_rule
@pytest.mark.parametrize("norm", [0.5, 50.0])
def test_clipping_between_passes(rule: UpdateRule, norm: float, run_fleets: Any) -> None:
    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            loss_of(model, *first).backward()
            nn.utils.clip_grad_norm_(model.parameters(), norm)
            loss_of(model, *second).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()

    check_like_one_process(run_fleets, rule, loop)


@by_rule
def test_accumulation_after_a_synchronised_pass(rule: UpdateRule, run_fleets: Any) -> None:
    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        for one, two, three in zip(batches[::3], batches[1::3], batches[2::3], strict=True):
            loss_of(model, *one).backward()
            if hasattr(model, "no_sync"):
                with model.no_sync():
                    loss_of(model, *two).backward()
            else:
                loss_of(model, *two).backward()
            loss_of(model, *three).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_like_one_process(run_fleets, rule, loop)


def test_no_sync_is_a_method_while_the_model_trains(run_fleets: Any) -> None:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> None:
        model = models[fleet.rank]
        distribute(model, torch.optim.SGD(model[0].parameters(), lr=0.1), fleet=fleet)
        distribute(model, torch.optim.SGD(model[2].parameters(), lr=0.1), AllReduce(), fleet=fleet)
        with model.no_sync():  # type: ignore[operator]
            model(torch.ones(2, 6).double()).sum().backward()
        assert type(model[0].weight.grad) is torch.Tensor, "nothing left this rank"
        assert type(model[2].weight.grad) is torch.Tensor

    run_fleets(2, body)
    assert not hasattr(models[0], "no_sync")


@by_rule
def test_a_closure_is_evaluated(rule: UpdateRule, run_fleets: Any) -> None:
    def loop(model: Any, optimizer: Any, batches: Any) -> list[float]:
        def closure(batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            return loss

        return [float(optimizer.step(partial(closure, batch)).detach()) for batch in batches]

    check_like_one_process(run_fleets, rule, loop)


@by_rule
def test_a_closure_may_return_nothing_where_the_loop_has_made_the_pass(rule: UpdateRule, run_fleets: Any) -> None:
    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            assert optimizer.step(lambda: None) is None

    check_like_one_process(run_fleets, rule, loop)


def test_a_closure_under_no_sync_is_refused(run_fleets: Any) -> None:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(models[fleet.rank], momentum(models[fleet.rank]), AllReduce(), fleet=fleet)

        def closure() -> torch.Tensor:
            with model.no_sync():  # type: ignore[operator]
                loss = loss_of(model, *CASE.batches(1, 8)[0])
                loss.backward()
            return loss

        with pytest.raises(UpdateError, match="the gradients of other ranks are missing"):
            optimizer.step(closure)

    run_fleets(2, body)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_decides_by_the_mean_loss(line_search: str | None, run_fleets: Any) -> None:
    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *batches[0])
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=line_search)

    check_like_one_process(run_fleets, AllReduce(bucket_bytes=300), loop, make=make)


def test_hooks_of_the_user_see_their_rank_s_gradient(run_fleets: Any) -> None:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> list[bool]:
        model = models[fleet.rank]
        model, _ = distribute(model, momentum(model), Sharded(bucket_bytes=300), fleet=fleet)
        seen: list[bool] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad) is torch.Tensor))
        model(torch.ones(2, 6).double()).sum().backward()
        return seen

    assert run_fleets(2, body) == [[True] * 6] * 2


class _Lookup(nn.Module):
    """Words, of which a batch has few; one table is also read as a dense matrix if ``tied``."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(20, 3, sparse=True, mode="sum")
        self.tied = tied

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.table(words).sum(1) * self.bag(words)
        return hidden @ self.table.weight.T if self.tied else hidden


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients(passes: int, tied: bool, run_fleets: Any) -> None:
    torch.manual_seed(3)
    words = [torch.randint(0, 12, (4, 2)) for _ in range(6)]
    kinds: list[set[torch.layout]] = []

    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        for number, (batch,) in enumerate(batches):
            model(batch).square().mean().backward()
            if number % passes == passes - 1:
                kinds.append({parameter.grad.layout for parameter in model.parameters()})
                optimizer.step()
                optimizer.zero_grad()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        if tied:
            return torch.optim.SGD(model.parameters(), lr=0.1)
        return torch.optim.SparseAdam(list(model.parameters()), lr=0.1)

    template = _Lookup(tied=tied).double()
    batches = [(batch,) for batch in words]
    check_like_one_process(run_fleets, AllReduce(), loop, make=make, template=template, batches=batches)
    assert all(found == ({torch.sparse_coo, torch.strided} if tied else {torch.sparse_coo}) for found in kinds)


def test_sparse_gradients_are_refused_where_they_cannot_be(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Embedding(5, 2, sparse=True)
        model, _ = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Sharded(), fleet=fleet)
        with pytest.raises(UpdateError, match=r"sparse=False, or use update=AllReduce\(\)"):
            model(torch.tensor([1])).sum().backward()
        raise KeyError("the end")

    with pytest.raises(KeyError):
        run_fleets(2, body)


@by_rule
def test_state_by_parameter(rule: UpdateRule, run_fleets: Any) -> None:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> int:
        model = models[fleet.rank]
        model, optimizer = distribute(model, torch.optim.Adam(model.parameters()), rule, fleet=fleet)
        assert len(optimizer.state) == 0
        model(torch.ones(2, 6).double()).sum().backward()
        optimizer.step()
        steps = [int(state["step"]) for state in optimizer.state.values() if len(state) and "step" in state]
        assert set(steps) == {1}
        refused = 0
        for parameter in optimizer.state:
            assert any(parameter is known for known in model.parameters())
            if isinstance(rule, AllReduce):
                assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
                continue
            with pytest.raises(UpdateError, match=r"state_dict\(\) returns it whole"):
                optimizer.state[parameter]["exp_avg"]
            refused += 1
        return refused

    refused = sum(run_fleets(2, body))
    assert refused == 0 if isinstance(rule, AllReduce) else refused > 0


@pytest.mark.parametrize(
    ("update", "text"),
    [(Sharded, "not the class Sharded; give an object"), ("sharded", "must be an update rule, such as"), (3, "not 3")],
)
def test_what_is_no_rule_is_refused(update: Any, text: str, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ConfigurationError, match=text):
            distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), update, fleet=fleet)

    run_fleets(1, body)


def test_an_optimizer_of_another_model_is_refused(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model, other = nn.Linear(2, 2), nn.Linear(2, 2)
        with pytest.raises(UpdateError, match="none of this Linear"):
            distribute(model, torch.optim.SGD(other.parameters(), lr=0.1), fleet=fleet)

    run_fleets(1, body)


@by_rule
def test_stepping_the_old_optimizer_is_refused(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(2, 2)
        old = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = distribute(model, old, rule, fleet=fleet)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UpdateError, match="step\\(\\) of the optimizer that distribute\\(\\) returned"):
            old.step()
        optimizer.step()

    run_fleets(2, body)
