"""Calls that cannot end well: a rank is lost, absent, or calls something else, and every rank learns of it, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.errors import DeadlineError, MismatchError, PeerLostError, SynclineError
from syncline.tensors.collectives import TensorCollectives
from syncline.tensors.work import TensorWork

WORLD = 4
ROOT = 1
SUM = dist.ReduceOp.SUM
Begin = Callable[[TensorCollectives, int], TensorWork]


def then_barrier(work: TensorWork, communicator: Any) -> None:
    """Wait for a call, and for a barrier: a rank may have had its part of the call from those that agree with it."""
    work.wait(30)
    communicator.barrier().wait()


def parts(num: int = 3) -> list[torch.Tensor]:
    return [torch.ones(num) for _ in range(WORLD)]


CALLS: dict[str, Begin] = {
    "all_reduce": lambda c, _: c.all_reduce(torch.ones(3), SUM),
    "all_reduce_coalesced": lambda c, _: c.all_reduce_coalesced([torch.ones(3), torch.ones(2)], SUM),
    "broadcast": lambda c, _: c.broadcast(torch.ones(3), ROOT),
    "reduce": lambda c, _: c.reduce(torch.ones(3), ROOT, SUM),
    "all_gather": lambda c, _: c.all_gather(parts(), torch.ones(3)),
    "uneven all_gather": lambda c, rank: c.all_gather([torch.ones(k) for k in range(WORLD)], torch.ones(rank)),
    "all_gather_single": lambda c, _: c.all_gather_single(torch.ones(3 * WORLD), torch.ones(3)),
    "reduce_scatter": lambda c, _: c.reduce_scatter(torch.ones(3), parts(), SUM),
    "reduce_scatter_single": lambda c, _: c.reduce_scatter_single(torch.ones(3), torch.ones(3 * WORLD), SUM),
    "gather": lambda c, rank: c.gather(parts() if rank == ROOT else None, torch.ones(3), ROOT),
    "scatter": lambda c, rank: c.scatter(torch.ones(3), parts() if rank == ROOT else None, ROOT),
    "all_to_all": lambda c, _: c.all_to_all(parts(), parts()),
    "all_to_all_single": lambda c, _: c.all_to_all_single(torch.ones(WORLD), torch.ones(WORLD)),
    "barrier": lambda c, _: c.barrier(),
    "monitored_barrier": lambda c, _: c.monitored_barrier(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_is_lost_ends_the_call(name: str, run_ranks: Any) -> None:
    """All that wait for it learn who it is: at once, long before the deadline."""
    lost = ROOT if name in {"scatter", "broadcast", "gather"} else WORLD - 1
    have_begun = threading.Barrier(WORLD)

    def body(collectives: TensorCollectives, communicator: Any) -> str:
        if communicator.rank == lost:
            communicator.barrier().wait()
            communicator.abort()
            have_begun.wait(60)
            return ""
        communicator.barrier().wait()
        have_begun.wait(60)
        with pytest.raises(PeerLostError, match=f"rank {lost}") as caught:
            CALLS[name](collectives, communicator.rank).wait(30)
        assert caught.value.rank == lost
        return str(caught.value)

    texts = run_ranks(WORLD, body)
    assert all(f"rank {lost} (host memory)" in text for rank, text in enumerate(texts) if rank != lost)


@pytest.mark.parametrize("name", ["all_to_all", "scatter", "gather"])
def test_a_rank_that_is_lost_while_messages_are_under_way(name: str, run_ranks: Any) -> None:
    """Whoever waits for its message hears of it. In a gather that is the root; to send a small one is soon done."""
    lost = ROOT if name == "scatter" else WORLD - 1
    have_begun, have_heard = threading.Barrier(WORLD), threading.Barrier(WORLD - 1)

    def body(collectives: TensorCollectives, communicator: Any) -> bool:
        if communicator.rank == lost:
            have_begun.wait(60)
            communicator.abort()
            return True
        work = CALLS[name](collectives, communicator.rank)
        have_begun.wait(60)
        if name != "gather" or communicator.rank == ROOT:
            with pytest.raises(PeerLostError, match=f"rank {lost} .*, during {name}; "):
                work.wait(30)
        else:
            with suppress(PeerLostError):  # unless its message had left before
                work.wait(30)
        have_heard.wait(60)  # who leaves before would be the one that is named
        return work.done()

    assert run_ranks(WORLD, body) == [True] * WORLD


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_calls_something_else_is_told_to_all(name: str, run_ranks: Any) -> None:
    have_failed = threading.Barrier(WORLD)

    def body(collectives: TensorCollectives, communicator: Any) -> str:
        rank = communicator.rank
        begin = (lambda c, _: c.all_reduce(torch.ones(77), SUM)) if rank == 2 else CALLS[name]
        with pytest.raises(MismatchError) as caught:
            then_barrier(begin(collectives, rank), communicator)
        have_failed.wait(60)
        return str(caught.value)

    for text in run_ranks(WORLD, body):
        assert "all_reduce of 77 x float32" in text


SIZES: dict[str, Begin] = {
    "gather": lambda c, rank: c.gather(parts(3 + rank // 3) if rank == ROOT else None, torch.ones(3 + rank // 3), ROOT),
    "scatter": lambda c, rank: c.scatter(torch.ones(3 + rank // 3), parts() if rank == ROOT else None, ROOT),
    "type": lambda c, rank: c.gather(
        parts() if rank == ROOT else None, torch.ones(3, dtype=torch.int32 if rank == 3 else torch.float32), ROOT
    ),
    "root": lambda c, rank: c.gather(parts() if rank in {ROOT, 2} else None, torch.ones(3), ROOT + (rank >= 2)),
    "all_gather": lambda c, rank: c.all_gather(
        [torch.ones(k + rank // 3) for k in range(WORLD)], torch.ones(rank + rank // 3)
    ),
    "all_to_all": lambda c, rank: c.all_to_all(
        [torch.ones(4 + (rank == 2 and k == 3)) for k in range(WORLD)], [torch.ones(4) for k in range(WORLD)]
    ),
    "nothing expected": lambda c, rank: c.all_to_all_single(
        torch.ones(WORLD - (rank == 2)),
        torch.ones(WORLD),
        [1, 1, 1, 0] if rank == 2 else [1] * WORLD,
        [1] * WORLD,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_do_not_fit_are_an_error_of_all(name: str, run_ranks: Any) -> None:
    have_failed = threading.Barrier(WORLD)

    def body(collectives: TensorCollectives, communicator: Any) -> str:
        with pytest.raises(MismatchError) as caught:
            then_barrier(SIZES[name](collectives, communicator.rank), communicator)
        have_failed.wait(60)
        return str(caught.value)

    texts = run_ranks(WORLD, body)
    if name in {"all_to_all", "nothing expected"}:
        assert all("rank 3 (host memory) and rank 2 (host memory) disagree on how many bytes" in text for text in texts)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_monitored_barrier_names_all_that_are_missing(wait_all_ranks: bool, run_ranks: Any) -> None:
    have_failed = threading.Barrier(WORLD)

    def body(collectives: TensorCollectives, communicator: Any) -> str:
        if communicator.rank in {2, 3}:
            have_failed.wait(60)
            return ""
        with pytest.raises(DeadlineError) as caught:
            collectives.monitored_barrier(wait_all_ranks=wait_all_ranks, timeout_s=0.5).wait()
        have_failed.wait(60)
        return str(caught.value)

    root, present, *_ = run_ranks(WORLD, body)
    for text in (root, present):
        assert "rank 2 (host memory) sent nothing of monitored_barrier" in text
        assert "rank 3 (host memory) sent nothing of monitored_barrier" in text
        assert "rank 1 (host memory) sent" not in text


@pytest.mark.parametrize("name", [name for name in CALLS if name != "monitored_barrier"])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(name: str, run_ranks: Any) -> None:
    have_failed = threading.Barrier(WORLD)
    absent = ROOT if name in {"gather", "scatter", "broadcast"} else 2

    def body(collectives: TensorCollectives, communicator: Any) -> str:
        if communicator.rank == absent:
            have_failed.wait(60)
            return ""
        with pytest.raises(DeadlineError) as caught:
            then_barrier(CALLS[name](collectives, communicator.rank), communicator)
        have_failed.wait(60)
        return str(caught.value)

    texts = run_ranks(WORLD, body, timeout_s=0.5)
    assert all(f"rank {absent} (host memory)" in text for rank, text in enumerate(texts) if rank != absent)


def test_a_short_wait_leaves_the_call_under_way(run_ranks: Any) -> None:
    may_come = threading.Event()

    def body(collectives: TensorCollectives, communicator: Any) -> float:
        output = torch.zeros(1)
        if communicator.rank == 0:
            assert may_come.wait(60)
        work = collectives.scatter(output, parts(1) if communicator.rank == 0 else None, 0)
        if communicator.rank == 1:
            with pytest.raises(DeadlineError, match="still under way"):
                work.wait(0.01)
            may_come.set()
        work.wait()
        return output.item()

    assert run_ranks(WORLD, body) == [1] * WORLD


def test_what_failed_stays_failed(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        with pytest.raises(MismatchError):
            collectives.all_reduce(torch.ones(communicator.rank + 1), SUM).wait()
        with pytest.raises(SynclineError):
            collectives.all_to_all_single(torch.ones(2), torch.ones(2)).wait()

    run_ranks(2, body)
