"""Ranks that only serve: ``distribute()`` returns there too, and what their scripts may do."""

from __future__ import annotations

import pytest
import torch
from overlapped_training import one_step, start

import syncline
from small_regression import make_model, parameters_of
from syncline.errors import UpdateError
from syncline.updates import Overlapped
from thread_fleets import run_fleets

RULE = Overlapped(period=4, max_staleness=4, servers="dedicated:1", bucket_bytes=128)


def train(model, optimizer, rank: int) -> torch.Tensor:
    for step in range(8):
        one_step(model, optimizer, rank, step)
    return parameters_of(model)


@pytest.mark.parametrize("says_serve", [True, False])
def test_a_server_goes_on_when_the_workers_have_left(says_serve: bool) -> None:
    """Whether the script says ``serve()`` or only leaves the loop out: then the end of the fleet serves."""

    def body(fleet):
        model, optimizer = start(fleet, RULE)
        assert optimizer.is_server == (fleet.rank == 2)
        if not optimizer.is_server:
            return train(model, optimizer, fleet.rank)
        if says_serve:
            optimizer.serve()
            optimizer.serve()  # all have left: returns at once
        return parameters_of(model)

    results = run_fleets(3, body)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], parameters_of(make_model()))
    assert not torch.equal(results[0], results[2])


def test_a_server_that_trains_is_told_what_to_write() -> None:
    def body(fleet):
        model, optimizer = start(fleet, RULE)
        if optimizer.is_server:
            with pytest.raises(UpdateError, match=r"rank 2 is a dedicated server.*optimizer\.serve\(\)"):
                one_step(model, optimizer, fleet.rank, 0)
            with pytest.raises(UpdateError, match=r"rank 2 is a dedicated server"):
                optimizer.step()
            return optimizer.serve()
        return train(model, optimizer, fleet.rank)

    results = run_fleets(3, body)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("servers", ["shared", "dedicated:1"])
def test_a_rank_that_trains_does_not_only_serve(servers: str) -> None:
    def body(fleet):
        _, optimizer = start(fleet, Overlapped(period=4, servers=servers))
        if not optimizer.is_server:
            with pytest.raises(UpdateError, match=rf"rank {fleet.rank} trains.*optimizer\.is_server"):
                optimizer.serve()

    run_fleets(3, body)


def test_a_server_has_no_part_in_a_checkpoint(tmp_path) -> None:
    """Every rank calls ``save_checkpoint`` at the end of its script, the server after all workers have left."""

    def body(fleet):
        model, optimizer = start(fleet, RULE)
        if optimizer.is_server:
            optimizer.serve()
        else:
            train(model, optimizer, fleet.rank)
        syncline.save_checkpoint(tmp_path / "saved", model, optimizer, extra={"rank": fleet.rank})
        return parameters_of(model)

    results = run_fleets(3, body)
    model = make_model()
    assert syncline.load_checkpoint(tmp_path / "saved", model) == {"rank": 0}
    assert torch.equal(parameters_of(model), results[0])
