"""What a process that is to come into a running job is told when it cannot, and how long it is a job of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import syncline
from syncline.errors import CheckpointError, HandshakeError, UpdateError
from syncline.pytorch.checkpoint.loading import take_parts
from syncline.pytorch.fleet import Fleet
from syncline.runtime import communicators_in_memory


@contextmanager
def job_with(rule: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A job that makes no step, in a process of its own as far as names go."""
    fleet = syncline.init(rank=0, world_size=1, join_port=0, secret="s" * 32)
    try:
        model = nn.Linear(2, 2)
        syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, elastic=True, fleet=fleet)
        assert fleet.join_address is not None
        with monkeypatch.context() as patch:
            patch.setattr("syncline.pytorch.fleet._current", None)  # so that this process may be a second rank too
            yield fleet
    finally:
        fleet.close()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with job_with(syncline.AllReduce(), monkeypatch) as fleet:
        assert fleet.join_address is not None
        yield fleet.join_address


def test_another_secret_is_told_when_init_asks(job: str) -> None:
    with pytest.raises(HandshakeError, match="the shared secrets differ"):
        syncline.init(join=job, secret="t" * 32)


def test_nobody_there_is_told_with_what_to_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("syncline.observe.FIRST_S", 0.1)
    with pytest.raises(HandshakeError, match=r"No member of the job answers at 127.0.0.1:9 .*fleet\.join_address"):
        syncline.init(join="127.0.0.1:9", connect_timeout_s=0.5, host="h1")
    told = capsys.readouterr().err
    assert "syncline: h1 waits to come into the job at 127.0.0.1:9: no member answers there; check that" in told


def test_until_distribute_a_newcomer_is_a_job_of_one_rank_and_takes_over_the_jobs_limits(job: str) -> None:
    with syncline.init(join=job, secret="s" * 32, timeout_s=7) as fleet:
        assert (fleet.rank, fleet.world_size, fleet.timeout_s) == (0, 1, 300.0)


def test_a_newcomer_to_a_job_that_has_ended_well_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with job_with(syncline.AllReduce(), monkeypatch) as job:
        address = job.join_address
        fleet = syncline.init(join=address, secret="s" * 32)
        assert job.growth is not None
        job.growth.close(is_over=True)
        with pytest.raises(SystemExit) as ended:
            syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True, fleet=fleet)
    assert ended.value.code == 0
    assert capsys.readouterr().err == f"syncline: the job at {address} ended before this process could join it\n"


def test_another_model_or_rule_is_refused_and_the_job_goes_on(job: str) -> None:
    with syncline.init(join=job, secret="s" * 32) as fleet:
        model = nn.Linear(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            HandshakeError, match=r"its training is another one: the job has 'parameter weight: \(2, 2\)"
        ):
            syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True, fleet=fleet)


def test_a_newcomer_whose_training_is_not_elastic_is_told_so(job: str) -> None:
    with syncline.init(join=job, secret="s" * 32) as fleet:
        model = nn.Linear(2, 2)
        with pytest.raises(UpdateError, match=r"\(join=\).*its only training is distribute\(\.\.\., elastic=True\)"):
            syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet=fleet)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (syncline.Sharded(spares=1, portions={"h0": 1.0}), r"Sharded\(portions=, replicate=\) names parts of its"),
        (syncline.Clustered(clusters=[[0]]), r"Clustered\(clusters=\) names ranks, and newcomers are none of them"),
        (syncline.Clustered(averages=False), r"Clustered\(averages=False\) never makes parameters equal"),
        (syncline.LocalSteps(parties=1), r"LocalSteps\(parties=\) names parts of its"),
        (syncline.LocalSteps(pace={"h0": 1.0}), r"LocalSteps\(pace=\) gives the speeds of hosts"),
        (syncline.Overlapped(quorum=1), r"Overlapped\(quorum=, servers=\) says how many ranks do what"),
    ],
)
def test_a_training_that_cannot_grow_says_so_at_once(rule: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with job_with(rule, monkeypatch) as job, pytest.raises(HandshakeError, match=why):
        syncline.init(join=job.join_address, secret="s" * 32)


def test_what_members_have_not_given_to_resume_is_named() -> None:
    sampler = syncline.data.ElasticSampler(range(4), 2, fleet=Fleet(*communicators_in_memory(1)))
    growing: Any = SimpleNamespace(parts={"scheduler": ""}, iteration=3)
    with pytest.raises(CheckpointError, match=r"sampler= was not given to resume\(\).*, which gave scheduler"):
        take_parts(growing, {"sampler": sampler})


def test_what_json_cannot_say_is_not_offered_to_newcomers() -> None:
    with syncline.init(rank=0, world_size=1) as fleet:
        model = nn.Linear(2, 2)
        model, optimizer = syncline.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), syncline.AllReduce(), elastic=True, fleet=fleet
        )
        with pytest.raises(UpdateError, match="must be what JSON can say, but Object of type Tensor"):
            optimizer.offer_extra(lambda: {"scale": torch.ones(1)})
        assert optimizer.extra is None
