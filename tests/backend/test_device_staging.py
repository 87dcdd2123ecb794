"""Tensors of a device travel in chunks: to the bit as whole ones, in the same order on all ranks, and overlapped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_group_collectives import check_moves, check_reductions
from thread_groups import run_groups

from syncline.backend import group_state
from syncline.errors import (
    ConfigurationError,
    DeadlineError,
    FabricClosedError,
    MismatchError,
    PeerLostError,
    SynclineError,
)
from syncline.fabric.slice_executor import NUM_STREAMS
from syncline.schedule import PLANNERS, Collective, Schedule
from syncline.tensors import staging
from syncline.tensors.collectives import TensorCollectives
from syncline.tensors.device_copies import CopyKind
from syncline.tensors.staging import StagedCollectives, Staging
from syncline.topology import Topology
from thread_device import WAIT_S, ThreadDevice
from thread_fleets import run_fleets

WORLD = 3
SMALL_BLOCK = 4096
SUM = dist.ReduceOp.SUM
TO_HOST, TO_DEVICE = CopyKind.TO_HOST, CopyKind.TO_DEVICE
Body = Callable[[TensorCollectives, Any, ThreadDevice], Any]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr(staging, "MAX_BLOCKS", 3)


@contextmanager
def staged_on(communicator: Any, device: ThreadDevice) -> Iterator[TensorCollectives]:
    stage = Staging(communicator, device)
    try:
        yield TensorCollectives(communicator, staged=StagedCollectives(communicator, stage, stream=NUM_STREAMS - 2))
    finally:
        stage.close()
        device.stop()


def run_devices(world: int | Topology, body: Body, devices: list[ThreadDevice] | None = None, **options: Any) -> Any:
    """Run ``body`` on every rank, each with a device of its own."""

    def on_rank(fleet: Any) -> Any:
        device = devices[fleet.rank] if devices else ThreadDevice()
        with staged_on(fleet.communicator, device) as collectives:
            return body(collectives, fleet.communicator, device)

    return run_fleets(world, on_rank, **options)


def many(rank: int, num: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different sizes, whose sum depends on the order in which they are added."""
    numbers = torch.randn(num, generator=torch.Generator().manual_seed(rank))
    return (numbers * 10 ** (4 * torch.rand(num, generator=torch.Generator().manual_seed(100 + rank)))).to(dtype)


def ring(topology: Topology, collective: Collective, _: int, target: Any, root: int) -> Schedule:
    """Sums begin at another rank for each fifth of a slice, so bits tell which way an element took."""
    return PLANNERS["ring"].plan(topology, collective, target=target, root=root)


def test_elements_that_share_memory_are_written_as_one() -> None:
    def body(collectives: TensorCollectives, communicator: Any, _: ThreadDevice) -> None:
        summed, given = torch.ones(2, 1).expand(2, 900), torch.full((1,), float(communicator.rank)).expand(2000)
        collectives.all_reduce(summed, SUM).wait()
        collectives.broadcast(given, 1).wait()
        assert summed.eq(3).all()
        assert given.eq(1).all()

    run_devices(WORLD, body)


@pytest.mark.parametrize(
    ("topology", "options", "dtype"),
    [
        (Topology.flat(5), {"planner": ring, "slice_bytes": 1500}, torch.float32),
        (Topology.flat(5), {"planner": ring, "slice_bytes": 20_000}, torch.bfloat16),
        (Topology.load("two-racks-5-3"), {"slice_bytes": 3000}, torch.float32),
    ],
    ids=["small slices", "large slices", "planned"],
)
def test_results_are_to_the_bit_those_of_whole_tensors(
    topology: Topology, options: dict[str, Any], dtype: torch.dtype
) -> None:
    world = topology.num_ranks
    num = 1543 * world

    def body(collectives: TensorCollectives, communicator: Any, device: ThreadDevice) -> None:
        rank = communicator.rank
        host = TensorCollectives(communicator)
        for op in (SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist._make_nccl_premul_sum(0.3)):
            expected, tensor = many(rank, num, dtype), many(rank, num, dtype)
            host.all_reduce(expected, op).wait()
            collectives.all_reduce(tensor, op).wait()
            assert torch.equal(tensor, expected)
            source = many(rank, num, dtype)
            expected, part = torch.empty(num // world, dtype=dtype), torch.empty(num // world, dtype=dtype)
            host.reduce_scatter_single(expected, source, op).wait()
            collectives.reduce_scatter_single(part, source, op).wait()
            assert torch.equal(part, expected)
            assert torch.equal(source, many(rank, num, dtype))
        whole = torch.empty(world * num, dtype=dtype)
        collectives.all_gather_single(whole, many(rank, num, dtype)).wait()
        assert torch.equal(whole, torch.cat([many(k, num, dtype) for k in range(world)]))
        tensor = many(rank, num, dtype)
        collectives.broadcast(tensor, 2).wait()
        assert torch.equal(tensor, many(2, num, dtype))
        assert device.num_copied[TO_HOST] > 4 * num * dtype.itemsize // SMALL_BLOCK
        assert len(device.blocks) <= 3

    run_devices(topology, body, **options)


def test_every_type_shape_and_reduction() -> None:
    def body(collectives: TensorCollectives, communicator: Any, device: ThreadDevice) -> int:
        for op, dtype in (("SUM", torch.int8), ("AVG", torch.float64), ("BXOR", torch.int16), ("SUM", torch.bool)):
            check_reductions(collectives, communicator.rank, op, dtype)
        for shape in ((), (0,), (2, 3)):
            check_moves(collectives, communicator.rank, torch.complex64, shape)
        return device.num_copied[TO_HOST]

    assert all(run_devices(WORLD, body))


def test_tensors_that_are_strided_or_conjugates() -> None:
    def body(collectives: TensorCollectives, communicator: Any, _: ThreadDevice) -> None:
        rank = communicator.rank
        memory = torch.full((60, 60), rank + 1.0)
        collectives.all_reduce(memory.t()[:, ::2], SUM).wait()
        assert memory.eq(6).sum() == memory.eq(rank + 1).sum() == 1800
        conjugate = torch.full((2,), complex(1, rank + 1)).conj()
        collectives.all_reduce(conjugate, SUM).wait()
        assert conjugate.tolist() == [3 - 6j, 3 - 6j]
        collectives.broadcast(conjugate if rank else conjugate.imag.new_zeros(2).to(torch.complex64), 0).wait()
        assert not conjugate.any() or rank == 0
        whole = torch.zeros(9, 4)[:, ::2]
        collectives.all_gather_single(whole, torch.full((4, 3), float(rank)).t()[:, ::2]).wait()
        assert whole.sum(1).tolist() == [0, 0, 0, 2, 2, 2, 4, 4, 4]
        part = torch.zeros(4, 3).t()[:, ::2]
        collectives.reduce_scatter_single(part, torch.ones(9, 4)[:, ::2], SUM).wait()
        assert part.eq(3).all()

    run_devices(WORLD, body)


def test_tensors_of_autograd_and_of_an_inference() -> None:
    """Threads copy them where no inference goes on."""

    def body(collectives: TensorCollectives, _: Any, __: ThreadDevice) -> None:
        leaf = torch.ones(3, requires_grad=True)
        collectives.all_reduce(leaf, dist.ReduceOp.AVG).wait()
        assert leaf.requires_grad
        with torch.inference_mode():
            whole, row, part = torch.ones(3), torch.ones(3, 2)[:, 0], torch.zeros(1)
            works = [
                collectives.all_reduce(whole, SUM),
                collectives.broadcast(row, 1),
                collectives.reduce_scatter_single(part, torch.ones(3), SUM),
            ]
        for work in works:
            work.wait()
        assert [*whole.tolist(), *row.tolist(), *part.tolist()] == [3, 3, 3, 1, 1, 1, 3]

    run_devices(WORLD, body)


@pytest.mark.parametrize("is_own", [True, False])
def test_inputs_and_outputs_that_share_memory(*, is_own: bool) -> None:
    """The own part, or a range across two parts, which results of early chunks would overwrite before it is read."""
    num = 3 * SMALL_BLOCK // 4

    def body(collectives: TensorCollectives, communicator: Any, _: ThreadDevice) -> None:
        rank = communicator.rank
        place = rank * num if is_own else num // 2
        whole = torch.zeros(WORLD * num)
        own = whole[place : place + num].copy_(many(rank, num, torch.float32))
        collectives.all_gather_single(whole, own).wait()
        assert torch.equal(whole, torch.cat([many(k, num, torch.float32) for k in range(WORLD)]))
        source = torch.arange(float(WORLD * num))
        collectives.reduce_scatter_single(source[place : place + num], source, SUM).wait()
        assert torch.equal(source[place : place + num], WORLD * torch.arange(float(num)) + WORLD * rank * num)

    run_devices(WORLD, body)


def test_later_chunks_are_copied_while_the_first_is_under_way() -> None:
    """Rank 1 makes no call before rank 0 has copied as many chunks as it has memory for; none can be over then."""
    devices = [ThreadDevice(), ThreadDevice()]

    def body(collectives: TensorCollectives, communicator: Any, device: ThreadDevice) -> None:
        tensor = torch.ones(5 * SMALL_BLOCK // 4)
        if communicator.rank == 0:
            work = collectives.all_reduce(tensor, SUM)
            device.wait_until_copied(TO_HOST, 3)
            assert (device.num_queued[TO_HOST], device.num_queued[TO_DEVICE]) == (3, 0)
            assert not work.done()
            communicator.barrier().wait()
        else:
            communicator.barrier().wait()
            work = collectives.all_reduce(tensor, SUM)
        work.wait()
        assert tensor.eq(2).all()
        assert device.num_copied == {TO_HOST: 5, TO_DEVICE: 5}

    run_devices(2, body, devices)


def test_copies_that_differ_in_time_do_not_change_the_order_of_calls() -> None:
    """Between begin and copy of rank 0's tensor, both ranks make and end other calls; rank 1 has sent all it can."""
    devices = [ThreadDevice(held=[TO_HOST]), ThreadDevice()]

    def body(collectives: TensorCollectives, communicator: Any, device: ThreadDevice) -> None:
        host = TensorCollectives(communicator)
        tensors = [torch.full((3 * SMALL_BLOCK // 4,), float(k)) for k in range(3)]
        works = [collectives.all_reduce(tensor, SUM) for tensor in tensors]
        others = [torch.ones(5000), torch.ones(5000)]
        for other in others:
            host.all_reduce(other, SUM).wait()
            assert other.eq(2).all()
        assert not any(work.done() for work in works)
        communicator.barrier().wait()
        device.let_go(TO_HOST)
        for k, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            assert tensor.eq(2 * k).all()

    run_devices(2, body, devices)


def test_nobody_waits_for_the_users_stream() -> None:
    """What it has not made yet is not copied, and meanwhile other calls go on."""

    def body(collectives: TensorCollectives, communicator: Any, device: ThreadDevice) -> None:
        tensor = torch.zeros(10)
        device.user_stream.clear()
        work = collectives.all_reduce(tensor, SUM)
        device.wait_until_queued(TO_HOST, 1)
        communicator.barrier().wait()
        tensor.fill_(3)  # what the user's stream does before its mark
        device.user_stream.set()
        work.wait()
        assert tensor.eq(6).all()

    run_devices(2, body)


def test_a_wait_ends_before_the_last_copy_and_orders_the_current_stream_behind_it() -> None:
    devices = [ThreadDevice(held=[TO_DEVICE], is_lazy=True) for _ in range(2)]

    def body(collectives: TensorCollectives, _: Any, device: ThreadDevice) -> None:
        tensor = torch.ones(2 * SMALL_BLOCK // 4)
        work = collectives.all_reduce(tensor, SUM)
        work.wait()
        assert work.done()
        assert tensor.eq(1).all(), "the copies are queued, and not made"
        device.let_go(TO_DEVICE)
        device.synchronize()
        assert tensor.eq(2).all()

    run_devices(2, body, devices)


def test_calls_of_many_threads_in_one_order() -> None:
    """Many calls at once need more memory than there is, and all end."""

    def body(collectives: TensorCollectives, _: Any, __: ThreadDevice) -> None:
        tensors = [torch.full((2000 + 50 * k,), float(k)) for k in range(20)]
        works = [collectives.all_reduce(tensor, SUM) for tensor in tensors]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda work: work.wait(), works))
        assert all(tensor.eq(WORLD * k).all() for k, tensor in enumerate(tensors))

    run_devices(WORLD, body)


def test_calls_that_differ_are_an_error() -> None:
    def body(collectives: TensorCollectives, communicator: Any, _: ThreadDevice) -> str:
        tensor = torch.ones(5000 + communicator.rank)
        with pytest.raises(SynclineError) as caught:
            collectives.all_reduce(tensor, SUM).wait(WAIT_S)
        assert isinstance(caught.value, MismatchError)
        return str(caught.value)

    assert all("all_reduce" in text for text in run_devices(2, body))


def test_a_lost_rank_reaches_waits_and_futures(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left: no thread of staging, no memory that is kept."""
    devices: list[ThreadDevice] = []

    def make() -> ThreadDevice:
        devices.append(ThreadDevice())
        return devices[-1]

    monkeypatch.setattr(group_state, "CudaCopier", make)
    have_ended = threading.Barrier(WORLD)

    def body(group: Any) -> None:
        tensor = torch.ones(5000)
        group.allreduce([tensor]).wait()
        assert group.allreduce([tensor]).get_future().wait()[0].eq(9).all()
        have_ended.wait(WAIT_S)
        if group.rank() == 2:
            group.abort()
            return
        work = group.allreduce([torch.ones(100_000)])
        future = work.get_future()
        with pytest.raises(PeerLostError, match="rank 2"):
            work.wait()
        with pytest.raises(RuntimeError, match="PeerLostError: rank 2"):
            future.wait()

    run_groups(WORLD, body)
    for device in devices:
        assert device.num_copied[TO_HOST] >= 10
        device.stop()
    left = [thread.name for thread in threading.enumerate()]
    assert not [name for name in left if name in {"syncline-to-host", "syncline-to-device"}]


def test_a_copy_that_fails_ends_its_call_and_later_ones_on_all_ranks() -> None:
    devices = [ThreadDevice() for _ in range(2)]
    devices[1].error = RuntimeError("an illegal memory access was encountered")

    def body(collectives: TensorCollectives, communicator: Any, _: ThreadDevice) -> None:
        if communicator.rank == 0:
            with pytest.raises(PeerLostError, match=r"rank 1 .* gave up: its device failed: an illegal memory access"):
                collectives.all_reduce(torch.ones(5000), SUM).wait(WAIT_S)
            return
        with pytest.raises(RuntimeError, match="illegal memory access"):
            collectives.all_reduce(torch.ones(5000), SUM).wait()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            collectives.broadcast(torch.ones(1), 0)

    run_devices(2, body, devices)


def test_a_deadline_that_is_over_is_refused_and_spoils_nothing() -> None:
    def body(collectives: TensorCollectives, _: Any, __: ThreadDevice) -> None:
        tensor = torch.ones(1)
        with pytest.raises(ConfigurationError, match="a deadline lies in the future"):
            collectives.all_reduce(tensor, SUM, timeout_s=-1.0)
        collectives.all_reduce(tensor, SUM).wait()
        assert tensor.item() == 2

    run_devices(2, body)


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    def body(collectives: TensorCollectives, communicator: Any, _: ThreadDevice) -> None:
        if communicator.rank == 0:
            with pytest.raises(DeadlineError, match="rank 1"):
                collectives.all_reduce(torch.ones(5000), SUM, timeout_s=0.2).wait()
            ended.set()
        assert ended.wait(WAIT_S)

    ended = threading.Event()
    run_devices(2, body)


def test_a_close_ends_what_is_under_way() -> None:
    devices = [ThreadDevice(held=[TO_HOST]) for _ in range(2)]
    works = []

    def body(collectives: TensorCollectives, communicator: Any, device: ThreadDevice) -> None:
        works.append(collectives.all_reduce(torch.ones(50_000), SUM))
        device.wait_until_queued(TO_HOST, 3)
        communicator.barrier().wait()
        threading.Timer(0, device.let_go, [TO_HOST]).start()

    run_devices(2, body, devices)
    for work in works:
        with pytest.raises(FabricClosedError):
            work.wait()
