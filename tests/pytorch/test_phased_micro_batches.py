"""Micro-batches, spilled inputs and clipping change nothing of what one process computes with the whole batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from phased_models import Batch, check_stages_equal, make_stages, squared
from torch import nn

from syncline.errors import ConfigurationError, UpdateError
from syncline.pytorch.phased import phase
from syncline.topology import Topology
from syncline.updates.phased.micro_batches import plan_parts, take

SIZE = 8


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def even_batches(num_steps: int, num_pairs: int) -> list[list[Batch]]:
    """Return batches that can be divided; pairs have unequal ones."""
    generator = torch.Generator().manual_seed(5)
    return [
        [
            (
                torch.randn(SIZE * (1 + pair), 6, generator=generator, dtype=torch.float64),
                torch.randn(SIZE * (1 + pair), 3, generator=generator, dtype=torch.float64),
            )
            for pair in range(num_pairs)
        ]
        for _ in range(num_steps)
    ]


def train_alone(stages: list[nn.Module], batches: list[list[Batch]], max_norm: float | None) -> list[float]:
    """Train as one process on the union of the batches; return the norm of each step's gradients."""
    model = nn.Sequential(*stages)
    optimizer = adam(model.parameters())
    norms = []
    for step in batches:
        inputs, targets = (torch.cat([pair[part] for pair in step]) for part in range(2))
        squared(model(inputs), targets).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_in_pairs(
    stages: list[nn.Module], batches: list[list[Batch]], run_fleets: Any, world: Any = None, **options: Any
) -> list[dict[str, Any]]:
    num_ranks = 2 * len(batches[0])
    copies = [copy.deepcopy(stages) for _ in range(num_ranks)]

    def body(fleet: Any) -> dict[str, Any]:
        trainer = phase(copies[fleet.rank], adam, loss=squared, fleet=fleet, **options)
        norms, losses = [], []
        for step in batches:
            losses.append(trainer.step(*step[fleet.rank // 2]))
            if "max_grad_norm" in options:
                trainer.synchronize()
            norms.append(trainer.statistics().gradient_norm)
        seen = trainer.evaluate(batches[0][0][0])
        result = {"losses": losses, "norms": norms, "evaluated": seen, "stages": dict(trainer.stage_states())}
        classes = fleet.statistics().fabric.connections
        return result | {"statistics": trainer.statistics(), "connections": classes}

    return run_fleets(num_ranks if world is None else world, body)


@pytest.mark.parametrize("num_stages", [2, 5])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.3}, {"input_budget_bytes": 300}], ids=str)
@pytest.mark.parametrize(("num_pairs", "num_micros"), [(1, 4), (2, 2)])
def test_equal_to_one_process(
    num_pairs: int, num_micros: int, options: dict[str, Any], num_stages: int, run_fleets: Any
) -> None:
    stages = make_stages(num_stages)
    batches = even_batches(3, num_pairs)
    results = train_in_pairs(stages, batches, run_fleets, micro_batches=num_micros, **options)
    norms = train_alone(stages, batches, options.get("max_grad_norm"))
    check_stages_equal(results, stages, tolerance=1e-11)
    for rank, result in enumerate(results):
        assert result["losses"] == results[rank ^ 1]["losses"]
        if "max_grad_norm" in options:
            assert max(norms) > 0.3  # or clipping would change nothing
            assert result["norms"] == pytest.approx(norms, rel=1e-9)
        else:
            assert result["norms"] == [None] * 3


def test_one_stage_of_memory_and_clipping(run_fleets: Any, tmp_path: Path) -> None:
    """Each gradient is stored, since the next stage needs the one place; and no file of it stays."""
    stages = make_stages(6)
    batches = even_batches(3, 1)
    options = {"stages_in_memory": 1, "max_grad_norm": 0.2, "micro_batches": 2, "input_budget_bytes": 0}
    results = train_in_pairs(stages, batches, run_fleets, storage=tmp_path, **options)
    kinds = {path.name.split(".")[1] for path in tmp_path.glob("*/*")}
    assert kinds == {"parameters", "state"}
    assert max(train_alone(stages, batches, 0.2)) > 0.2
    check_stages_equal(results, stages, tolerance=1e-11)


def test_inputs_beyond_the_budget_are_spilled_and_the_same_comes_back(run_fleets: Any) -> None:
    """A micro-batch has two samples of up to 40 numbers, 640 bytes; each rank keeps up to twelve of them."""
    largest = 2 * 40 * 8
    peaks = {}
    for budget in (None, 2 * largest, 0):
        stages = make_stages(7)
        batches = even_batches(2, 1)
        results = train_in_pairs(stages, batches, run_fleets, micro_batches=4, input_budget_bytes=budget)
        train_alone(stages, batches, None)
        check_stages_equal(results, stages, tolerance=1e-11)
        peaks[budget] = results[1]["statistics"].peak_input_bytes
        assert (results[1]["statistics"].spilled_bytes > 0) is (budget is not None)
        if budget is not None:
            assert peaks[budget] <= budget + 5 * largest
    assert peaks[None] > 8 * largest


def test_each_visit_loads_a_stage_once_however_many_micro_batches(run_fleets: Any) -> None:
    num_loads = {}
    for num_micros in (1, 8):
        results = train_in_pairs(make_stages(8), even_batches(2, 1), run_fleets, micro_batches=num_micros)
        num_loads[num_micros] = [result["statistics"].num_loads for result in results]
    assert num_loads[8] == num_loads[1]


def test_dropout_draws_the_same_again_for_each_micro_batch(run_fleets: Any) -> None:
    """The mask that the loss has seen is the one that gradients are made with: where it is zero, so are they."""
    masks: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    class Mask(nn.Dropout):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            dropped = super().forward(torch.ones_like(values))
            masks[int(torch.is_grad_enabled())].append(dropped)
            return values * dropped

    stages = [nn.Sequential(nn.Linear(6, 5), Mask(0.5)).double(), nn.Linear(5, 3).double()]
    torch.manual_seed(9)

    def body(fleet: Any) -> None:
        phase(
            stages if fleet.rank == 0 else copy.deepcopy(stages), adam, loss=squared, fleet=fleet, micro_batches=4
        ).step(*even_batches(1, 1)[0][0])

    run_fleets(2, body)
    assert len(masks[0]) == 4
    assert all(torch.equal(first, again) for first, again in zip(masks[0], masks[1], strict=True))
    assert not torch.equal(masks[0][0], masks[0][1])


CLASSES = """
topology: two
switch: core
children:
  - {host: a, uplink: 1 Gbit/s, ranks: 2}
  - {host: b, uplink: 1 Gbit/s, ranks: 2}
priorities: {num_classes: 3, search: equal}
"""


def test_classes_of_the_topology_file_are_used(run_fleets: Any) -> None:
    """What goes between the ranks of a pair has the first class, and updates between pairs have the last."""
    topology = Topology.parse(CLASSES)
    assert topology.priorities is not None
    stages = make_stages(4)
    batches = even_batches(2, 2)
    results = train_in_pairs(stages, batches, run_fleets, topology)
    train_alone(stages, batches, None)
    check_stages_equal(results, stages, tolerance=1e-11)
    used = {(one.peer, one.connection_class): one.sent_bytes for one in results[0]["connections"] if one.sent_bytes}
    assert used[1, 0] > 1000
    assert (1, 2) not in used
    parameters = sum(parameter.nbytes for stage in stages[::2] for parameter in stage.parameters())
    assert used[2, 2] >= 2 * parameters  # half of the gradients and half of the parameters, in each of two steps


def uneven_batches(num_steps: int, num_pairs: int) -> list[list[Batch]]:
    """Return batches whose last one is smaller, and none of which can be divided by 4."""
    sizes = [[SIZE + 1 + 2 * pair for pair in range(num_pairs)]] * (num_steps - 1) + [[5, 6][:num_pairs]]
    whole = even_batches(num_steps, 2)
    return [[(whole[step][1][0][:size], whole[step][1][1][:size]) for size in sizes[step]] for step in range(num_steps)]


@pytest.mark.parametrize("num_stages", [2, 5])
@pytest.mark.parametrize("num_pairs", [1, 2])
def test_a_batch_that_does_not_divide_equals_one_process_too(num_pairs: int, num_stages: int, run_fleets: Any) -> None:
    """Micro-batches have weights: of 9 samples, the first of 4 has 3."""
    stages = make_stages(num_stages)
    batches = uneven_batches(3, num_pairs)
    results = train_in_pairs(stages, batches, run_fleets, micro_batches=4)
    train_alone(stages, batches, None)
    check_stages_equal(results, stages, tolerance=1e-11)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_targets_with_several_rows_for_a_sample_are_divided_as_the_inputs_are(num_stages: int, run_fleets: Any) -> None:
    """As tokens of a text are; the rank that has them may not have the inputs."""
    stages = make_stages(num_stages)
    ((inputs, targets),) = uneven_batches(1, 1)[0]

    def flat(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        assert output.reshape(-1, 1).shape == wanted.shape
        return squared(output.reshape(-1, 1), wanted)

    def body(fleet: Any) -> float:
        trainer = phase(copy.deepcopy(stages), adam, loss=flat, fleet=fleet, micro_batches=4)
        return trainer.step(
            inputs if trainer.needs_inputs else None, targets.reshape(-1, 1) if trainer.needs_targets else None
        )

    losses = run_fleets(2, body)
    expected = float(squared(nn.Sequential(*stages)(inputs), targets).detach())
    assert losses == [pytest.approx(expected, rel=1e-12)] * 2


def test_batches_that_cannot_be_divided(run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        trainer = phase(make_stages(4), adam, loss=squared, fleet=fleet, micro_batches=4)
        inputs, targets = even_batches(1, 1)[0][0]
        with pytest.raises(
            ConfigurationError,
            match=r"micro_batches=4 .* the (inputs|targets) have first dimensions of \[3\]; give larger",
        ):
            trainer.step(inputs[:3], targets[:3])
        with pytest.raises(ConfigurationError, match="have no tensor"):
            trainer.step(3, "targets")
        trainer.step(inputs, targets)  # nothing was begun, so nothing is lost

    run_fleets(2, body)


def test_tensors_of_a_batch_that_have_other_rows() -> None:
    with pytest.raises(
        ConfigurationError, match=r"multiple of micro_batches=4, .* first dimensions of \[6, 8\]; give all"
    ):
        plan_parts([torch.zeros(6), torch.zeros(8)], 4)
    with pytest.raises(UpdateError, match=r"rows 0 to 2 of 6 and others, .* targets have first dimensions of \[8\]"):
        take(torch.zeros(8), plan_parts(torch.zeros(6), 4)[0], "targets")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 0}, "micro_batches must be a whole number from 1 up, not 0"),
        ({"input_budget_bytes": -1}, "input_budget_bytes must be a whole number from 0 up, or None, not -1"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm must be a number above 0, or None, not 0\.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a number above 0, or None, not nan"),
    ],
)
def test_options(options: dict[str, Any], message: str, run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        with pytest.raises(ConfigurationError, match=message):
            phase(make_stages(4), adam, loss=squared, fleet=fleet, **options)

    run_fleets(2, body)
