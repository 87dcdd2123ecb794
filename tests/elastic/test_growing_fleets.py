"""Newcomers get all that they lack, of a divided state their part: the job ends as one process that replays it."""

from __future__ import annotations

import threading
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from growing_fleets import Ended, GrowingJob, make_model

import syncline

CLOSE = {"rtol": 1e-7, "atol": 1e-9}
SPARES = syncline.Sharded(bucket_bytes=600, spares=1)


def check_same(ended: dict[int, Ended], job: GrowingJob) -> None:
    """All ended with the same bits, which are those of the replay but for rounding."""
    first, *others = ended.values()
    assert first.members == tuple(sorted(ended))
    for other in others:
        assert other.members == first.members
        assert all(torch.equal(other.state[name], value) for name, value in first.state.items())
        _check_states(other.optimizer_state, first.optimizer_state, rtol=0.0, atol=0.0)
    model, optimizer = job.replay()
    for name, value in model.named_parameters():
        torch.testing.assert_close(first.state[name], value.detach(), **CLOSE)
    _check_states(first.optimizer_state, optimizer.state_dict()["state"], **CLOSE)
    begun = make_model(0, job.width)
    assert torch.equal(first.state["frozen"], begun.frozen)
    assert torch.equal(first.state["offset"], begun.offset)


def _check_states(ours: dict[int, Any], theirs: dict[int, Any], **tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for number, values in theirs.items():
        for key, value in values.items():
            torch.testing.assert_close(torch.as_tensor(ours[number][key]), torch.as_tensor(value), **tolerance)


@pytest.mark.parametrize(
    "rule",
    [SPARES, syncline.Sharded(align="parameter", bucket_bytes=600, spares=1), syncline.AllReduce(bucket_bytes=600)],
    ids=["spares", "whole parameters", "all-reduce"],
)
def test_a_job_that_loses_a_rank_takes_two_in_one_after_the_other(rule: Any) -> None:
    job = GrowingJob(rule, members=4, losses={1: 3}, come=[(0, 2, 3), (0, 2, 3, 4)], target=5)
    ended = job.run()
    assert sorted(ended) == [0, 2, 3, 4, 5]
    check_same(ended, job)
    assert [(change.lost, change.joined) for change in ended[0].changes] == [((1,), ()), ((), (4,)), ((), (5,))]
    sizes = [len(numbers) for _, numbers in sorted(job.counted.items())]
    assert [size for size, _ in groupby(sizes)] == [4, 3, 4, 5]


def test_errors_of_a_job_that_has_grown_name_ranks_by_their_numbers_in_the_job() -> None:
    """On the larger fabric, whose ranks are dense, number 2 is rank 1, and number 3 has come in as rank 2."""
    named: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    together = threading.Barrier(2)
    """Of those that make the call: who is in time is not named."""

    def before_step(fleet: Any, optimizer: Any, _: Any) -> None:
        number = fleet.members[fleet.rank]
        if fleet.members == (0, 2, 3) and number not in named:
            call = fleet.communicator.open_group((0, 1, 2), streams=fleet.reserve_streams(2))
            if number == 2:
                named[number] = []
                return
            together.wait(60)
            with pytest.raises(syncline.SynclineError) as caught:
                call.barrier(timeout_s=2.0).wait()
            named[number] = [(str(caught.value), caught.value.ranks_at_fault)]

    job = GrowingJob(syncline.AllReduce(), members=3, losses={1: 3}, come=[(0, 2)], target=3, before_step=before_step)
    job.run()
    assert sorted(named) == [0, 2, 3]
    for text, ranks in (*named[0], *named[3]):
        assert ranks[0] == 2, text
        assert text.startswith("rank 2 (host "), text


def test_without_spares_the_state_is_divided_too(tmp_path: Path) -> None:
    elastic = syncline.Elastic(checkpoint=tmp_path)
    rule = syncline.Sharded(bucket_bytes=600)
    job = GrowingJob(rule, members=2, come=[(0, 1)], target=3, elastic=elastic, width=200)
    ended = job.run()
    check_same(ended, job)
    whole = sum(
        value.nbytes for values in ended[0].optimizer_state.values() for value in values.values() if value.dim()
    )
    kept = {number: one.num_state_bytes for number, one in ended.items()}
    assert all(num_bytes < 0.45 * whole for num_bytes in kept.values())
    assert whole <= sum(kept.values()) < 1.01 * whole
    model_bytes = sum(value.nbytes for value in ended[0].state.values())
    sent = sum(num_bytes for one in ended.values() for num_bytes in one.sent_bytes)
    assert model_bytes + kept[2] < sent < 1.05 * (model_bytes + kept[2] + 0.34 * whole), "members shift borders too"


def test_one_rank_becomes_three_with_spares() -> None:
    def before_step(fleet: Any, optimizer: Any, _: Any) -> None:
        if fleet.members[fleet.rank] == 0:
            assert fleet.statistics().num_steps == optimizer.iteration, "it counts on when others have come in"

    job = GrowingJob(SPARES, members=1, come=[(0,), (0,)], target=3, before_step=before_step)
    check_same(job.run(), job)


def test_after_growth_too_lost_state_comes_back_from_a_checkpoint(tmp_path: Path, capsys: Any) -> None:
    """The rank that came in is lost with its part, two steps after a checkpoint that it had a hand in."""
    saved: list[int] = []

    def before_step(fleet: Any, optimizer: Any, model: Any) -> None:
        if fleet.world_size == 3 and not saved:
            fleet.barrier()
            if fleet.rank == 0:
                saved.append(optimizer.iteration)
                job.losses = {2: saved[0] + 3}
            fleet.barrier()
        if saved and optimizer.iteration == saved[0]:
            syncline.save_checkpoint(tmp_path / "saved", model, optimizer)

    elastic = syncline.Elastic(checkpoint=tmp_path / "saved")
    rule = syncline.Sharded(bucket_bytes=600)
    job = GrowingJob(rule, members=2, come=[(0, 1)], target=2, elastic=elastic, before_step=before_step)
    ended = job.run()
    check_same(ended, job)
    assert f"goes back from step {saved[0] + 3} to the checkpoint of {saved[0]}" in capsys.readouterr().err
