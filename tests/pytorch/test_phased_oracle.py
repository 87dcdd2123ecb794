"""Pairs of ranks that take turns end with the parameters of one process that holds the whole model."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from phased_models import (
    check_stages_equal,
    largest_of,
    make_batches,
    make_stages,
    squared,
    train_alone,
    train_in_pairs,
)
from torch import nn

from syncline.pytorch.phased import phase, setup
from syncline.topology import Topology

pytestmark = pytest.mark.usefixtures("small_slices")

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


def compare(num_stages: int, num_pairs: int, optimizer: str, run_fleets: Any, **options: Any) -> list[dict[str, Any]]:
    stages = make_stages(num_stages)
    batches = make_batches(4, num_pairs)
    make_optimizer = OPTIMIZERS[optimizer]
    results = train_in_pairs(stages, make_optimizer, batches, run_fleets, **options)
    losses = train_alone(stages, make_optimizer, batches)
    check_stages_equal(results, stages)
    for rank, result in enumerate(results):
        expected = [step[rank // 2] for step in losses]
        assert result["losses"] == pytest.approx(expected, rel=1e-12)
        assert result["losses"] == results[rank ^ 1]["losses"]
    return results


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_pairs", [1, 2, 3])
def test_equal_to_one_process(num_pairs: int, optimizer: str, run_fleets: Any) -> None:
    compare(5, num_pairs, optimizer, run_fleets)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6, 7, 10])
def test_any_number_of_stages(num_stages: int, run_fleets: Any) -> None:
    compare(num_stages, 2, "adam", run_fleets)


RACKS = """
topology: racks
switch: core
children:
  - {host: a, uplink: 1 Gbit/s}
  - switch: left
    uplink: 200 Mbit/s
    children: [{host: "b[0-1]", uplink: 1 Gbit/s}]
  - {host: c, uplink: 1 Gbit/s}
  - {host: d, uplink: 500 Mbit/s, ranks: 2}
"""


def test_pairs_follow_the_topology(run_fleets: Any) -> None:
    """Ranks 1 and 2 share a switch, 4 and 5 a host; 0 and 3 are left over. Each pair's batch goes to its own ranks."""
    stages = make_stages(5)
    batches = make_batches(3, 3)
    by_pair = {0: 0, 3: 0, 1: 1, 2: 1, 4: 2, 5: 2}
    copies = [copy.deepcopy(stages) for _ in range(6)]

    def body(fleet: Any) -> Any:
        trainer = phase(copies[fleet.rank], OPTIMIZERS["adam"], loss=squared, fleet=fleet)
        for step in batches:
            trainer.step(*step[by_pair[fleet.rank]])
        return trainer.partner, dict(trainer.stage_states())

    results = run_fleets(Topology.parse(RACKS), body)
    train_alone(stages, OPTIMIZERS["adam"], batches)
    assert [partner for partner, _ in results] == [3, 2, 1, 0, 5, 4]
    check_stages_equal([{"stages": results[rank][1]} for rank in (0, 3, 1, 2, 4, 5)], stages)


@pytest.mark.parametrize("num_pairs", [1, 2])
@pytest.mark.parametrize("stages_in_memory", [1, 2, 3])
def test_memory_is_that_of_so_many_stages(stages_in_memory: int, num_pairs: int, run_fleets: Any) -> None:
    results = compare(9, num_pairs, "adam", run_fleets, stages_in_memory=stages_in_memory)
    stages = make_stages(9)
    for rank, result in enumerate(results):
        statistics = result["statistics"]
        largest = largest_of(stages, rank % 2)
        slack = 64 * 4 * stages_in_memory  # what alignment may add
        assert largest <= statistics.largest_stage_bytes <= largest + slack
        assert largest <= statistics.peak_parameter_bytes <= stages_in_memory * largest + slack
        assert statistics.peak_gradient_bytes <= stages_in_memory * largest + slack
        per_stage = 3 * largest  # Adam with amsgrad keeps three numbers for each
        assert 0 < statistics.peak_state_bytes <= stages_in_memory * (per_stage / num_pairs + 64 * 8)


def test_whenever_a_stage_computes_no_more_than_two_have_parameters_in_memory(run_fleets: Any) -> None:
    """Counted in the tensors themselves, in every forward pass of every stage; what is not there is NaN."""
    stages = make_stages(8)
    batches = make_batches(3, 1)
    copies = [copy.deepcopy(stages) for _ in range(2)]

    def num_in_memory(rank: int) -> int:
        weights = [stage[0].weight for stage in copies[rank]]
        return sum(weight.untyped_storage().nbytes() > weight.element_size() for weight in weights)

    def body(fleet: Any) -> Any:
        counts = []
        for stage in copies[fleet.rank]:
            stage.register_forward_hook(lambda *_: counts.append(num_in_memory(fleet.rank)))
        trainer = phase(copies[fleet.rank], OPTIMIZERS["adam"], loss=squared, fleet=fleet)
        for step in batches:
            trainer.step(*step[0])
        trainer.synchronize()
        gone = [stage[0].weight for stage in copies[fleet.rank] if bool(stage[0].weight.isnan().all())]
        return counts, len(gone), trainer.statistics().num_loads

    for rank, (counts, num_gone, num_loads) in enumerate(run_fleets(2, body)):
        assert len(counts) == 3 * (8 - rank)  # the last stage is computed once a step, the others twice
        assert max(counts) <= 2
        assert num_gone == 6
        assert num_loads >= 3 * 4  # two of four are there at both ends of a pass


def test_state_is_divided_among_the_pairs(run_fleets: Any) -> None:
    bytes_of = {}
    for num_pairs in (1, 3):
        results = compare(4, num_pairs, "adam", run_fleets)
        bytes_of[num_pairs] = max(result["statistics"].peak_state_bytes for result in results)
    assert bytes_of[3] < 0.45 * bytes_of[1]


def test_dropout_draws_the_same_in_both_forward_passes(run_fleets: Any) -> None:
    """The two ranks are threads that take turns, so they share torch's generator in the order of the phases."""
    stages = make_stages(5, dropout=0.4)
    batches = make_batches(4, 1)
    torch.manual_seed(5)
    results = train_in_pairs(stages, OPTIMIZERS["adam"], batches, run_fleets)
    torch.manual_seed(5)
    losses = train_alone(stages, OPTIMIZERS["adam"], batches)
    check_stages_equal(results, stages)
    assert results[0]["losses"] == pytest.approx([step[0] for step in losses], rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"align": "parameter"}], ids=str)
def test_buckets_slices_and_whole_parameters(
    options: dict[str, Any], run_fleets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "DEFAULT_BUCKET_BYTES", 700)
    compare(5, 3, "adamw", run_fleets, **options)


def test_running_statistics_are_counted_once_and_those_of_the_first_pair_count(run_fleets: Any) -> None:
    widths = (6, 10, 8, 3)
    stages = [
        nn.Sequential(nn.Linear(first, second), nn.BatchNorm1d(second)).double() for first, second in pairwise(widths)
    ]
    batches = make_batches(4, 1)
    reference = copy.deepcopy(stages)
    results = train_in_pairs(stages, OPTIMIZERS["sgd"], batches, run_fleets)
    train_alone(reference, OPTIMIZERS["sgd"], batches)
    check_stages_equal(results, reference, tolerance=1e-11)


class Fork(nn.Module):
    """Returns two values and an index that has no gradient; the next stage gets them as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 5).double(), nn.Linear(6, 7).double()
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.full((6,), 0.5, dtype=torch.float64), requires_grad=False)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.left(values * self.fixed), self.right(values), torch.arange(len(values))


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_left = nn.Linear(5, 6).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        left, right, index = given
        return self.scale * self.of_left(left) + right[:, :6] * (index[:, None] + 1)


def test_tuples_frozen_and_unused_parameters(run_fleets: Any) -> None:
    """An unused parameter is not decayed, and a frozen one is loaded and nothing else; one is a number."""
    torch.manual_seed(2)
    stages = [Fork(), Join(), Fork(), Join(), nn.Linear(6, 3).double()]
    batches = make_batches(4, 2)
    results = train_in_pairs(stages, OPTIMIZERS["adamw"], batches, run_fleets)
    train_alone(stages, OPTIMIZERS["adamw"], batches)
    check_stages_equal(results, stages)
    assert torch.equal(results[0]["stages"][0]["unused"], torch.ones(3, dtype=torch.float64))


def test_parameter_groups_and_a_schedule(run_fleets: Any) -> None:
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        matrices = [one for one in parameters if one.dim() > 1]
        vectors = [one for one in parameters if one.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-2}]
        return torch.optim.AdamW(groups, lr=1e-2)

    stages = make_stages(6)
    batches = make_batches(5, 2)
    copies = [copy.deepcopy(stages) for _ in range(4)]

    def body(fleet: Any) -> Any:
        trainer = phase(copies[fleet.rank], make_optimizer, loss=squared, fleet=fleet)
        schedule = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
        for step in batches:
            trainer.step(*step[fleet.rank // 2])
            schedule.step()
        return {"stages": dict(trainer.stage_states())}

    results = run_fleets(4, body)
    parameters = [one for stage in stages for one in stage.parameters()]
    optimizer = make_optimizer(parameters)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in batches:
        train_alone(stages, lambda _: optimizer, [step])
        schedule.step()
    check_stages_equal(results, stages)


def test_stages_that_are_built_one_at_a_time_and_evaluation_between_steps(run_fleets: Any) -> None:
    """Only the stages of a rank are built there, and all pairs begin with the first one's values."""
    built: list[tuple[int, int]] = []
    stages = make_stages(5, dropout=0.2)
    batches = make_batches(2, 2)
    inputs = batches[0][0][0]

    def body(fleet: Any) -> Any:
        def maker(number: int) -> Any:
            def make() -> nn.Module:
                built.append((fleet.rank, number))
                stage = copy.deepcopy(stages[number])
                if fleet.rank > 1:
                    with torch.no_grad():
                        for parameter in stage.parameters():
                            parameter.fill_(7.0)
                return stage

            return make

        trainer = phase([maker(number) for number in range(5)], OPTIMIZERS["adam"], loss=squared, fleet=fleet)
        seen = [trainer.evaluate(inputs), trainer.evaluate(inputs)]
        return seen, trainer.needs_targets

    results = run_fleets(4, body)
    assert sorted(built) == [(rank, number) for rank in range(4) for number in range(rank % 2, 5, 2)]
    expected = nn.Sequential(*stages).eval()(inputs).detach()
    for rank, (seen, needs_targets) in enumerate(results):
        assert needs_targets is (rank % 2 == 0)
        for output in seen:
            if needs_targets:
                torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
            else:
                assert output is None
