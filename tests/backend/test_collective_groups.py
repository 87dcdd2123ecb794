"""The collectives of groups of some ranks, and which way their bytes take."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from small_racks import RACKS
from syncline.errors import PeerLostError
from syncline.fabric import MEMORY_CLASS
from syncline.runtime import Communicator
from syncline.runtime.shared_memory.opening import can_share
from syncline.tensors.collectives import TensorCollectives
from syncline.topology import Topology

SUM = dist.ReduceOp.SUM


def check_every_call(collectives: TensorCollectives, rank: int, members: tuple[int, ...]) -> None:
    """Make each call in a group; its ranks bring the job's number of theirs."""
    size, me, numbers = len(members), members[rank], [float(member) for member in members]
    tensor = torch.tensor([float(me)])
    collectives.all_reduce(tensor, SUM).wait()
    assert tensor.item() == sum(numbers)
    tensor = torch.tensor([float(me)])
    collectives.broadcast(tensor, size - 1).wait()
    assert tensor.item() == numbers[-1]
    outputs = [torch.zeros(k + 1) for k in range(size)]
    collectives.all_gather(outputs, torch.full((rank + 1,), float(me))).wait()
    assert [output.unique().item() for output in outputs] == numbers
    part = torch.zeros(rank)
    collectives.reduce_scatter(part, [torch.full((k,), float(me)) for k in range(size)], SUM).wait()
    assert part.tolist() == [sum(numbers)] * rank
    outputs = [torch.zeros(1) for _ in members]
    collectives.gather(outputs if rank == 0 else None, torch.tensor([float(me)]), 0).wait()
    assert rank or [output.item() for output in outputs] == numbers
    collectives.scatter(tensor, [torch.tensor([number]) for number in numbers] if rank == 0 else None, 0).wait()
    assert tensor.item() == me
    collectives.all_to_all(outputs, [torch.tensor([100.0 * me + number]) for number in numbers]).wait()
    assert [output.item() for output in outputs] == [100 * number + me for number in numbers]
    collectives.barrier().wait()
    collectives.monitored_barrier().wait()


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_overlap_and_groups_that_do_not(seed: int, run_ranks: Any) -> None:
    groups = [(4, 0, 2), (1, 3, 5), (5, 4, 3, 2), (0, 1)]

    def body(collectives: TensorCollectives, communicator: Communicator) -> None:
        for number, members in enumerate(groups):
            if communicator.rank in members:
                with communicator.open_group(members, streams=range(40 + 4 * number, 44 + 4 * number)) as group:
                    check_every_call(TensorCollectives(group), group.rank, members)
            check_every_call(collectives, communicator.rank, tuple(range(6)))

    run_ranks(Topology.parse(RACKS), body, seed=seed)


def test_calls_of_several_groups_are_under_way_at_once(run_ranks: Any) -> None:
    """Two ranks make the calls of two groups and of all ranks in opposite order."""

    def body(collectives: TensorCollectives, communicator: Communicator) -> list[float]:
        groups = [communicator.open_group((0, 1), streams=range(8 + 4 * k, 12 + 4 * k)) for k in range(2)]
        users = [TensorCollectives(group) for group in groups] + [collectives]
        order = users if communicator.rank == 0 else users[::-1]
        outputs = {user: torch.zeros(2) for user in users}
        source = torch.full((2,), communicator.rank + 1.0)
        works = [user.all_to_all_single(outputs[user], source) for user in order]
        for work in works:
            work.wait()
        for group in groups:
            group.close()
        return torch.cat([outputs[user] for user in users]).tolist()

    assert run_ranks(2, body) == [[1, 2] * 3] * 2


def test_a_rank_that_a_group_loses_ends_only_what_needs_it(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Communicator) -> str:
        rank = communicator.rank
        if rank == 4:
            collectives.barrier().wait()
            communicator.abort()
            return ""
        members = (2, 3, 4) if rank >= 2 else (0, 1)
        group = communicator.open_group(members, streams=range(8 + 4 * (rank >= 2), 12 + 4 * (rank >= 2)))
        collectives.barrier().wait()
        output = torch.zeros(len(members))
        work = TensorCollectives(group).all_to_all_single(output, output)
        if rank < 2:
            work.wait()
            return "done"
        with pytest.raises(PeerLostError, match=r"rank 4 .*, during all_to_all") as caught:
            work.wait(30)
        return str(caught.value.rank)

    assert run_ranks(5, body) == ["done", "done", "4", "4", ""]


@pytest.mark.parametrize(
    "sizes", [(0, 0, 0, 0, 0, 0), (5, 0, 0, 0, 0, 0), (1, 0, 7, 0, 300_000, 2), (9, 8, 7, 6, 5, 4)]
)
def test_parts_of_any_size(sizes: tuple[int, ...], run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Communicator) -> None:
        rank = communicator.rank
        outputs = [torch.full((size,), -1.0) for size in sizes]
        collectives.all_gather(outputs, torch.full((sizes[rank],), float(rank))).wait()
        assert all(output.eq(k).all() for k, output in enumerate(outputs))
        part = torch.empty(sizes[rank])
        inputs = [torch.arange(size) * 1.0 + rank for size in sizes]
        collectives.reduce_scatter(part, inputs, dist.ReduceOp.AVG).wait()
        assert torch.allclose(part, torch.arange(sizes[rank]) + 2.5)
        assert torch.equal(inputs[0], torch.arange(sizes[0]) * 1.0 + rank), "the inputs stay as they are"

    run_ranks(Topology.parse(RACKS), body)


def test_unequal_parts_cross_slow_links_once(run_ranks: Any) -> None:
    """Into each rack goes what the other one has, once; of sums, what the other one owns."""
    sizes = (1000, 0, 300, 50_000, 7, 20_000)
    left, right = 4 * sum(sizes[:4]), 4 * sum(sizes[4:])

    def body(collectives: TensorCollectives, communicator: Communicator) -> list[Counter[str]]:
        own, counted = sizes[communicator.rank], [uplinks(communicator)]
        collectives.all_gather([torch.empty(size) for size in sizes], torch.ones(own)).wait()
        counted.append(uplinks(communicator))
        collectives.reduce_scatter(torch.empty(own), [torch.ones(size) for size in sizes], SUM).wait()
        counted.append(uplinks(communicator))
        return counted

    before, gathered, scattered = (
        sum(one, Counter()) for one in zip(*run_ranks(Topology.parse(RACKS), body), strict=True)
    )
    assert gathered - before == {"left": left, "right": right}
    assert scattered - gathered == {"left": right, "right": left}


def uplinks(communicator: Communicator) -> Counter[str]:
    """The bytes that this rank has sent out of each rack."""
    crossed = communicator.statistics().link_bytes
    return Counter(
        {
            link.child: size
            for link, size in crossed.items()
            if link.direction == "up" and link.child in {"left", "right"}
        }
    )


@pytest.mark.skipif(not can_share(2), reason="this platform has no segment")
def test_small_calls_that_are_awaited_are_made_in_shared_memory(run_ranks: Any) -> None:
    """All twenty of them, up to 64 KiB; and the engine makes what follows in the same order on all ranks."""

    def body(collectives: TensorCollectives, communicator: Communicator) -> tuple[Counter[str], int]:
        assert communicator.open_segment()
        rank, before = communicator.rank, messages(communicator)
        for num_bytes in (4, 1 << 10, 8 << 10, 64 << 10):
            tensor = torch.full((num_bytes // 4,), rank + 1.0)
            collectives.all_reduce(tensor, SUM, is_awaited=True).wait()
            assert tensor.eq(6).all()
            outputs = [torch.empty(num_bytes // 4 + k) for k in range(3)]
            collectives.all_gather(outputs, torch.full((num_bytes // 4 + rank,), float(rank)), is_awaited=True).wait()
            assert all(output.eq(k).all() for k, output in enumerate(outputs))
            part = torch.empty(num_bytes // 4 + rank)
            collectives.reduce_scatter(part, [torch.ones_like(one) for one in outputs], SUM, is_awaited=True).wait()
            assert part.eq(3).all()
            collectives.broadcast(tensor, 1, is_awaited=True).wait()
            collectives.barrier(is_awaited=True).wait()
        in_shared_memory = messages(communicator)
        collectives.all_to_all_single(torch.empty(3), torch.ones(3), is_awaited=True).wait()
        collectives.barrier(is_awaited=True).wait()
        return in_shared_memory - before, communicator.statistics().calls["all_to_all"]

    assert run_ranks(3, body) == [(Counter(shared=2 * 20), 1)] * 3


def messages(communicator: Communicator) -> Counter[str]:
    """How many messages of data have come to this rank, in shared memory and from the engines of others."""
    found: Counter[str] = Counter()
    for one in communicator.statistics().fabric.connections:
        found["shared" if one.connection_class == MEMORY_CLASS else "sent"] += one.received_messages
    return found
