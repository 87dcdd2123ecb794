"""The oracles of mechanism 4 on the in-memory fabric, each on a model of 84 elements."""

import pytest
import torch
from overlapped_training import (
    make_adam,
    make_sgd,
    one_step,
    parameters_of,
    run_fleets,
    start,
    train_alone,
)

from syncline.updates import Overlapped


@pytest.mark.parametrize("make", [make_sgd, make_adam])
@pytest.mark.parametrize("servers", ["shared", "dedicated:1"])
@pytest.mark.parametrize("seed", [None, 1])
def test_without_staleness_it_equals_synchronous_training(make, servers: str, seed: int | None) -> None:
    """Uneven samples, periods that end in between, several buckets, messages in any order: one process on the union."""
    num_workers = 3
    rule = Overlapped(period=4, max_staleness=0, servers=servers, bucket_bytes=256)

    def body(fleet):
        model, optimizer = start(fleet, rule, make)
        for step in range(10):
            one_step(model, optimizer, fleet.rank, step)
        assert optimizer.statistics().max_staleness == 0
        assert optimizer.statistics().share_with_global == 1.0
        return parameters_of(model)

    num_ranks = num_workers + (servers != "shared")
    results = run_fleets(num_ranks, body, seed=seed, accept=SystemExit)
    expected = train_alone(num_workers, range(10), make)
    for result in results[:num_workers]:
        assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)
