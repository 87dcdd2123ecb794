"""Buffers: rank 0's, as in DDP, also those that its program writes between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Sharded, UpdateRule

RULES: dict[str, UpdateRule] = {
    "sharded": Sharded(),
    "overlapped_forward": Sharded(overlap_forward=True),
    "all_reduce": AllReduce(),
}
by_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


class Queue(nn.Module):
    """A pointer that the training loop moves, as that of a queue of keys."""

    pointer: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.seen: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append(int(self.pointer))
        return self.weight * inputs


def run(run_fleets: Any, rule: UpdateRule, write: Any) -> list[list[int]]:
    def body(fleet: Fleet) -> list[int]:
        model = Queue()
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        for step in range(4):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            write(model, fleet.rank, step)
        return model.seen

    return run_fleets(3, body)


@by_rule
def test_what_every_rank_writes_between_steps_stays(rule: UpdateRule, run_fleets: Any) -> None:
    def write(model: Queue, rank: int, step: int) -> None:
        model.pointer += 5

    assert run(run_fleets, rule, write) == [[0, 5, 10, 15]] * 3


@by_rule
def test_what_rank_0_writes_reaches_all_and_what_others_write_is_replaced(rule: UpdateRule, run_fleets: Any) -> None:
    def write(model: Queue, rank: int, step: int) -> None:
        model.pointer[0] = step if rank == 0 else 100 + rank

    assert run(run_fleets, rule, write) == [[0, 0, 1, 2]] * 3


@by_rule
def test_ranks_evaluate_with_equal_buffers(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> list[float]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        generator = torch.Generator().manual_seed(fleet.rank)
        outputs = []
        for _ in range(3):
            model.train()
            model(torch.randn(4, 2, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                outputs.append(float(model(torch.ones(1, 2)).sum()))
        return outputs

    first, *others = run_fleets(3, body)
    assert others == [first, first]


@by_rule
def test_a_rank_may_look_ahead_with_gradients(rule: UpdateRule, run_fleets: Any) -> None:
    """A forward pass of rank 0 alone, in training mode and with gradients, waits for nobody and changes nothing."""

    def body(fleet: Fleet) -> list[int]:
        model = Queue()
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        for _ in range(3):
            if fleet.rank == 0:
                model(torch.ones(1))
            fleet.barrier()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.seen

    run_fleets(2, body)


class Moving(nn.Module):
    """Reads a mean, which each forward pass moves if it is to."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))
        self.seen: list[float] = []

    def forward(self, inputs: torch.Tensor, *, moves: bool = True) -> torch.Tensor:
        self.seen.append(float(self.mean))
        if moves:
            self.mean += inputs[0]
        return self.weight * inputs


@by_rule
def test_a_later_pass_of_a_step_reads_what_rank_0s_last_one_wrote_whether_or_not_this_rank_wrote(
    rule: UpdateRule, run_fleets: Any
) -> None:
    """All write in the first step; then rank 0 alone, and then all others."""

    def body(fleet: Fleet) -> list[float]:
        model = Moving()
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        for step in range(3):
            moves = step == 0 or (fleet.rank == 0) == (step == 1)
            for _ in range(3):
                model(torch.full((2,), 1.0 + fleet.rank), moves=moves).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.seen

    assert run_fleets(3, body) == [[0, 1, 2, 3, 4, 5, 6, 6, 6]] * 3


@by_rule
def test_where_no_pass_reads_what_another_wrote_ranks_make_as_many_in_a_step_as_they_like(
    rule: UpdateRule, run_fleets: Any
) -> None:
    """BatchNorm in training mode reads no buffer: passes of one rank alone wait for nobody."""

    def body(fleet: Fleet) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model, optimizer = distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet, samples=lambda *_: 1
        )
        inputs = torch.randn(4, 2, generator=torch.Generator().manual_seed(fleet.rank))
        for _ in range(2):
            sum(model(inputs).square().sum() for _ in range(1 + fleet.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model[1].running_mean.clone()

    first, *others = run_fleets(3, body)
    assert all(torch.equal(first, other) for other in others)
    assert first.any()


@by_rule
def test_without_broadcasts_each_rank_keeps_its_own_from_the_same_start_as_in_ddp(
    rule: UpdateRule, run_fleets: Any
) -> None:
    """They may differ then, and no comparison of ranks objects."""

    def body(fleet: Fleet) -> list[int]:
        model = Queue()
        model.pointer += 10 * fleet.rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = distribute(model, optimizer, rule, broadcast_buffers=False, check_every=1, fleet=fleet)
        for _ in range(3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.pointer += 1 + fleet.rank
        return model.seen

    assert run_fleets(2, body) == [[0, 1, 2], [0, 2, 4]]


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (torch.eye(3).to_sparse(), "Buffer 'odd' is torch.sparse_coo"),
        (torch.arange(3).expand(2, 3), "Several elements of buffer 'odd' lie in the same memory"),
        (nn.LazyBatchNorm1d().running_mean, "'odd' has no shape yet; call the module with a batch"),
    ],
    ids=["sparse", "expanded", "lazy"],
)
def test_a_buffer_that_cannot_be_sent_is_refused_by_name(buffer: torch.Tensor, words: str, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(1, 1)
        model.register_buffer("odd", buffer)
        with pytest.raises(UpdateError, match=words):
            distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet=fleet)

    run_fleets(2, body)
