"""Updates within the backward pass: the bits of updates after it, and nothing that lasts before ``step()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of
from test_training_oracle import OPTIMIZERS, TOPOLOGIES, digest, train_together
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.control import join, no_sync
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.topology import Topology
from syncline.updates import Sharded
from thread_fleets import run_fleets, run_over_tcp

pytestmark = pytest.mark.usefixtures("small_slices")

INPUTS = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
TARGETS = torch.linspace(1, 3, 12, dtype=torch.float64).reshape(4, 3)


def rule_of(*, in_backward: bool, **options: Any) -> Sharded:
    return Sharded(bucket_bytes=1000, step_in_backward=in_backward, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "element": {},
    "parameter": {"align": "parameter"},
    "overlapped": {"overlap_forward": True},
}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("perceptron", "element"),
        ("perceptron", "parameter"),
        ("perceptron", "overlapped"),
        ("convolution_batchnorm", "element"),
        ("tied", "element"),
        ("sometimes_unused", "overlapped"),
        ("two_types", "parameter"),
    ],
)
def test_steps_in_the_backward_pass_have_the_bits_of_steps_after_it(model: str, options: str) -> None:
    case = CASES[model]
    ended = [
        train_together(
            case,
            TOPOLOGIES["one_and_three"],
            rule_of(in_backward=in_backward, **OPTIONS[options]),
            OPTIMIZERS["adamw"],
            case.batches(4, 23),
            run_fleets,
        )[0]
        for in_backward in (False, True)
    ]
    assert [rank["hashes"] for rank in ended[0]] == [rank["hashes"] for rank in ended[1]]


def test_so_they_have_over_sockets() -> None:
    case, topology = CASES["perceptron"], TOPOLOGIES["flat"]
    ended = [
        train_together(
            case, topology, rule_of(in_backward=in_backward), OPTIMIZERS["adam"], case.batches(4, 23), run_over_tcp
        )[0]
        for in_backward in (False, True)
    ]
    assert [rank["hashes"] for rank in ended[0]] == [rank["hashes"] for rank in ended[1]]


def start(fleet: Fleet, template: nn.Module, *, in_backward: bool = True) -> tuple[nn.Module, DistributedOptimizer]:
    model = copies(template, 1)[0]
    return distribute(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), rule_of(in_backward=in_backward), fleet=fleet
    )


def good_step(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    loss_of(model, INPUTS, TARGETS).backward()
    optimizer.step()
    optimizer.zero_grad()


def run_alike(body: Callable[[Fleet, bool], Any]) -> tuple[Any, Any]:
    """Return what rank 0 ends with when updates come after backward passes, and when they come within them."""
    after, within = (run_fleets(2, lambda fleet, kind=kind: body(fleet, kind)) for kind in (False, True))
    return after[0], within[0]


def test_the_first_bucket_s_parameters_are_gathered_before_the_last_gradient_comes() -> None:
    template = CASES["perceptron"].make()

    def body(fleet: Fleet) -> bool:
        model, optimizer = start(fleet, template)
        good_step(model, optimizer)  # in which buckets are learnt
        before = digest(model)
        updater: Any = optimizer.training.updater
        last = updater.buckets[-1].index

        def wait_for_gather(gradient: torch.Tensor) -> None:
            updater._gathered.wait((last,), 30.0)  # a deadline, which an update after the pass would not meet

        first_layer: Any = next(model.parameters())
        handle = first_layer.register_hook(wait_for_gather)
        loss_of(model, INPUTS, TARGETS).backward()
        handle.remove()
        stays = digest(model) == before
        optimizer.step()
        return last > 0 and stays and digest(model) != before

    assert all(run_fleets(2, body))


def test_a_pass_that_is_given_up_leaves_parameters_and_state_as_they_were() -> None:
    template = CASES["perceptron"].make()

    def body(fleet: Fleet, in_backward: bool) -> list[str]:
        model, optimizer = start(fleet, template, in_backward=in_backward)
        seen = []
        for _ in range(3):  # the first has no state yet
            loss_of(model, 2 * INPUTS, TARGETS).backward()
            optimizer.zero_grad()
            seen.append(digest(model))
            good_step(model, optimizer)
            seen.append(digest(model))
        return seen

    after, within = run_alike(body)
    assert within == after


def test_passes_under_no_sync_are_added_up_before() -> None:
    template = CASES["perceptron"].make()

    def body(fleet: Fleet, in_backward: bool) -> str:
        model, optimizer = start(fleet, template, in_backward=in_backward)
        for _ in range(3):
            with no_sync(model):
                loss_of(model, 2 * INPUTS, TARGETS).backward()
            good_step(model, optimizer)
        return digest(model)

    after, within = run_alike(body)
    assert within == after


def test_a_rank_without_data_follows_the_others() -> None:
    template = CASES["perceptron"].make()

    def body(fleet: Fleet, in_backward: bool) -> str:
        model, optimizer = start(fleet, template, in_backward=in_backward)
        with join(model):
            for _ in range(2 + 2 * fleet.rank):
                good_step(model, optimizer)
        return digest(model)

    after, within = run_alike(body)
    assert within == after


def clip_by_hand(model: nn.Module, _: DistributedOptimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def use_scaler(_: nn.Module, optimizer: DistributedOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def drop_one(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    next(model.parameters()).grad = None
    optimizer.step()


def change_rate(_: nn.Module, optimizer: DistributedOptimizer) -> None:
    before, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.5
    try:
        optimizer.step()
    finally:
        optimizer.param_groups[0]["lr"] = before


def load_state(_: nn.Module, optimizer: DistributedOptimizer) -> None:
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.inner.state_dict()["param_groups"]})


def write_in_place(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    with torch.no_grad():
        next(model.parameters())[0].mul_(1.0)
    optimizer.step()


def write_by_data(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)
    try:
        optimizer.step()
    finally:
        for parameter in model.parameters():
            parameter.data.div_(2)


REFUSED: dict[str, tuple[Callable[[nn.Module, DistributedOptimizer], Any], str]] = {
    "clip": (lambda _, optimizer: optimizer.clip_grad_norm_(1.0), "clip_grad_norm_"),
    "torch_clip": (clip_by_hand, "norm, scaling, clipping or GradScaler"),
    "scaler": (use_scaler, "norm, scaling, clipping or GradScaler"),
    "zeros": (lambda _, optimizer: optimizer.zero_grad(set_to_none=False), r"zero_grad\(set_to_none=False\)"),
    "accumulate": (lambda model, _: loss_of(model, INPUTS, TARGETS).backward(), "several backward passes"),
    "drop_one": (drop_one, "gradients of some parameters to None"),
    "other_rate": (change_rate, "lr of parameter group 0 was 0.1 when backward.. began and is 0.5"),
    "written_in_place": (write_in_place, "written between backward.. and step"),
    "written_by_data": (write_by_data, "written between backward.. and step"),
    "state_dict": (lambda _, optimizer: optimizer.state_dict(), "do so after step"),
    "load_state_dict": (load_state, "do so after step"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_comes_between_backward_and_step_is_refused_and_loses_nothing(refused: str) -> None:
    template = CASES["perceptron"].make()
    meddle, message = REFUSED[refused]

    def body(fleet: Fleet, in_backward: bool) -> str:
        model, optimizer = start(fleet, template, in_backward=in_backward)
        good_step(model, optimizer)
        if in_backward:
            loss_of(model, INPUTS, TARGETS).backward()
            with pytest.raises(UpdateError, match=message):
                meddle(model, optimizer)
            optimizer.zero_grad()
        good_step(model, optimizer)
        return digest(model)

    after, within = run_alike(body)
    assert within == after


def test_data_assigned_after_a_step_counts_in_the_next_update() -> None:
    template = CASES["perceptron"].make()

    def body(fleet: Fleet, in_backward: bool) -> str:
        model, optimizer = start(fleet, template, in_backward=in_backward)
        for _ in range(3):
            good_step(model, optimizer)
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
        return digest(model)

    after, within = run_alike(body)
    assert within == after


def test_a_second_step_on_the_same_gradients_is_refused() -> None:
    template = CASES["perceptron"].make()

    def body(fleet: Fleet) -> None:
        model, optimizer = start(fleet, template)
        loss_of(model, INPUTS, TARGETS).backward()
        optimizer.step()
        with pytest.raises(UpdateError, match="a second step"):
            optimizer.step()

    run_fleets(Topology.flat(2), body)
