"""One of four ranks that does what PyTorch's own tests of DTensor and of distributed checkpoints do, on two worlds.

The first world is gloo's, the second ours; each check gives tensors, which are to be the same on both. Prints the name
of each check that went well.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as distributed_tensor
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._pg_transport import PGTransport
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TIMEOUT = timedelta(seconds=60)
Tensors = Iterator[torch.Tensor]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same ones on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flat() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


def redistributions_of_meshes() -> Tensors:
    """From each pair of placements to each other, on meshes of two dimensions, whose sizes divide and do not."""
    kept = (Replicate(), Shard(0), Shard(1))
    for shape, sizes in (((2, 2), ((5, 3), (1, 3))), ((4, 1), ((8, 4),))):
        mesh = init_device_mesh("cpu", shape)
        for whole in (numbers(*size) for size in sizes):
            for before in itertools.product((*kept, Partial(), Partial("max")), repeat=2):
                if len({one.reduce_op for one in before if isinstance(one, Partial)}) > 1:
                    continue  # PyTorch takes one reduction at a time
                placed = [Replicate() if isinstance(one, Partial) else one for one in before]
                local = distribute_tensor(whole, mesh, placed).to_local() * (RANK + 1)
                source = DTensor.from_local(
                    local, mesh, before, run_check=False, shape=whole.shape, stride=whole.stride()
                )
                for after in itertools.product(kept, repeat=2):
                    yield source.redistribute(mesh, after).to_local()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    mesh["rows", "columns"]._flatten("all")
    for op in ("sum", "avg", "max", "min", "product"):
        source = DTensor.from_local(numbers(4, 4, seed=RANK), mesh, [Partial(op)] * 2, run_check=False)
        yield source.full_tensor()
        yield source.redistribute(mesh, [Shard(0), Shard(0)]).to_local()


def kinds_of_redistributions() -> Tensors:
    """Number types of their own forward and backward, results that nobody waits for yet, parts of the ranks."""
    mesh = flat()
    for kind in (None, torch.bfloat16, torch.float64):
        for back in (None, torch.bfloat16):
            for before, after in ((Shard(0), Replicate()), (Partial(), Replicate()), (Partial(), Shard(1))):
                whole = torch.arange(32.0).reshape(4, 8) + RANK  # sums are exact in 16 bits too
                source = DTensor.from_local(whole, mesh, [before]).requires_grad_()
                moved = source.redistribute(placements=[after], forward_dtype=kind, backward_dtype=back)
                yield moved.to_local()
                moved.backward(torch.ones_like(moved))
                yield source.grad.to_local()
    source = distribute_tensor(torch.arange(24).reshape(6, 4), mesh, [Shard(0)])
    late = source.redistribute(placements=[Replicate()], async_op=True).to_local()
    assert isinstance(late, AsyncCollectiveTensor)
    seen = late.view(-1)
    assert not late.completed
    yield seen + 1
    local = numbers(3, 4).requires_grad_()
    whole = DTensor.from_local(local, mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()])
    whole.square().sum().backward()
    yield local.grad
    some = DeviceMesh("cpu", [0, 2])
    part = DTensor.from_local(torch.full((2, 2), RANK + 1.0), some, [Shard(0)])
    for one in (part + 2, part.redistribute(placements=[Replicate()])):
        yield one.to_local()
    yield part.sum().to_local()
    yield torch.tensor(part.equal(part))
    wrong = torch.ones(2, 2, dtype=torch.float64 if RANK else torch.float32)
    with pytest.raises(ValueError, match="Inconsistent tensor metadata"):
        DTensor.from_local(wrong, mesh, [Shard(0)], run_check=True)


def made_from_whole() -> Tensors:
    """Tensors that a chosen rank gives out, modules with functions for inputs and outputs, constructors."""
    mesh, grid = flat(), init_device_mesh("cpu", (2, 2))
    own = numbers(9, 6, seed=RANK)
    for placement, source in itertools.product((Shard(0), Shard(1), Shard(-1), Replicate()), (0, 1, 3)):
        yield distribute_tensor(own, mesh, [placement], src_data_rank=source).full_tensor()
    yield distribute_tensor(own, mesh, [Shard(0)], src_data_rank=None).to_local()
    for placements in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
        yield distribute_tensor(own, grid, placements).to_local()
        for make in (distributed_tensor.ones, distributed_tensor.zeros):
            yield make(6, 5, device_mesh=grid, placements=placements).full_tensor()
        yield distributed_tensor.full((6, 5), 3.0, device_mesh=grid, placements=placements).full_tensor()

    def shard(_: str, module: nn.Module, where: DeviceMesh) -> None:
        for name, parameter in module._parameters.items():
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, where, [Shard(0)])))

    torch.manual_seed(RANK)
    model = distribute_module(
        nn.Linear(6, 8),
        mesh,
        shard,
        lambda _, inputs, where: DTensor.from_local(inputs[0], where, [Replicate()]),
        lambda _, output, where: output.redistribute(where, [Replicate()]).to_local(),
    )
    model(numbers(3, 6)).square().sum().backward()
    for parameter in model.parameters():
        yield parameter.full_tensor()
        yield parameter.grad.full_tensor()


class Layers(nn.Module):
    """An embedding, a norm, and two layers between which the columns are divided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.wide(self.norm(self.table(rows)))))


def parallel_styles() -> Tensors:
    """Each style of tensor parallelism, forward, backward and in steps of optimizers, beside the plain model."""
    rows = torch.arange(16).reshape(4, 4)
    plans: Sequence[dict[str, Any]] = (
        {"wide": ColwiseParallel(), "narrow": RowwiseParallel()},
        {"table": ColwiseParallel(output_layouts=Replicate())},
        {
            "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "wide": ColwiseParallel(input_layouts=Shard(1)),
            "narrow": RowwiseParallel(output_layouts=Replicate()),
        },
        {
            "wide": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True
            ),
            "narrow": PrepareModuleOutput(
                output_layouts=Shard(0), desired_output_layouts=Replicate(), use_local_output=True
            ),
        },
    )
    for plan, kind in itertools.product(plans, (torch.optim.AdamW, torch.optim.SGD)):
        plain, model = Layers(), parallelize_module(Layers(), flat(), plan)
        several = [kind(one.parameters(), lr=0.1) for one in (plain, model)]
        for _ in range(2):
            for one, optimizer in zip((plain, model), several, strict=True):
                optimizer.zero_grad()
                one(rows).square().mean().backward()
                nn.utils.clip_grad_norm_([each for each in one.parameters() if isinstance(each.grad, DTensor)], 1.0)
                if one is plain and (divided := [name for name, each in model.named_parameters() if is_tensor(each)]):
                    nn.utils.clip_grad_norm_([one.get_parameter(name) for name in divided], 1.0)
                optimizer.step()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            whole = one.full_tensor() if is_tensor(one) else one
            if "Prepare" not in str(plan):
                torch.testing.assert_close(whole, other, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
            yield whole


def is_tensor(value: object) -> bool:
    return isinstance(value, DTensor)


def losses_and_local_functions() -> Tensors:
    """Losses over classes that are divided, functions on local parts, random numbers."""
    mesh = flat()
    labels = torch.tensor([0, 5, 7, -100])
    for reduction in ("mean", "sum", "none"):
        scores = distribute_tensor(numbers(4, 8), mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss = nn.functional.cross_entropy(scores, labels, reduction=reduction)
            loss.sum().backward()
        yield loss.full_tensor() if is_tensor(loss) else loss
        yield scores.grad.full_tensor()

    @local_map(out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]), redistribute_inputs=True)
    def multiply(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one @ other

    one, other = (distribute_tensor(numbers(4, 4, seed=seed), mesh, [Replicate()]) for seed in range(2))
    yield multiply(one, other).full_tensor()
    torch.manual_seed(RANK)
    source = distribute_tensor(torch.rand(8, 4), mesh, [Shard(0)])
    for draw in (torch.rand_like, torch.randn_like, nn.init.kaiming_uniform_, nn.functional.dropout):
        yield draw(source.clone()).to_local()


def convolutions() -> Tensors:
    """Divided in width, where neighbours need edges, and whole, in one to three dimensions."""
    mesh = flat()
    for stride, size, padding in ((4, 4, 0), (1, 3, 1), (1, 5, 2)):
        torch.manual_seed(1)
        model = distribute_module(nn.Conv2d(3, 4, size, stride=stride, padding=padding), mesh)
        source = distribute_tensor(numbers(2, 3, 8, 32), mesh, [Shard(3)])
        output = model(source)
        yield output.to_local()
        output.backward(DTensor.from_local(numbers(*output.to_local().shape, seed=RANK), mesh, [Shard(3)]))
        yield from (one.grad.full_tensor() for one in model.parameters())
    for kind, shape in ((nn.Conv1d, (1, 4, 8)), (nn.Conv3d, (1, 4, 4, 4, 4))):
        torch.manual_seed(1)
        model = distribute_module(kind(4, 4, 3, padding=1), mesh)
        yield model(DTensor.from_local(numbers(*shape), mesh, [Replicate()])).full_tensor()


GRADED: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda one: nn.functional.layer_norm(one, (8,)),
    lambda one: nn.functional.rms_norm(one, (8,)),
    lambda one: one.softmax(0),
    lambda one: one.log_softmax(1),
    lambda one: one.logsumexp(0),
    lambda one: one.std(0),
    lambda one: one.amin(0),
    lambda one: one.prod(0),
    lambda one: one.sort(0)[0],
    lambda one: one.cumsum(0),
    lambda one: one.topk(2, 0)[0],
    lambda one: torch.linalg.vector_norm(one, 3.0),
    lambda one: one.clone().flatten().unflatten(0, (4, 16)),
    lambda one: one.gather(0, torch.zeros_like(one, dtype=torch.int64)),
    lambda one: one.index_select(1, distribute_tensor(torch.tensor([1, 6]), one.device_mesh, [Replicate()])),
    lambda one: torch.einsum("ij,kj->ik", one, one),
    lambda one: nn.functional.scaled_dot_product_attention(*[one.view(1, 2, 8, 4)] * 3),
    lambda one: one.roll(1, 0),
    lambda one: one.repeat(2, 1),
)
COUNTED: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda one: one.argmax(0),
    lambda one: one.max(),
    lambda one: (one > 0).any(),
    lambda one: (one > -9).all(1),
    lambda one: one.bucketize(torch.tensor([0.0, 1.0])) if not is_tensor(one) else one.gt(0).sum(),
)


def graded_operations() -> Tensors:
    """Operators whose results or gradients are gathered, added or compared over the ranks."""
    mesh = flat()
    for operation, placement in itertools.product(GRADED, (Replicate(), Shard(0), Shard(1))):
        source = distribute_tensor(numbers(8, 8), mesh, [placement]).requires_grad_()
        try:
            result = operation(source)
            result.square().sum().backward()
        except (RuntimeError, NotImplementedError) as error:
            yield torch.tensor([ord(one) for one in type(error).__name__])
            continue
        yield result.full_tensor()
        yield source.grad.full_tensor()
    for operation, placement in itertools.product(COUNTED, (Replicate(), Shard(0), Shard(1))):
        yield operation(distribute_tensor(numbers(8, 8), mesh, [placement])).full_tensor()


def shared_folder() -> str:
    place: list[Any] = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(place)
    return str(place[0])


def states() -> Tensors:
    """What ``get_state_dict`` and ``set_state_dict`` do: whole or divided, from rank 0 to all, flat, in part."""
    mesh, grid = flat(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    wraps: tuple[Callable[[nn.Module], Any], ...] = (
        DistributedDataParallel,
        lambda one: fully_shard(one, mesh=mesh),
        lambda one: fully_shard(one, mesh=grid),
        lambda one: parallelize_module(one, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}),
    )
    for wrap in wraps:
        first, second = (wrap(Layers()) for _ in range(2))
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (first, second)]
        first(torch.arange(4)).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        for options in (
            StateDictOptions(),
            StateDictOptions(flatten_optimizer_state_dict=True),
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ):
            model, optimizer = get_state_dict(first, optimizers[0], options=options)
            if options.broadcast_from_rank0 and RANK:
                model, optimizer = {}, {}
            set_model_state_dict(second, copy.deepcopy(model), options=options)
            set_optimizer_state_dict(second, optimizers[1], copy.deepcopy(optimizer), options=options)
            for one, other in zip(first.parameters(), second.parameters(), strict=True):
                assert torch.equal(whole_of(one), whole_of(other))
                yield whole_of(other)
                yield from (whole_of(each) for _, each in sorted(optimizers[1].state[other].items()))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        yield from (one for _, one in sorted(get_model_state_dict(first, options=options).items()))


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if is_tensor(tensor) else tensor


class FailingWriter(dcp.FileSystemWriter):
    """Raises on some ranks, at one step of a save."""

    def __init__(self, folder: str, place: str, ranks: Sequence[int]) -> None:
        super().__init__(folder)
        self.place, self.ranks = place, ranks

    def check(self, place: str) -> None:
        if place == self.place and RANK in self.ranks:
            raise ValueError(f"{place} fails on rank {RANK}")

    def prepare_local_plan(self, plan: Any) -> Any:
        self.check("plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self.check("plans")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.check("write")
        future: Future[Any] = super().write_data(plan, planner)
        if self.place == "later" and RANK in self.ranks:
            future = Future()
            future.set_exception(ValueError("later"))
        return future

    def finish(self, metadata: Any, results: Any) -> None:
        self.check("finish")
        super().finish(metadata, results)


class FailingReader(dcp.FileSystemReader):
    """Raises on some ranks where they read."""

    def __init__(self, folder: str, ranks: Sequence[int]) -> None:
        super().__init__(folder)
        self.ranks = ranks

    def read_data(self, plan: Any, planner: Any) -> Any:
        if RANK in self.ranks:
            raise ValueError(f"reading fails on rank {RANK}")
        return super().read_data(plan, planner)


def failing_checkpoints() -> Tensors:
    """What fails on some ranks is an error on all, which names them, and the next one goes well."""
    state = {"divided": distribute_tensor(numbers(8, 2), flat(), [Shard(0)]), "step": 3}
    failures = (
        ("plan", [1], 0),
        ("plans", [0], 0),
        ("write", [2], 0),
        ("later", [3], 0),
        ("finish", [1], 1),
        ("write", [0, 3], 2),
    )
    for place, ranks, coordinator in failures:
        writer = FailingWriter(shared_folder(), place, ranks)
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.save_state_dict(state, writer, coordinator_rank=coordinator)
        assert sorted(caught.value.failures) == ranks
    folder = shared_folder()
    dcp.save(state, checkpoint_id=folder)
    loaded = {"divided": distribute_tensor(torch.zeros(8, 2), flat(), [Shard(0)]), "step": 0}
    for ranks, coordinator in (([1], 0), ([0, 2], 3)):
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.load_state_dict(loaded, FailingReader(folder, ranks), coordinator_rank=coordinator)
        assert sorted(caught.value.failures) == ranks
    dcp.load(loaded, checkpoint_id=folder)
    yield loaded["divided"].full_tensor()


def sharded_tensors() -> Tensors:
    """The older class of sharded tensors, saved, and loaded in other parts; a checkpoint that goes around in a ring."""

    def made(ranks: Sequence[int], fill: float, dim: int = 0) -> sharded_tensor.ShardedTensor:
        spec = ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])
        result = sharded_tensor.full(spec, (9, 3), fill)
        for shard in result.local_shards():
            shard.tensor.add_(RANK)
        return result

    folder = shared_folder()
    dcp.save({"parts": made([0, 1, 2, 3], 5.0)}, checkpoint_id=folder)
    for loaded in ({"parts": made([3, 1, 0, 2], 0.0)}, {"parts": made([0, 1, 2, 3], 0.0, dim=1)}):
        dcp.load(loaded, checkpoint_id=folder)
        yield from (shard.tensor for shard in loaded["parts"].local_shards())
    state = {
        "plain": numbers(3, 5, seed=RANK).t(),
        "divided": DTensor.from_local(numbers(2, 2, seed=RANK), flat(), [Shard(0)]),
        "parts": made([0, 1, 2, 3], 1.0),
        "empty": torch.empty(0),
        "nested": {"text": "some", "list": [1, torch.tensor(RANK)]},
    }
    transport = PGTransport(dist.group.WORLD, TIMEOUT, torch.device("cpu"))
    steps = [
        lambda: transport.send_checkpoint([(RANK + 1) % WORLD], state),
        lambda: transport.recv_checkpoint((RANK - 1) % WORLD),
    ]
    results = [step() for step in (steps if RANK == 0 else reversed(steps))]
    received: Any = next(one for one in results if one is not None)
    assert received["nested"]["text"] == "some"
    yield received["plain"]
    yield received["divided"].to_local()
    yield received["parts"].local_shards()[0].tensor
    yield received["nested"]["list"][1]


def meshes_of_checkpoints() -> Tensors:
    """Saved on one mesh, also beside the training, and loaded on another."""
    meshes = (flat(), init_device_mesh("cpu", (2, 2)))
    whole = numbers(7, 6)
    placements: dict[int, Sequence[Any]] = {
        1: [(Shard(0),), (Shard(1),), (Replicate(),)],
        2: [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(1))],
    }
    every = [(mesh, one) for mesh in meshes for one in placements[mesh.ndim]]
    for number, (mesh, before) in enumerate(every):
        folder = shared_folder()
        state = {"weight": distribute_tensor(whole, mesh, before), "step": number}
        if number % 2:
            dcp.async_save(state, checkpoint_id=folder).result()
            dist.barrier()
        else:
            dcp.save(state, checkpoint_id=folder)
        for other, after in every:
            loaded = {"weight": distribute_tensor(torch.zeros(7, 6), other, after), "step": -1}
            dcp.load(loaded, checkpoint_id=folder)
            assert loaded["step"] == number
            yield loaded["weight"].full_tensor()


CHECKS = (
    redistributions_of_meshes,
    kinds_of_redistributions,
    made_from_whole,
    parallel_styles,
    losses_and_local_functions,
    convolutions,
    graded_operations,
    states,
    failing_checkpoints,
    sharded_tensors,
    meshes_of_checkpoints,
)


def results_on(backend: str, store: Any) -> dict[str, list[torch.Tensor]]:
    """Run the checks on a world of that backend."""
    where = dist.PrefixStore(backend, store)
    dist.init_process_group(backend, store=where, rank=RANK, world_size=WORLD, timeout=TIMEOUT)
    chosen = [check for check in CHECKS if len(sys.argv) == 1 or check.__name__ in sys.argv]
    results = {check.__name__: [one.detach().clone() for one in check()] for check in chosen}
    dist.destroy_process_group()
    return results


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store, *_ = next(dist.rendezvous("env://"))
    theirs, ours = (results_on(backend, store) for backend in ("gloo", "syncline"))
    for name, expected in theirs.items():
        for number, (one, other) in enumerate(zip(ours[name], expected, strict=True)):
            torch.testing.assert_close(one, other, msg=lambda text, n=number, c=name: f"{c} {n}: {text}")
        print(name, flush=True)


if __name__ == "__main__":
    main()
