"""Which samples each rank takes of a data set."""

from __future__ import annotations

import random
import signal
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import syncline
from syncline.errors import ConfigurationError, PeerLostError
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.notices import Notice, Preemption

SAMPLES = TensorDataset(torch.arange(10))


def indices(fleet: Fleet, num_epochs: int = 1, **settings: Any) -> list[list[int]]:
    """Return the samples that a rank's loader yields in each epoch."""
    sampler = syncline.data.sampler(SAMPLES, fleet=fleet, **settings)
    loader = DataLoader(SAMPLES, batch_size=2, sampler=sampler)
    epochs = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        epochs.append([int(one) for (batch,) in loader for one in batch])
    return epochs


def test_every_sample_is_taken_by_some_rank_and_all_take_as_many(run_fleets: Any) -> None:
    parts = [part for (part,) in run_fleets(3, indices)]
    assert [len(part) for part in parts] == [4, 4, 4]
    taken = Counter(one for part in parts for one in part)
    assert set(taken) == set(range(10))
    assert max(taken.values()) == 2


def test_in_order_and_without_the_rest(run_fleets: Any) -> None:
    parts = run_fleets(3, lambda fleet: indices(fleet, shuffle=False, drop_last=True))
    assert parts == [[[0, 3, 6]], [[1, 4, 7]], [[2, 5, 8]]]


def test_each_epoch_has_an_order_of_its_own_from_the_seed(run_fleets: Any) -> None:
    random.seed(1)
    ((first, second),) = run_fleets(1, lambda fleet: indices(fleet, 2))
    assert first != second
    assert run_fleets(1, lambda fleet: indices(fleet, 2)) == [[first, second]]
    assert run_fleets(1, lambda fleet: indices(fleet, 1, seed=3)) != [[first]]


def test_the_current_fleet_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"syncline\.init\(\) first"):
        syncline.current_fleet()
    with pytest.raises(ConfigurationError, match=r"syncline\.init\(\) first"):
        syncline.data.sampler(SAMPLES)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with syncline.init() as fleet:
        assert syncline.current_fleet() is fleet
        assert len(syncline.data.sampler(SAMPLES)) == 10


def test_what_cannot_be_divided_is_refused(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        with pytest.raises(ConfigurationError, match="list has none"):
            syncline.data.sampler([], fleet=fleet)
        with pytest.raises(ConfigurationError, match=r"with a length .*every fleet\.world_size-th sample"):
            syncline.data.sampler(iter([1]), fleet=fleet)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="1 samples are too few for 2 ranks"):
            syncline.data.sampler([1], drop_last=True, fleet=fleet)

    run_fleets(2, body)


@pytest.mark.parametrize("is_elastic", [False, True])
def test_who_leaves_early_is_told_from_who_was_told_to_leave(
    is_elastic: bool, run_fleets: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job's ranks have unequal numbers of batches by a mistake, or as one of an elastic job leaves by a notice."""

    def body(fleet: Fleet) -> None:
        rank = fleet.rank
        if is_elastic:
            fleet.preemption = Preemption(Notice.LEAVE)
        model = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = syncline.AllReduce()
        model, optimizer = syncline.distribute(model, inner, rule, elastic=is_elastic or None, fleet=fleet)
        for step in range(6 if is_elastic or rank else 3):
            if fleet.preemption is not None and (rank, step) == (0, 2):
                fleet.preemption.receive(signal.SIGTERM)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    results = run_fleets(2, body, accept=(SystemExit, PeerLostError))
    told = capfd.readouterr().err if is_elastic else str(results[1])
    assert "left after 3 steps" in told
    assert "unless it was told to leave, give all ranks the same number of batches" in told
