"""One rank as a process of its own, whose groups are Syncline's: what the tests of the backend start."""

from __future__ import annotations

import copy
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.backend.calls import GroupCalls
from syncline.fabric.frames import MEMORY_CLASS
from syncline.runtime.shared_memory.opening import can_share

gather_all = getattr(functional, "all_gather_single", functional.all_gather_tensor)  # from PyTorch 2.13 on
reduce_parts = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 4
TIMEOUT = timedelta(seconds=100)


class Forked(nn.Module):
    """Uses one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, batch: torch.Tensor, branch: int = 0) -> torch.Tensor:
        return self.last(torch.tanh((self.first, self.second)[branch](batch)))


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, branch: Callable[[int], int] = lambda _: 0) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(RANK, step), branch(step)).square().mean().backward()
        optimizer.step()


def reference(model: nn.Module, make: Callable[..., torch.optim.Optimizer], branch: Callable[[int], int]) -> None:
    """Train on the batches of all ranks at once."""
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(batch_of(rank, step), branch(step)).square().mean() for rank in range(WORLD_SIZE)]
        (sum(losses) / WORLD_SIZE).backward()
        optimizer.step()


def check_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        whole = one.full_tensor() if isinstance(one, DTensor) else one
        torch.testing.assert_close(whole, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def new_model() -> Forked:
    torch.manual_seed(0)
    return Forked()


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def distributed_data_parallel() -> None:
    for options in (
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    ):
        expected = new_model()
        reference(expected, sgd, lambda step: step % 2)
        model = DistributedDataParallel(new_model(), **options)
        train(model, sgd(model.parameters()), lambda step: step % 2)
        check_same(model.module, expected)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    for options in ({}, {"static_graph": True}, {"bucket_cap_mb": 0.0001}):
        expected, own = copy.deepcopy(plain), copy.deepcopy(plain)
        for one in (expected, own):
            torch.manual_seed(1)
            for parameter in one.parameters():
                nn.init.normal_(parameter)
        reference(Batches(expected), sgd, lambda _: 0)
        model = DistributedDataParallel(own, **options)
        train(Batches(model), sgd(model.parameters()))
        check_same(own, expected)


class Batches(nn.Module):
    """Lets a model without branches be trained as one with them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor, _branch: int = 0) -> torch.Tensor:
        return self.model(batch)


def uneven_data() -> None:
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for _ in range(2 + RANK):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    everyone = [torch.empty(1, 3) for _ in range(WORLD_SIZE)]
    dist.all_gather(everyone, model.module.weight.detach())
    assert all(torch.equal(one, everyone[0]) for one in everyone)


def compressed() -> None:
    """With a hook whose callbacks make calls of their own, and wait for their futures."""
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(12, 12))
    model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(RANK, step).repeat(1, 2)).square().mean().backward()
        optimizer.step()
    everyone = [torch.empty(12, 12) for _ in range(WORLD_SIZE)]
    dist.all_gather(everyone, model.module.weight.detach())
    assert all(torch.equal(one, everyone[0]) for one in everyone)


def zero_redundancy() -> None:
    expected = new_model()
    reference(expected, adam, lambda _: 0)
    model = DistributedDataParallel(new_model(), find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    check_same(model.module, expected)


def fully_sharded() -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    torch.manual_seed(2)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    expected = copy.deepcopy(plain)
    reference(Batches(expected), adam, lambda _: 0)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    fully_shard(plain[0], mesh=mesh)
    fully_shard(plain, mesh=mesh)
    train(Batches(plain), adam(plain.parameters()))
    check_same(plain, expected)
    save_and_load(plain)


def save_and_load(model: nn.Module) -> None:
    folder: list[object] = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    state = model.state_dict()
    dcp.save(state, checkpoint_id=str(folder[0]))
    kept = {name: value.full_tensor().clone() for name, value in state.items()}
    with torch.no_grad():
        for value in state.values():
            value.zero_()
    dcp.load(state, checkpoint_id=str(folder[0]))
    assert all(torch.equal(value.full_tensor(), kept[name]) for name, value in state.items())


def tensors_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, WORLD_SIZE // 2), mesh_dim_names=("outer", "inner"))
    whole = torch.arange(24.0).reshape(4, 6)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    product = sharded @ distribute_tensor(torch.eye(6), mesh, [Replicate(), Shard(1)])
    assert torch.equal(product.full_tensor(), whole)
    assert sharded.redistribute(mesh, [Replicate(), Shard(1)]).to_local().shape == (4, 6 // (WORLD_SIZE // 2))
    group = mesh.get_group("outer")
    value = torch.full((3,), float(RANK))
    expected = sum(dist.get_process_group_ranks(group))
    assert functional.all_reduce(value, "sum", group).tolist() == [expected] * 3
    world = dist.group.WORLD
    assert gather_all(value, 0, world).view(WORLD_SIZE, 3)[:, 0].tolist() == list(range(WORLD_SIZE))
    part = reduce_parts(torch.ones(WORLD_SIZE * 2), "sum", 0, world)
    assert part.tolist() == [WORLD_SIZE] * 2


def objects() -> None:
    everyone: list[object] = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, {"rank": RANK})
    assert everyone == [{"rank": rank} for rank in range(WORLD_SIZE)]
    said: list[object] = [("root", 1)] if RANK == 1 else [None]
    dist.broadcast_object_list(said, src=1)
    assert said == [("root", 1)]


def consumers() -> None:
    """All that uses groups: parameters as without them."""
    dist.init_process_group("syncline", timeout=TIMEOUT)
    assert dist.get_backend() == "syncline"
    for check in (
        distributed_data_parallel,
        uneven_data,
        compressed,
        zero_redundancy,
        fully_sharded,
        tensors_of_a_mesh,
        objects,
    ):
        check()
        print(check.__name__, flush=True)
    dist.destroy_process_group()


def killed(victim: str, folder: str) -> None:
    """A rank is killed in the middle of training; the others are told, and go on in a new world."""
    dist.init_process_group("syncline", timeout=TIMEOUT)
    model = DistributedDataParallel(nn.Linear(300, 300), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lost = int(victim)
    try:
        for step in range(200):
            if step == 3 and lost == RANK:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        is_named = f"rank {lost} (host h{lost})" in str(error)
        print("told" if is_named else error, flush=True)
    del model
    dist.destroy_process_group()
    place = [rank for rank in range(WORLD_SIZE) if rank != lost].index(RANK)
    second = f"file://{Path(folder) / 'second'}"
    dist.init_process_group("syncline", init_method=second, rank=place, world_size=WORLD_SIZE - 1, timeout=TIMEOUT)
    value = torch.ones(2)
    dist.all_reduce(value)
    assert value.tolist() == [WORLD_SIZE - 1] * 2
    dist.destroy_process_group()
    print("again", flush=True)


def groups() -> None:
    """Groups of a world, each of which its members alone make."""
    dist.init_process_group("syncline", timeout=TIMEOUT)
    for check in (many_at_once, in_shared_memory, in_another_order, made_by_their_members, one_that_failed):
        check()
        dist.barrier()
    dist.destroy_process_group()
    print("over", flush=True)


def many_at_once() -> None:
    lists = ((0, 1), (1, 2), (0, 2), (2,))
    made = [dist.new_group(list(ranks)) for ranks in lists]
    own = [(group, ranks) for group, ranks in zip(made, lists, strict=True) if RANK in ranks]
    values = [torch.full((3,), 2.0**RANK) for _ in own]
    works = [dist.all_reduce(value, group=group, async_op=True) for value, (group, _) in zip(values, own, strict=True)]
    for work in works:
        work.wait()
    assert [value.tolist() for value in values] == [[sum(2.0**rank for rank in ranks)] * 3 for _, ranks in own]


def in_shared_memory() -> None:
    """Small calls that are waited for, in a segment of the group's own."""
    pair = dist.new_group([0, 2])
    if RANK == 1 or not can_share(2):
        return
    for number in range(3):
        value = torch.full((10,), float(RANK + number))
        dist.all_reduce(value, group=pair)
        assert value.tolist() == [2.0 + 2 * number] * 10
    moved = pair.state.communicator.statistics().fabric.connections
    assert sum(each.received_bytes for each in moved if each.connection_class == MEMORY_CLASS) == 3 * 40


def in_another_order() -> None:
    descending = dist.new_group([2, 0], sort_ranks=False)
    if RANK != 1:
        assert dist.get_group_rank(descending, 2) == 0
        value = torch.tensor([RANK])
        dist.broadcast(value, src=2, group=descending)
        assert value.tolist() == [2]


def made_by_their_members() -> None:
    """Also where one of them has been in more groups than the other."""
    for _ in range(2 if RANK else 0):
        alone = dist.new_group([1, 2], use_local_synchronization=True)
        value = torch.tensor([RANK])
        if RANK == 1:
            dist.send(value, 2, group=alone)
        else:
            assert dist.recv(value, None, group=alone) == 1


def one_that_failed() -> None:
    spoilt, whole = dist.new_group([0, 1]), dist.new_group()
    if RANK < 2:
        with pytest.raises(syncline.MismatchError):
            dist.all_reduce(torch.ones(2 + RANK), group=spoilt)
        dist.destroy_process_group(spoilt)
    again = dist.new_group([0, 1])
    for group in (again, whole) if RANK < 2 else (whole,):
        value = torch.ones(2)
        dist.all_reduce(value, group=group)
        assert value.tolist() == [dist.get_world_size(group)] * 2


def beside_gloo() -> None:
    """Groups of a world that is gloo's: each connects by itself, and computes what gloo does."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    options = syncline.BackendOptions(topology=syncline.Topology.flat(WORLD_SIZE))
    whole = dist.new_group(backend="syncline", pg_options=options)
    last = dist.new_group([1, 2], backend="syncline", pg_options=options)
    theirs, ours = (torch.arange(6.0) * (RANK + 1) for _ in range(2))
    dist.all_reduce(theirs)
    dist.all_reduce(ours, group=whole)
    assert torch.equal(theirs, ours)
    if RANK > 0:
        dist.all_reduce(ours, group=last)
        assert torch.equal(ours, 2 * theirs)
    print(dist.get_backend(), dist.get_backend(whole), flush=True)
    dist.destroy_process_group()


def among_others() -> None:
    """One backend among others, each for a device of its own: from PyTorch 2.14 on a part of a group in C++."""
    dist.init_process_group("cpu:syncline,cuda:gloo", timeout=TIMEOUT)
    is_part = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    for group in (dist.group.WORLD, dist.new_group([0, 1])):
        assert isinstance(group, GroupCalls) != is_part
        value, outputs = torch.full((3,), RANK + 1.0), [torch.empty(3) for _ in range(WORLD_SIZE)]
        work = dist.all_reduce(value, group=group, async_op=True)
        assert work.get_future().then(lambda done: float(done.value()[0].sum())).wait() == 9.0
        dist.all_gather(outputs, value * (RANK + 1), group=group)
        assert [one[0] for one in outputs] == [3.0, 6.0]
        gathered = gather_all(value, gather_dim=0, group=group)
        assert gathered.tolist() == [3.0] * 6
        dist.barrier(group)
        if RANK == 0:
            dist.send(value, 1, group=group, tag=4)
        else:
            dist.recv(value.zero_(), 0, group=group, tag=4)
            assert value.tolist() == [3.0] * 3
    with pytest.raises(RuntimeError, match="All ranks must make the same calls"):
        dist.all_reduce(torch.ones(2 + RANK), group=group)
    dist.destroy_process_group()
    print("over", flush=True)


def beside_a_fleet(folder: str) -> None:
    """A fleet and a group in one process, whichever comes first, and several groups one after the other."""
    meeting = f"file://{Path(folder) / 'first'}"
    dist.init_process_group("syncline", init_method=meeting, rank=RANK, world_size=WORLD_SIZE, timeout=TIMEOUT)
    with syncline.init() as fleet:  # which meets in the store of the group
        fleet.barrier()
        dist.barrier()
    dist.destroy_process_group()
    with syncline.init() as fleet:
        for _ in range(2):
            dist.init_process_group("syncline", timeout=TIMEOUT)
            value = torch.ones(2)
            dist.all_reduce(value)
            fleet.all_reduce(value)
            assert value.tolist() == [WORLD_SIZE**2] * 2
            fleet.barrier()  # so that the store of one group is gone before the next is served at its port
            dist.destroy_process_group()
            fleet.barrier()
    print("both", flush=True)


def leave() -> None:
    """Go without a goodbye, as many programs do."""
    dist.init_process_group("syncline", timeout=TIMEOUT)
    group = dist.new_group([0, 1])
    value = torch.ones(2)
    dist.all_reduce(value, group=group, async_op=True).get_future().then(lambda _: None).wait()
    if RANK == 0:
        dist.send(value, 1)
    else:
        dist.recv(value, 0)
    print("over", flush=True)


def raises() -> None:
    """End rank 1 with an error of the user's, while rank 0 waits for it in a group of both."""
    dist.init_process_group("syncline", timeout=TIMEOUT)
    if RANK == 1:
        dist.new_group([0, 1])
        raise KeyError("of the user's")
    with pytest.raises(syncline.PeerLostError, match=r"rank 1 .* is lost: it ended with KeyError: .of the user's"):
        dist.barrier(dist.new_group([0, 1]))
    print("told", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
