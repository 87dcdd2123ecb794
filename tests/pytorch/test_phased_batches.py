"""Both ranks of a pair are given the same batch; if not, both are told so, and by whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phased_models import make_batches, make_stages, squared
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.phased import phase
from syncline.updates.phased.batch_check import describe_batch, describe_given, find_difference
from syncline.updates.phased.instructions import Kind, Pass, Phase
from syncline.updates.phased.kept_inputs import Message, decode

INPUTS, TARGETS = make_batches(1, 1)[0][0]
OTHERS = {
    "another value": (INPUTS + 1e-9, TARGETS, "inputs"),
    "another order": (INPUTS.flip(0), TARGETS, "inputs"),
    "another shape": (INPUTS[:-1], TARGETS[:-1], "inputs and targets"),
    "another dtype": (INPUTS, TARGETS.float(), "targets"),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


@pytest.mark.parametrize("num_stages", [2, 5])
@pytest.mark.parametrize("kind", OTHERS)
def test_different_batches_are_told_on_both_ranks(kind: str, num_stages: int, run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        trainer = phase(make_stages(num_stages), sgd, loss=squared, fleet=fleet)
        trainer.step(INPUTS, TARGETS)
        trainer.step(*OTHERS[kind][:2]) if fleet.rank == 1 else trainer.step(INPUTS, TARGETS)

    told = [str(error) for error in run_fleets(2, body, accept=UpdateError)]
    assert told[0] == told[1]
    assert f"call 2 of step() their {OTHERS[kind][2]} differ: rank 0 (host memory) " in told[0]
    assert "; rank 1 (host memory) " in told[0]


def test_a_rank_may_be_given_only_what_it_uses(run_fleets: Any) -> None:
    def body(fleet: Any) -> float:
        trainer = phase(make_stages(4), sgd, loss=squared, fleet=fleet)
        return trainer.step(INPUTS if trainer.needs_inputs else None, TARGETS if trainer.needs_targets else None)

    first, second = run_fleets(2, body)
    assert first == second


def test_pairs_may_have_different_batches(run_fleets: Any) -> None:
    def body(fleet: Any) -> float:
        trainer = phase(make_stages(4), sgd, loss=squared, fleet=fleet)
        return trainer.step(INPUTS + fleet.rank // 2, TARGETS)

    losses = run_fleets(4, body)
    assert losses[0] == losses[1] != losses[2] == losses[3]


def test_inputs_of_an_evaluation_are_compared_too(run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        trainer = phase(make_stages(4), sgd, loss=squared, fleet=fleet)
        trainer.evaluate(INPUTS + fleet.rank)
        trainer.synchronize()

    told = [str(error) for error in run_fleets(2, body, accept=UpdateError)]
    assert all("call 1 of evaluate() their inputs differ" in one for one in told), told


def test_everything_that_a_batch_holds_counts() -> None:
    batch = {"x": torch.arange(6).reshape(2, 3), "y": [torch.ones(2, dtype=torch.bool), 3, "ä"]}
    text, checksum = describe_batch(batch)
    assert text == "int64 (2, 3), bool (2,), 3, '\\xe4'"
    for other in (batch | {"x": batch["x"].T}, batch | {"y": [*batch["y"][:2], "a"]}, batch | {"x": batch["x"].int()}):
        assert describe_batch(other)[1] != checksum
    assert describe_batch(batch | {"x": batch["x"].T.contiguous().T}) == (text, checksum)
    assert describe_batch(torch.zeros(0, 3))[0] == "float32 (0, 3)"
    assert describe_batch(nn.Linear(2, 2))[0] == "Linear"
    assert describe_batch(torch.zeros(2, 2).to_sparse())[0] == "float32 (2, 2)"
    assert describe_batch(torch.tensor(1.0 + 2.0j).conj()) == describe_batch(torch.tensor(1.0 - 2.0j))


def test_what_was_given_travels_whole_whatever_it_says() -> None:
    given = describe_given(['"\\ä' * 500], ["'" * 500])
    message = Message(
        phase=Phase(Kind.FORWARD, 1, 0), kind=Pass.TRAIN, number=1, is_tuple=False, num_samples=1.0, given=given
    )
    arrived, _ = decode(message.encode())
    assert arrived.given == given
    assert find_difference(("here", given), ("there", arrived.given), "step()") is None
    others = describe_given(1, ["'" * 500])
    assert "in step() their inputs differ: here inputs '" in str(
        find_difference(("here", given), ("", others), "step()")
    )
    assert find_difference(("here", given), ("there", describe_given(None, ["'" * 500])), "step()") is None
