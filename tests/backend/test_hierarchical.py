"""All-reduces in two layers: the sums are right, the network carries each host's bytes once, and nobody hangs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_devices import GlooBackend, StuckGroup, run_hosts

from syncline.backend import hierarchical
from syncline.backend.creation import SynclineProcessGroup
from syncline.backend.group_state import GroupState
from syncline.errors import ConfigurationError, DeadlineError, FabricError, MismatchError, PeerLostError, SynclineError
from thread_device import WAIT_S

PAIRS = ("a", "a", "b", "b")
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def all_reduce(state: GroupState, tensor: torch.Tensor, op: Any = SUM, **settings: Any) -> Any:
    return state.collectives.all_reduce(tensor, op, **settings)


def sent_bytes(state: GroupState, peers: Sequence[int]) -> int:
    connections = state.communicator.statistics().fabric.connections
    return sum(one.sent_bytes for one in connections if one.peer in peers)


@pytest.mark.parametrize("hosts", [PAIRS, ("a", "b", "a", "b", "a", "b"), ("a", "a", "b", "b", "c", "c"), ("a", "a")])
def test_results_of_every_reduction_shape_and_type(hosts: tuple[str, ...]) -> None:
    world = len(hosts)

    def body(state: GroupState, inner: GlooBackend) -> None:
        rank = inner.rank
        ranks = torch.arange(1.0, world + 1)
        expected = {
            SUM: ranks.sum(),
            AVG: ranks.mean(),
            dist.ReduceOp.MAX: ranks.max(),
            dist.ReduceOp.MIN: ranks.min(),
            dist.ReduceOp.PRODUCT: ranks.prod(),
        }
        for op, value in expected.items():
            for dtype in (torch.float32, torch.float64, torch.int32):
                for shape in ((), (1,), (7, 3), (5000,)):
                    tensor = torch.full(shape, rank + 1.0).to(dtype)
                    all_reduce(state, tensor, op).wait()
                    assert torch.equal(tensor, value.to(dtype).expand(shape))
        tensor = torch.full((9,), rank + 1.0, dtype=torch.bfloat16)
        all_reduce(state, tensor, dist._make_nccl_premul_sum(0.5)).wait()
        assert tensor.eq(ranks.sum() / 2).all()
        memory = torch.full((6, 6), rank + 1.0)
        all_reduce(state, memory.t()[:, ::2]).wait()
        assert memory.eq(ranks.sum()).sum() == memory.eq(rank + 1).sum() == 18
        assert len(inner.opened) == 2

    run_hosts(hosts, body)


def test_all_ranks_have_the_same_bits() -> None:
    def body(state: GroupState, inner: GlooBackend) -> torch.Tensor:
        generator = torch.Generator().manual_seed(inner.rank)
        tensor = torch.randn(30_001, generator=generator) * 10 ** (4 * torch.rand(30_001, generator=generator))
        all_reduce(state, tensor).wait()
        return tensor

    first, *others = run_hosts(PAIRS, body)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("devices", "share"), [(None, 0.5), (("0", "0", "0", "0"), None)])
def test_each_rank_sends_the_other_host_its_part_alone(devices: tuple[str, ...] | None, share: float | None) -> None:
    """Of two ranks on each host, half of the tensor; and nothing but announcements within the host."""
    num_bytes = 4 << 20
    slack = 8192

    def body(state: GroupState, inner: GlooBackend) -> None:
        tensor = torch.ones(num_bytes // 4)
        all_reduce(state, tensor).wait()
        assert tensor.eq(4).all()
        state.communicator.barrier().wait()
        mate = inner.rank ^ 1
        far = sent_bytes(state, [peer for peer in range(4) if peer not in (inner.rank, mate)])
        near = sent_bytes(state, [mate])
        if share is None:
            assert not inner.opened
            assert far + near > num_bytes
        else:
            assert share * num_bytes <= far < share * num_bytes + slack
            assert near < slack

    run_hosts(PAIRS, body, devices=devices)


@pytest.mark.parametrize(
    ("hosts", "devices"),
    [
        (("a", "a", "b"), None),
        (("a", "b", "c"), None),
        (("a", "a", "b", "b"), ("0", "1", "0", "")),
        (("a", "a", "b", "b"), ("0", "1", "0", "0")),
    ],
    ids=["unequal hosts", "one device each", "none", "shared"],
)
def test_other_groups_go_by_the_hosts_memory(hosts: tuple[str, ...], devices: tuple[str, ...] | None) -> None:
    def body(state: GroupState, inner: GlooBackend) -> None:
        for _ in range(2):
            tensor = torch.ones(5000)
            all_reduce(state, tensor).wait()
            assert tensor.eq(len(hosts)).all()
        assert not inner.opened

    run_hosts(hosts, body, devices=devices)


def test_what_devices_cannot_add_goes_by_the_hosts_memory() -> None:
    def body(state: GroupState, inner: GlooBackend) -> None:
        tensor = torch.tensor([complex(1, inner.rank)])
        all_reduce(state, tensor).wait()
        assert tensor.item() == complex(4, 6)
        bits = torch.tensor([1 << inner.rank])
        all_reduce(state, bits, dist.ReduceOp.BXOR).wait()
        assert bits.item() == 15
        all_reduce(state, torch.ones(0)).wait()
        assert not inner.opened

    run_hosts(PAIRS, body)


def test_many_calls_at_once_waited_for_in_any_order() -> None:
    def body(state: GroupState, _: GlooBackend) -> None:
        tensors = [torch.full((2000 + 50 * k,), float(k)) for k in range(20)]
        works = [all_reduce(state, tensor) for tensor in tensors]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda work: work.wait(), reversed(works)))
        assert all(tensor.eq(4 * k).all() for k, tensor in enumerate(tensors))

    run_hosts(PAIRS, body)


def test_a_future_holds_the_result_and_is_completed_aside_of_the_users_stream() -> None:
    def body(state: GroupState, inner: GlooBackend) -> None:
        group = SynclineProcessGroup(state)
        group.allreduce([torch.ones(10)]).wait()
        num_aside = inner.device.num_aside
        future = group.allreduce([torch.full((10,), inner.rank + 1.0)]).get_future()
        assert future.wait()[0].tolist() == [10.0] * 10
        assert inner.device.num_aside == num_aside + 3, "once for each step within the host, once for the future"

    run_hosts(PAIRS, body)


def test_a_group_of_some_ranks_has_layers_of_its_own() -> None:
    hosts = ("a", "a", "b", "b", "b", "c")

    def body(state: GroupState, inner: GlooBackend) -> None:
        whole = torch.ones(10)
        all_reduce(state, whole).wait()
        assert whole.eq(6).all()
        ranks = [0, 1, 3, 4]
        if inner.rank in ranks:
            assert state.streams is not None
            streams = state.streams.take(ranks, rank=inner.rank, timeout_s=WAIT_S, is_lost=state.communicator.is_lost)
            part = GroupState(
                state.communicator.open_group(ranks, streams=streams),
                message_stream=streams[-1],
                staging_stream=streams[-2],
                timeout_s=WAIT_S,
                store=state.store,
                copier=state._staging.copier,
                inner=inner,
                world=state,
            )
            tensor = torch.full((10,), float(inner.rank))
            all_reduce(part, tensor).wait()
            assert tensor.eq(8).all()
            assert len(inner.opened) == 2
            part.close()
        state.communicator.barrier().wait()

    run_hosts(hosts, body)


def test_calls_that_differ_on_one_host_are_an_error_on_all() -> None:
    def body(state: GroupState, inner: GlooBackend) -> BaseException:
        tensor = torch.ones(5000 + (inner.rank == 1))
        with pytest.raises(SynclineError) as caught:
            all_reduce(state, tensor).wait(WAIT_S)
        return caught.value

    errors = run_hosts(PAIRS, body)
    assert all(isinstance(error, MismatchError) for error in errors[:2])
    assert all("5000 x float32" in str(error) and "5001 x float32" in str(error) for error in errors)


def test_a_rank_that_is_lost_is_named_on_all() -> None:
    have_ended = threading.Barrier(4)

    def body(state: GroupState, inner: GlooBackend) -> None:
        all_reduce(state, torch.ones(10)).wait()
        have_ended.wait(WAIT_S)
        if inner.rank == 3:
            state.close(is_failing=True)
            return
        with pytest.raises(PeerLostError, match="rank 3"):
            all_reduce(state, torch.ones(100_000)).wait(WAIT_S)
        with pytest.raises(PeerLostError, match="rank 3"):
            all_reduce(state, torch.ones(1)).wait(WAIT_S)

    run_hosts(PAIRS, body)


class BusyBackend(GlooBackend):
    """After each reduce-scatter, the user's stream has much to do."""

    def open(self, store: Any, *, rank: int, size: int, timeout_s: float) -> Any:
        group = super().open(store, rank=rank, size=size, timeout_s=timeout_s)
        scatter = group.reduce_scatter

        def scatter_and_compute(*given: Any) -> None:
            scatter(*given)
            self.device.user_stream.clear()

        group.reduce_scatter = scatter_and_compute
        return group


def test_what_the_users_stream_does_after_the_call_holds_nothing_up() -> None:
    def body(state: GroupState, _: GlooBackend) -> None:
        tensor = torch.ones(10)
        all_reduce(state, tensor).wait()
        assert tensor.eq(4).all()

    run_hosts(PAIRS, body, make=BusyBackend)


class StuckBackend(GlooBackend):
    """The devices of host b are stuck."""

    def open(self, store: Any, *, rank: int, size: int, timeout_s: float) -> Any:
        if self.place.host != "b":
            return super().open(store, rank=rank, size=size, timeout_s=timeout_s)
        self.opened.append(StuckGroup())
        return self.opened[-1]


def test_devices_that_wait_for_a_lost_rank_are_aborted() -> None:
    """Rank 3 dies after it came to the call, while rank 2's device waits for its own."""
    is_stuck = threading.Event()

    def body(state: GroupState, inner: GlooBackend) -> None:
        work = all_reduce(state, torch.ones(10))
        if inner.rank == 3:
            assert is_stuck.wait(WAIT_S)
            state.close(is_failing=True)
            return
        if inner.rank == 2:
            assert inner.opened[0].is_called.wait(WAIT_S)
            is_stuck.set()
        with pytest.raises(PeerLostError, match="rank 3"):
            work.wait(WAIT_S)
        if inner.rank == 2:
            assert inner.opened[0].is_aborted.wait(WAIT_S)

    run_hosts(PAIRS, body, make=StuckBackend)


def test_devices_that_do_not_end_are_named_at_the_deadline() -> None:
    def body(state: GroupState, inner: GlooBackend) -> None:
        named = r"ranks 2 and 3 \(host .*\) have all come to all_reduce, but .* did not end its reduce-scatter"
        state._layered._open(torch.device("cpu"))
        state.communicator.barrier().wait()  # so that no rank is late to the call because it opens groups
        with pytest.raises((DeadlineError, PeerLostError), match=named):
            all_reduce(state, torch.ones(10), timeout_s=2.0).wait(WAIT_S)
        if inner.place.host == "b":
            assert inner.opened[0].is_aborted.wait(WAIT_S)

    run_hosts(PAIRS, body, make=StuckBackend)


class BrokenBackend(StuckBackend):
    """The device of rank 2 fails, and that of rank 3 waits for it."""

    def open(self, store: Any, *, rank: int, size: int, timeout_s: float) -> Any:
        group = super().open(store, rank=rank, size=size, timeout_s=timeout_s)
        if self.rank == 2:

            def fail(*_: object) -> None:
                raise RuntimeError("an illegal memory access was encountered")

            group.reduce_scatter = fail
        return group


def test_a_device_that_fails_ends_the_call_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical, "LOSS_S", 0.0)

    def body(state: GroupState, inner: GlooBackend) -> BaseException:
        with pytest.raises(SynclineError) as caught:
            all_reduce(state, torch.ones(10)).wait(WAIT_S)
        with pytest.raises(SynclineError):
            state.communicator.barrier().wait(WAIT_S)
        return caught.value

    errors = run_hosts(PAIRS, body, make=BrokenBackend)
    assert type(errors[2]) is FabricError
    assert all("illegal memory access" in str(error) for error in errors)
    assert all("rank 2" in str(error) for error in errors if isinstance(error, PeerLostError))
    assert sum(isinstance(error, PeerLostError) for error in errors) == 3


class UnopenedBackend(GlooBackend):
    """Rank 3 cannot open its groups."""

    def open(self, store: Any, *, rank: int, size: int, timeout_s: float) -> Any:
        if self.rank == 3:
            raise RuntimeError("out of memory")
        return super().open(store, rank=rank, size=size, timeout_s=0.2)


def test_layers_that_one_rank_cannot_open_end_the_group() -> None:
    def body(state: GroupState, inner: GlooBackend) -> None:
        with pytest.raises((SynclineError, RuntimeError)):
            all_reduce(state, torch.ones(10)).wait(WAIT_S)
        with pytest.raises(SynclineError, match="could not be opened"):
            state.communicator.barrier().wait(WAIT_S)

    run_hosts(PAIRS, body, make=UnopenedBackend)


def test_bad_arguments_are_refused_and_spoil_nothing() -> None:
    def body(state: GroupState, _: GlooBackend) -> None:
        tensor = torch.ones(3)
        all_reduce(state, tensor).wait()
        with pytest.raises(ConfigurationError, match="a deadline lies in the future"):
            all_reduce(state, tensor, timeout_s=-1.0)
        with pytest.raises(ConfigurationError, match="on cpu, where its first one was, and this one is on meta"):
            state._layered.all_reduce(
                torch.ones(3, device="meta"), state.collectives._reduction(SUM, tensor), timeout_s=1
            )
        all_reduce(state, tensor).wait()
        assert tensor.eq(16).all()

    run_hosts(PAIRS, body)


def test_a_close_ends_what_is_under_way_and_leaves_no_thread() -> None:
    works = []

    def body(state: GroupState, inner: GlooBackend) -> None:
        works.append(all_reduce(state, torch.ones(10)))
        if inner.place.host == "b":
            assert inner.opened[0].is_called.wait(WAIT_S)
        state.communicator.barrier().wait()

    run_hosts(PAIRS, body, make=StuckBackend)
    for work in works:
        with pytest.raises(SynclineError, match="closed"):
            work.wait()
    names = {"syncline-scattering", "syncline-gathering"}
    assert not [thread.name for thread in threading.enumerate() if thread.name in names]
