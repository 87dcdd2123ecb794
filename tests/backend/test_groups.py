"""Groups whose ranks are threads: their futures, their timeouts, their streams, and how they end."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from thread_groups import run_groups
from torch.distributed import distributed_c10d as c10d

import syncline
from syncline.backend.call_work import CallWork
from syncline.backend.creation import SynclineProcessGroup as Group
from syncline.backend.group_state import open_part
from syncline.backend.group_streams import MAX_GROUPS, GroupStreams
from syncline.errors import ConfigurationError, DeadlineError, MismatchError, PeerLostError, RendezvousError
from syncline.observe import merge_traces
from syncline.pytorch.environment import BackendOptions
from syncline.tensors import memory


def test_a_work_is_over_however_it_is_asked() -> None:
    def body(group: Group) -> None:
        for ask in ("wait", "future", "poll"):
            tensor = torch.full((4,), 2.0)
            options = c10d.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.AVG
            work = group.allreduce([tensor], options)
            if ask == "wait":
                assert work.wait(timedelta(seconds=60))
            elif ask == "future":
                assert work.get_future().wait()[0] is tensor
                assert work.get_future() is work.get_future()
            else:
                group.barrier().wait()
                while not work.is_completed():
                    group.barrier().wait()
            assert work.is_success()
            assert work.exception() is None
            assert work.result()[0] is tensor
            assert tensor.tolist() == [2.0] * 4

    run_groups(2, body)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_ranks_meet_in_the_store_that_they_are_given_and_nowhere_else(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # an address of nobody's
    monkeypatch.setenv("MASTER_PORT", "1")
    if kind == "hash":
        stores: list[dist.Store] = [dist.HashStore()] * 2
    elif kind == "file":
        stores = [dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
    else:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = [served, dist.TCPStore("127.0.0.1", served.port, wait_for_workers=False)]

    def body(group: Group) -> list[float]:
        tensor = torch.full((2,), group.rank() + 1.0)
        group.allreduce([tensor]).wait()
        values: list[float] = tensor.tolist()
        return values

    assert run_groups(2, body, stores=stores) == [[3.0] * 2] * 2


def test_sparse_tensors_are_added() -> None:
    def body(group: Group) -> None:
        dense = torch.tensor([[[1.0, 0.0], [2.0, 3.0], [0.0, 0.0]], [[0.0, 0.0], [4.0, 0.0], [0.0, 0.0]]][group.rank()])
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            tensor, whole = dense.to_sparse(), dense.clone()
            options = c10d.AllreduceOptions()
            options.reduceOp = op
            works = [group.allreduce([one], options) for one in (tensor, whole)]
            for work in works:
                work.get_future().wait()
            assert torch.equal(tensor.to_dense(), whole)
        options.reduceOp = dist.ReduceOp.MAX
        with pytest.raises(ConfigurationError, match=r"summed or averaged, and not torch.sparse_coo with"):
            group.allreduce([dense.to_sparse()], options)

    run_groups(2, body)


def test_a_callback_of_a_future_may_make_a_call_and_wait_for_its_future() -> None:
    def body(group: Group) -> None:
        def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            (tensor,) = future.value()
            return group.allreduce([tensor]).get_future().wait()[0]

        first = group.allreduce([torch.ones(3)]).get_future().then(again)
        assert first.then(again_of(group)).wait().tolist() == [8.0] * 3

    run_groups(2, body)


def again_of(group: Group) -> object:
    def again(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        return group.allreduce([future.value()]).get_future().wait()[0]

    return again


def test_a_barrier_is_no_sum_of_a_byte() -> None:
    def body(group: Group) -> None:
        group.barrier().wait()
        call = group.barrier if group.rank() == 0 else lambda: group.allreduce([torch.ones(1, dtype=torch.uint8)])
        with pytest.raises(MismatchError, match="uint8 \\(barrier\\)"):
            call().wait()

    run_groups(3, body)


def test_calls_that_differ_fail_as_c_plus_plus_expects_on_all_ranks() -> None:
    def body(group: Group) -> None:
        work = group.allreduce([torch.ones(3 + group.rank())])
        with pytest.raises(RuntimeError, match="MismatchError"):
            work.get_future().wait()
        with pytest.raises(MismatchError):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), MismatchError)
        with pytest.raises(RuntimeError):
            dist._broadcast_coalesced(group, [torch.ones(2)], 100, 0)  # a caller in C++

    run_groups(2, body)


def test_a_group_whose_call_failed_is_freed_with_its_future() -> None:
    """What the group has, a store of torch's with its sockets, would else be there until the process ends."""
    have_begun = threading.Barrier(2)
    kept: list[weakref.ref[object]] = []

    def body(group: Group) -> None:
        if group.rank() == 1:
            have_begun.wait(60)
            group.abort()
            return
        work = group.allreduce([torch.ones(3)])
        future = work.get_future()
        have_begun.wait(60)
        with pytest.raises(RuntimeError, match="PeerLostError"):
            future.wait()
        assert isinstance(work.exception(), PeerLostError)
        kept.extend([weakref.ref(work), weakref.ref(group.state)])

    run_groups(2, body)
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_a_wait_that_ends_too_early_is_no_failure_of_the_call() -> None:
    has_waited = threading.Barrier(2)

    def body(group: Group) -> None:
        if group.rank() == 1:
            has_waited.wait(60)
        work = group.allreduce([torch.ones(3)])
        if group.rank() == 0:
            with pytest.raises(DeadlineError, match="it is still under way"):
                work.wait(timedelta(milliseconds=1))
            has_waited.wait(60)
        assert work.get_future().wait()[0].tolist() == [2.0] * 3
        assert work.is_success()

    run_groups(2, body)


def test_the_timeout_of_a_call_goes_before_that_of_the_group() -> None:
    def body(group: Group) -> None:
        if group.rank() == 1:
            is_late.wait(60)
            return
        options = c10d.BarrierOptions()
        options.timeout = timedelta(seconds=0.3)
        with pytest.raises(DeadlineError, match=r"rank 1 \(host h1\)"):
            group.barrier(options).wait()
        is_late.set()

    is_late = threading.Event()
    run_groups(2, body)


def test_a_timeout_that_is_set_counts_for_later_calls() -> None:
    def body(group: Group) -> None:
        group.set_timeout(timedelta(seconds=0.3))
        if group.rank() == 0:
            with pytest.raises(DeadlineError, match=r"\(deadline 0.3 s\)"):
                group.broadcast([torch.ones(1)]).wait()
            is_late.set()
        is_late.wait(60)

    is_late = threading.Event()
    run_groups(2, body)


def test_a_monitored_barrier_names_all_that_are_missing() -> None:
    def body(group: Group) -> None:
        group.monitored_barrier(timedelta(seconds=60))
        if group.rank() == 0:
            with pytest.raises(DeadlineError, match=r"rank 1 \(host h1\).*rank 2 \(host h2\)"):
                group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
            is_late.set()
        is_late.wait(60)

    is_late = threading.Event()
    run_groups(3, body)


def strided(value: float) -> torch.Tensor:
    """Numbers whose sum lands elsewhere, and is put in place when the call is ended."""
    return torch.full((4, 2), value)[:, 0]


def wait_for_barrier(group: Group, how: str) -> None:
    options = c10d.BarrierOptions()
    options.asyncOp = how == "async"
    if how == "monitored":
        group.monitored_barrier(timedelta(seconds=60))
    elif how == "future":
        group.barrier().get_future().wait()
    else:
        group.barrier(options).wait()


@pytest.mark.parametrize("how", ["awaited", "async", "future", "monitored"])
def test_a_barrier_joins_what_is_under_way_but_for_messages(how: str) -> None:
    def body(group: Group) -> None:
        receives = [group.recv([torch.empty(1)], 1 - group.rank(), tag) for tag in range(2)]
        for _ in range(3):
            tensors = [strided(float(number)) for number in range(16)]
            for tensor in tensors:
                group.allreduce([tensor])
            group.allreduce_coalesced([*(one := [strided(1.0), strided(2.0)])])
            wait_for_barrier(group, how)
            assert [tensor.unique().tolist() for tensor in tensors] == [[2.0 * number] for number in range(16)]
            assert [tensor.unique().tolist() for tensor in one] == [[2.0], [4.0]]
        assert not group.state.under_way.all()
        for tag, receive in enumerate(receives):
            group.send([torch.ones(1)], 1 - group.rank(), tag).wait()
            receive.wait()

    run_groups(2, body)


def test_calls_that_nobody_waits_for_are_ended_by_later_ones() -> None:
    def body(group: Group) -> None:
        tensor = strided(1.0)
        group.allreduce([tensor])
        (work,) = group.state.under_way.all()
        work.works[0].wait()
        group.allreduce([torch.ones(1)]).wait()
        assert tensor.tolist() == [2.0] * 4
        assert not group.state.under_way.all()

    run_groups(2, body)


def test_a_barrier_names_who_does_not_come_to_what_it_joins() -> None:
    def body(group: Group) -> None:
        if group.rank() == 1:
            is_late.wait(60)
            return
        options = c10d.BarrierOptions()
        options.timeout, options.asyncOp = timedelta(seconds=0.2), False
        work = group.allreduce([torch.ones(2)])
        with pytest.raises(DeadlineError, match=r"all_reduce was waited for but not done within 0.2 s"):
            group.barrier(options)
        assert not work.is_completed()
        is_late.set()

    is_late = threading.Event()
    run_groups(2, body)


def tensors_of(group: Group, *values: float) -> list[torch.Tensor]:
    return [torch.full((2,), float(value + group.rank())) for value in values]


def test_lists_of_tensors_mean_what_they_do_with_gloo() -> None:
    def body(group: Group) -> None:
        (same,) = tensors_of(group, 1)
        group.allreduce_coalesced([same, same]).wait()
        assert same.tolist() == [3.0] * 2
        row = torch.arange(3.0)
        group.allreduce_coalesced([row[:2], row[::2]]).wait()
        assert row.tolist() == [0, 2, 4]
        whole = torch.zeros(4)
        group.all_gather_single_coalesced([whole, whole], tensors_of(group, 1, 10)).wait()
        assert whole.tolist() == [10, 10, 11, 11]

    run_groups(2, body)


def test_lists_that_no_function_of_torchs_passes_are_refused_and_spoil_nothing() -> None:
    def body(group: Group) -> None:
        several = [torch.ones(2), torch.ones(2)]
        for name in ("allreduce", "allreduce_coalesced", "broadcast", "reduce"):
            with pytest.raises(ConfigurationError, match=f"{name} .*tensor"):
                getattr(group, name)([])
        for name in (
            "allgather",
            "allgather_coalesced",
            "all_gather_single_coalesced",
            "reduce_scatter",
            "reduce_scatter_single_coalesced",
            "gather",
            "scatter",
        ):
            with pytest.raises(ConfigurationError, match=f"{name} .*tensor"):
                getattr(group, name)([], [])
        for name in ("allreduce", "broadcast", "reduce"):
            with pytest.raises(ConfigurationError, match=f"{name} takes one tensor"):
                getattr(group, name)(several)
        with pytest.raises(ConfigurationError, match="reduce_scatter takes one tensor"):
            group.reduce_scatter(several, [several, several])
        with pytest.raises(ConfigurationError, match="allgather takes one tensor"):
            group.allgather([several, several], several)
        with pytest.raises(ConfigurationError, match="allgather takes one list of tensors"):
            group.allgather([several, several], [several[0]])
        for kind, name in ((c10d.BroadcastOptions, "broadcast"), (c10d.ReduceOptions, "reduce")):
            rooted = kind()
            rooted.rootTensor = 1
            with pytest.raises(ConfigurationError, match="rootTensor"):
                getattr(group, name)([torch.ones(1)], rooted)
        if group.rank() == 1:
            with pytest.raises(ConfigurationError, match="rank 0 alone gives a gather_list"):
                group.gather([several], [torch.ones(2)])
            with pytest.raises(ConfigurationError, match="rank 0 alone gives a scatter_list"):
                group.scatter([torch.ones(2)], [several])
        group.allreduce([several[0]]).wait()
        assert several[0].tolist() == [2.0] * 2

    run_groups(2, body)


def test_calls_between_marks_are_over_together() -> None:
    def body(group: Group) -> None:
        group._set_sequence_number_for_group()
        tensors = [torch.ones(2), torch.ones(3)]
        group._start_coalescing(torch.device("cpu"))
        for tensor in tensors:
            group.allreduce([tensor])
        assert group._end_coalescing(torch.device("cpu")).wait()
        assert [tensor.tolist() for tensor in tensors] == [[2.0] * 2, [2.0] * 3]
        assert group._get_sequence_number_for_group() == 2

    run_groups(2, body)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_group_that_ended_ends_what_is_under_way_and_later_calls(*, is_aborted: bool) -> None:
    def body(group: Group) -> CallWork | None:
        if group.rank() == 1:
            group.barrier().wait()
            return None
        group.barrier().wait()
        work = group.recv([torch.ones(3)], 1, 0)
        future = work.get_future()
        (group.abort if is_aborted else group.shutdown)()
        group.shutdown()
        with pytest.raises(RuntimeError):
            future.wait()
        with pytest.raises(RuntimeError, match=r"closed|stopped"):
            group.allreduce([torch.ones(1)]).wait()
        return work

    run_groups(2, body)


def test_groups_of_a_world_keep_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call needs beside its tensors is kept for the next one, also of another group."""
    allocated_bytes: list[int] = []
    allocate = memory._empty

    def count(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        allocated_bytes.append(num_elements * dtype.itemsize)
        return allocate(num_elements, dtype)

    monkeypatch.setattr(memory, "_empty", count)

    def body(group: Group) -> None:
        world = group.state
        parts = [open_part(world, [0, 1], world.store, 60.0) for _ in range(3)]
        for state in (world, *parts, *parts):
            output = torch.empty(50_000)
            state.collectives.reduce_scatter_single(output, torch.ones(100_000), dist.ReduceOp.SUM).wait()
            assert output.eq(2).all()

    run_groups(2, body)
    assert allocated_bytes == [400_000] * 2, "once on each rank"


def test_only_the_members_of_a_group_agree_on_its_streams() -> None:
    store = dist.HashStore()
    worlds = [GroupStreams(store, token="a") for _ in range(3)]

    def take(rank: int, *ranks: int) -> range:
        return worlds[rank].take(ranks, rank=rank, timeout_s=60.0, is_lost=lambda _: False)

    assert take(0, 0, 1) == range(4, 8)
    assert take(2, 2) == range(8, 12)
    assert take(1, 0, 1) == range(4, 8)
    assert take(0, 0, 1) == range(12, 16), "the next group of the same ranks"
    assert take(1, 0, 1) == range(12, 16)
    purpose = worlds[0].take((0, 1), rank=0, timeout_s=60.0, is_lost=lambda _: False, purpose="other")
    assert purpose == range(16, 20)
    assert take(0, 0, 1) == take(1, 0, 1) == range(20, 24), "what another purpose took is nobody else's"
    parts = [worlds[0].open_store(purpose, name) for name in ("one", "two")]
    parts[0].set("key", "value")
    assert not parts[1].check(["key"])
    assert worlds[1].open_store(purpose, "one").get("key") == b"value"
    later = GroupStreams(store, token="b")
    with pytest.raises(RendezvousError, match="rank 0, the first of a new group"):
        later.take((0, 1), rank=1, timeout_s=0.01, is_lost=lambda _: False)
    with pytest.raises(PeerLostError, match="rank 0, the first of a new group, is lost"):
        later.take((0, 1), rank=1, timeout_s=60.0, is_lost=lambda rank: rank == 0)
    store.add("syncline/a/groups", MAX_GROUPS)
    with pytest.raises(ConfigurationError, match=f"streams for {MAX_GROUPS}"):
        take(0, 0)


def test_calls_steps_and_waits_of_a_group_are_spans(tmp_path: Path) -> None:
    options = BackendOptions(trace=tmp_path)

    def body(group: Group) -> float:
        weight = torch.nn.Parameter(torch.ones(2, 3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        held = []

        def reduce(gradient: torch.Tensor) -> None:  # as DistributedDataParallel does, whose wait is in C++
            asked = c10d.AllreduceOptions()
            asked.asyncOp = True
            held.append(group.allreduce([gradient.clone()], asked).get_future())

        weight.register_hook(reduce)
        weight.sum().backward()
        held[0].wait()
        optimizer.step()
        group.barrier().wait()
        assert json.dumps(syncline.metrics())
        return group.state.communicator.progress.num_steps

    assert min(run_groups(2, body, options=options)) >= 1  # the ranks are threads, whose optimizers count for both
    for rank in range(2):
        merge_traces([tmp_path / f"trace-{rank}.json"], tmp_path / "whole.json")
        events = json.loads((tmp_path / "whole.json").read_text())["traceEvents"]
        spans = {(event["cat"], event["name"]) for event in events if event["ph"] == "X"}
        assert {("call", "all_reduce [2,3] float32"), ("call", "barrier")} <= spans
        assert {("compute", "backward"), ("compute", "step"), ("step", "step 1")} <= spans
        told = {event["name"] for event in events if event["ph"] == "i"}
        assert told <= {"peer left"}, "an orderly end is no loss"
