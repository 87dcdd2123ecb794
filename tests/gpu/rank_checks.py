"""One rank of the checks of tensors on a device: `python rank_checks.py RESULTS` makes all, in one order on all ranks.

Each is written once, over a :class:`Place`, and runs on a GPU or on its stand-in. It returns what there is to tell of
it, and raises where it fails. What a stand-in has not, or one GPU has not, is told as what it needs.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from check_places import Place, choose_place
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.errors import ConfigurationError
from syncline.observe.trace import gather_events
from syncline.tensors import staging
from syncline.tensors.device_copies import CopyKind

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RESULTS = Path(sys.argv[1])
TIMEOUT = timedelta(seconds=60)
STEPS = 4
BUCKET_BYTES = 2000
SEVERAL_BACKENDS = (2, 14)
"""From this PyTorch on a group has a backend for each device."""
_groups = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What is checked; ``num_gpus``: how many GPUs it needs, none where the stand-in will do."""

    name: str
    run: Callable[[Place], str | None]
    num_gpus: int = 0
    needs: str = ""
    """What else it needs, where this machine lacks it."""


@contextmanager
def world(backend: str = "syncline") -> Iterator[None]:
    """Make the default group, whose ranks meet in a file of its own."""
    store = dist.FileStore(str(RESULTS / f"store-{next(_groups)}"), WORLD)
    dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Process groups.


def collectives(place: Place) -> str:
    """Whole numbers, so that sums are exact in whatever order."""
    ranks = range(WORLD)

    def of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.arange(2 * WORLD) % 5 + rank + 1).to(dtype)

    def given(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return of(RANK, dtype).to(place.device)

    def same(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.device == place.device
        assert torch.equal(found.cpu(), expected), (found, expected)

    total = sum(of(rank) for rank in ranks)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        dist.all_reduce(value := given(dtype))
        same(value, total.to(dtype))
    products = torch.stack([of(rank) for rank in ranks]).prod(0)
    highest, lowest = of(WORLD - 1), of(0)
    for op, expected in (("AVG", total / WORLD), ("MAX", highest), ("MIN", lowest), ("PRODUCT", products)):
        dist.all_reduce(value := given(), getattr(dist.ReduceOp, op))
        same(value, expected)
    dist.broadcast(value := given(), 1)
    same(value, of(1))
    dist.reduce(value := given(), 0)
    same(value, total if RANK == 0 else of(RANK))
    everything = torch.cat([of(rank) for rank in ranks])
    dist.all_gather_into_tensor(whole := everything.new_empty(everything.shape).to(place.device), given())
    same(whole, everything)
    dist.all_gather(parts := [torch.empty_like(given()) for _ in ranks], given())
    same(torch.cat(parts), everything)
    part = torch.empty(2, device=place.device)
    dist.reduce_scatter_tensor(part, given())
    same(part, total[2 * RANK : 2 * RANK + 2])
    dist.reduce_scatter(part.zero_(), list(given().chunk(WORLD)))
    same(part, total[2 * RANK : 2 * RANK + 2])
    dist.gather(given(), parts if RANK == 0 else None)
    same(torch.cat(parts), everything)
    dist.scatter(part.zero_(), list(given().chunk(WORLD)) if RANK == 1 else None, src=1)
    same(part, of(1)[2 * RANK : 2 * RANK + 2])
    mine = torch.cat([of(rank)[2 * RANK : 2 * RANK + 2] for rank in ranks])
    dist.all_to_all_single(whole := torch.empty_like(given()), given())
    same(whole, mine)
    dist.all_to_all(pieces := list(torch.empty_like(given()).chunk(WORLD)), list(given().chunk(WORLD)))
    same(torch.cat(pieces), mine)
    messages = [dist.P2POp(dist.isend, given(), (RANK + 1) % WORLD), dist.P2POp(dist.irecv, value, (RANK - 1) % WORLD)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    same(value, of((RANK - 1) % WORLD))
    dist.all_reduce_coalesced(several := [given(), given().t()])
    same(several[1], total)
    dist.barrier()
    return "16 kinds of calls, 4 number types"


def strided_tensors(place: Place) -> None:
    memory = torch.full((60, 60), RANK + 1.0, device=place.device)
    dist.all_reduce(memory.t()[:, ::2])
    total = WORLD * (WORLD + 1) / 2
    assert int(memory.eq(total).sum()) == 1800
    whole = torch.zeros(2 * WORLD, device=place.device)
    own = whole[2 * RANK : 2 * RANK + 2].fill_(RANK)
    dist.all_gather_into_tensor(whole, own)
    assert whole.tolist() == [rank for rank in range(WORLD) for _ in range(2)]


def no_stream_waits(place: Place) -> None:
    """Other ranks begin only when this rank's stream has done what was queued behind the call."""
    store = dist.distributed_c10d._get_default_store()
    value, other = torch.ones(1000, device=place.device), torch.zeros(1000, device=place.device)
    dist.all_reduce(torch.ones(1, device=place.device))  # the first one waits until all ranks know each other's devices
    if RANK == 0:
        work = dist.all_reduce(value, async_op=True)
        other.add_(1)
        place.reach()
        assert other.eq(1).all()
        assert not work.is_completed()
        store.set("rank 0 went on", "")
    else:
        store.wait(["rank 0 went on"], TIMEOUT)
        work = dist.all_reduce(value, async_op=True)
    work.wait()
    assert value.eq(WORLD).all()


def copies_overlap(place: Place) -> str:
    """With memory for two pieces: the third comes from the device after the first has begun to go back."""
    num_blocks, staging.MAX_BLOCKS = staging.MAX_BLOCKS, 2
    tensor = torch.ones(6 * staging.BLOCK_BYTES // 4, device=place.device)
    copies = place.copies(lambda: dist.all_reduce(tensor))
    staging.MAX_BLOCKS = num_blocks
    assert tensor.eq(WORLD).all()
    loads, stores = ([when for kind, when in copies if kind is which] for which in CopyKind)
    assert len(loads) >= 6
    assert len(stores) >= 6
    assert loads[1] < stores[0] < loads[-1], "the second is loaded while the first is on the network, others later"
    return f"{len(loads)} pieces of {staging.BLOCK_BYTES >> 20} MiB"


def a_rank_that_dies(place: Place) -> None:
    group = dist.new_group(timeout=TIMEOUT)
    tensor = torch.ones(100_000, device=place.device)
    dist.all_reduce(tensor, group=group)
    if RANK == WORLD - 1:
        group.abort()
        return
    try:
        dist.all_reduce(tensor, group=group)
    except (RuntimeError, syncline.SynclineError) as error:
        text = str(error)
    else:
        raise AssertionError("a rank was lost, and nobody was told")
    assert f"rank {WORLD - 1}" in text, text


# Training.


def model_on(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)).to(device, dtype)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, device: torch.device, around: Callable[[], Any] = nullcontext) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(STEPS):
        optimizer.zero_grad()
        with around():
            loss = model(batch_of(RANK, step).to(device, dtype)).square().mean()
        loss.backward()
        optimizer.step()


def of_one_process(device: torch.device, around: Callable[[], Any] = nullcontext) -> list[torch.Tensor]:
    """Train on all ranks' batches, and return the parameters."""
    model = model_on(device)
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with around():
            loss = model(torch.cat([batch_of(rank, step) for rank in range(WORLD)]).to(device)).square().mean()
        loss.backward()
        optimizer.step()
    return values_of(model)


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(one, "full_tensor", one.clone)().detach().float().cpu() for one in model.parameters()]


def alike(found: list[torch.Tensor], expected: list[torch.Tensor], *, tolerance: float = 1e-4) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float().cpu(), rtol=tolerance, atol=tolerance)


def ddp(place: Place) -> None:
    model = DistributedDataParallel(model_on(place.device))
    train(model, adam(model), place.device)
    alike(values_of(model), of_one_process(place.device))


def fsdp2(place: Place) -> None:
    model: Any = model_on(place.device)
    fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, place.device.type))
    train(model, adam(model), place.device)
    alike(values_of(model), of_one_process(place.device))


def fsdp2_mixed(place: Place) -> None:
    model: Any = model_on(place.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, place.device.type), mp_policy=policy)
    train(model, adam(model), place.device)
    alike(values_of(model), of_one_process(place.device), tolerance=5e-2)


def beside_nccl(place: Place) -> None:
    """One group with a backend for each device: NCCL's would refuse ranks that share a GPU, so it has GPUs enough."""
    dist.all_reduce(host := torch.ones(4))
    dist.all_reduce(value := torch.ones(4, device=place.device))
    assert host.eq(WORLD).all()
    assert value.eq(WORLD).all()


# The fleet.

RULES: dict[str, tuple[Any, bool]] = {
    "AllReduce()": (syncline.AllReduce(bucket_bytes=BUCKET_BYTES), True),
    "Sharded()": (syncline.Sharded(bucket_bytes=BUCKET_BYTES), True),
    "Sharded(overlap_forward=True)": (syncline.Sharded(bucket_bytes=BUCKET_BYTES, overlap_forward=True), True),
    "Sharded(step_in_backward=True)": (syncline.Sharded(bucket_bytes=BUCKET_BYTES, step_in_backward=True), True),
    "LocalSteps(period=2)": (syncline.LocalSteps(period=2), True),
    "LocalSteps(within=Sharded())": (
        syncline.LocalSteps(period=2, parties="host", within=syncline.Sharded(bucket_bytes=BUCKET_BYTES)),
        True,
    ),
    "Clustered(period=1)": (syncline.Clustered(period=1, clusters=1), True),
    "Clustered(within=Sharded())": (
        syncline.Clustered(period=2, clusters=1, within=syncline.Sharded(bucket_bytes=BUCKET_BYTES)),
        True,
    ),
    "Overlapped()": (syncline.Overlapped(bucket_bytes=BUCKET_BYTES), False),
}
"""Each rule, and whether its numbers are the same in every run: they are compared with those on the CPU then."""


def fleet_collectives(fleet: syncline.Fleet, place: Place) -> None:
    value = torch.full((1000,), RANK + 1.0, device=place.device)
    fleet.all_reduce(value)
    assert value.eq(WORLD * (WORLD + 1) / 2).all()
    fleet.broadcast(value.fill_(RANK), root=1)
    assert value.eq(1).all()
    whole, part = torch.empty(2 * WORLD, device=place.device), torch.full((2,), float(RANK), device=place.device)
    fleet.all_gather(whole, part)
    assert whole.tolist() == [rank for rank in range(WORLD) for _ in range(2)]
    fleet.reduce_scatter(part, whole, op="mean")
    assert part.eq(RANK).all()


def trained(
    fleet: syncline.Fleet,
    device: torch.device,
    rule: Any,
    around: Callable[[], Any] = nullcontext,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    model = model_on(device, dtype)
    model, optimizer = syncline.distribute(model, adam(model), update=rule, fleet=fleet)
    train(model, optimizer, device, around)
    optimizer.end_period()
    optimizer.synchronize()
    found = values_of(model)
    optimizer.training.close()
    return found


def distributes(fleet: syncline.Fleet, name: str, place: Place) -> str | None:
    rule, is_same = RULES[name]
    copied: list[list[torch.Tensor]] = []
    copies = place.copies(lambda: copied.append(trained(fleet, place.device, rule)))
    is_copied = is_same and not name.startswith("LocalSteps")  # whose rounds take moves to the host by themselves
    assert {kind for kind, _ in copies} == set(CopyKind) or not is_copied
    if not is_same:
        assert all(value.isfinite().all() for value in copied[0])
        assert not all(map(torch.equal, copied[0], values_of(model_on(torch.device("cpu")))))
        return "finite; its numbers differ from run to run"
    with place.on_host():
        alike(copied[0], trained(fleet, torch.device("cpu"), rule))
    return f"as on the CPU; {len(copies)} copies"


def mixed_precision(fleet: syncline.Fleet, place: Place) -> None:
    around = partial(torch.autocast, place.device.type, torch.bfloat16)
    rule = syncline.Sharded(bucket_bytes=BUCKET_BYTES)
    alike(trained(fleet, place.device, rule, around), of_one_process(place.device, around), tolerance=2e-2)
    halves = trained(fleet, place.device, rule, dtype=torch.bfloat16)
    alike(halves, of_one_process(place.device), tolerance=1e-1)


def checkpoints(fleet: syncline.Fleet, place: Place) -> None:
    folder = RESULTS / "checkpoint"
    model = model_on(place.device)
    model, optimizer = syncline.distribute(model, adam(model), fleet=fleet)
    train(model, optimizer, place.device)
    syncline.save_checkpoint(folder, model, optimizer)
    train(model, optimizer, place.device)
    optimizer.synchronize()
    after = values_of(model)
    syncline.load_checkpoint(folder, model, optimizer)
    train(model, optimizer, place.device)
    optimizer.synchronize()
    alike(values_of(model), after, tolerance=0.0)
    assert all(parameter.device == place.device for parameter in model.parameters())
    optimizer.training.close()


def graphs(fleet: syncline.Fleet, place: Place) -> None:
    """A capture is refused, and what comes after it works."""
    value = torch.ones(10, device=place.device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            fleet.all_reduce(value)
    except ConfigurationError as error:
        text = str(error)
    else:
        raise AssertionError("a collective was captured, which a replay would not make")
    assert "make_graphed_callables" in text, text
    model = nn.Sequential(model_on(place.device))
    model, optimizer = syncline.distribute(model, adam(model), fleet=fleet)
    model[0] = torch.cuda.make_graphed_callables(model[0], (torch.ones(8, 16, device=place.device),))
    train(model, optimizer, place.device)
    optimizer.synchronize()
    alike(values_of(model), of_one_process(place.device))
    optimizer.training.close()


def memory(fleet: syncline.Fleet, place: Place) -> str:
    """Of 64 MiB of parameters with Adam, at most, on this rank's device; DDP's beside it."""

    def large() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).to(place.device)

    def most(make: Callable[[], tuple[Any, Any]]) -> float:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place.device)
        model, optimizer = make()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(8, 1024, device=place.device)).sum().backward()
            optimizer.step()
        syncline.synchronize()
        return torch.cuda.max_memory_allocated(place.device) / (1 << 20)

    def by(rule: Any) -> tuple[Any, Any]:
        model = large()
        return syncline.distribute(model, adam(model), update=rule, fleet=fleet)

    def by_ddp() -> tuple[Any, Any]:
        model = DistributedDataParallel(large())
        return model, adam(model)

    with world("gloo"):
        beside = most(by_ddp)
    whole, sharded = most(lambda: by(syncline.AllReduce())), most(lambda: by(syncline.Sharded()))
    assert sharded < whole
    return f"MiB: DDP {beside:.0f}, AllReduce {whole:.0f}, Sharded {sharded:.0f}"


def figures(place: Place) -> str:
    """All-reduces of 64 MiB: pieces of several sizes, and gloo's of the same tensor."""
    tensor = torch.zeros(16 << 20, device=place.device)

    def time_s() -> float:
        taken = []
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            place.reach()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    told = []
    size_bytes = staging.BLOCK_BYTES
    for mebibytes in (1, 2, 4, 8, 16):
        staging.BLOCK_BYTES = mebibytes << 20
        with world():
            told.append(f"{mebibytes} MiB {time_s():.3f} s")
    staging.BLOCK_BYTES = size_bytes
    with world("gloo"):
        return f"pieces of {', '.join(told)}; gloo {time_s():.3f} s"


def nccl_within_a_host(place: Place) -> str:
    """NCCL itself, and all-reduces of ours, whose part within the host is NCCL's."""
    tensor = torch.ones(16 << 20, device=place.device)
    times = []
    for backend in ("syncline", "nccl"):
        with world(backend):
            dist.all_reduce(tensor.fill_(1))
            assert tensor.eq(WORLD).all()
            start = time.perf_counter()
            for _ in range(5):
                dist.all_reduce(tensor)
            place.reach()
            times.append((time.perf_counter() - start) / 5)
    return f"64 MiB: {times[0]:.3f} s, NCCL {times[1]:.3f} s"


def in_world(run: Callable[[Place], str | None], backend: str = "syncline") -> Callable[[Place], str | None]:
    """Return ``run`` within a default group of its own: what one check spoils the next one does not see."""

    def run_in_world(place: Place) -> str | None:
        with world(backend):
            return run(place)

    return run_in_world


def checks(fleet: syncline.Fleet) -> list[Check]:
    """List all checks, in their order."""
    has_several = tuple(map(int, torch.__version__.split(".")[:2])) >= SEVERAL_BACKENDS
    lacking = "" if has_several else f"PyTorch 2.14, this is {torch.__version__}"
    return [
        Check(name="every collective of a process group", run=in_world(collectives)),
        Check(name="tensors that are strided or share memory", run=in_world(strided_tensors)),
        Check(name="no stream waits for a call but in wait()", run=in_world(no_stream_waits)),
        Check(name="pieces: from the device, network, and back at once", run=in_world(copies_overlap)),
        Check(name="a rank that leaves is named", run=in_world(a_rank_that_dies)),
        Check(name="DistributedDataParallel", run=in_world(ddp)),
        Check(name="FSDP2", run=in_world(fsdp2)),
        Check(name="FSDP2, mixed precision", run=in_world(fsdp2_mixed)),
        Check(name="collectives of the fleet", run=partial(fleet_collectives, fleet)),
        *(Check(name=f"distribute(), {name}", run=partial(distributes, fleet, name)) for name in RULES),
        Check(name="distribute(), autocast and bfloat16", run=partial(mixed_precision, fleet)),
        Check(name="a checkpoint comes back to the device", run=partial(checkpoints, fleet)),
        Check(name="a CUDA graph's capture is refused", run=partial(graphs, fleet), num_gpus=1),
        Check(name="memory beside DDP", run=partial(memory, fleet), num_gpus=1),
        Check(name="figures: sizes of pieces, gloo", run=figures, num_gpus=1),
        Check(
            name='"cpu:syncline,cuda:nccl"',
            run=in_world(beside_nccl, "cpu:syncline,cuda:nccl"),
            num_gpus=WORLD,
            needs=lacking,
        ),
        Check(name="NCCL within the host, and its figures", run=nccl_within_a_host, num_gpus=WORLD),
    ]


def traces(trace: Path, place: Place) -> str:
    """Buckets of all trainings: while one was on the network, another one came from the device."""
    events = [event for event in gather_events([trace]) if event["ph"] == "X"]
    spans = {
        kind: [(event["name"].split()[-1], event["ts"], event["ts"] + event["dur"]) for event in events if of(event)]
        for kind, of in {
            "from device": lambda event: event["cat"] == "from device",
            "to device": lambda event: event["cat"] == "to device",
            "network": lambda event: event["cat"] == "communication" and " of bucket " in event["name"],
        }.items()
    }
    at_once = {
        kind: sum(
            name != other and start < end_of_other and start_of_other < end
            for name, start, end in spans[kind]
            for other, start_of_other, end_of_other in spans["network"]
        )
        for kind in ("from device", "to device")
    }
    assert all(at_once.values()), at_once
    return f"{at_once['from device']} times from the device, {at_once['to device']} times to it"


def tell(result: dict[str, Any], file: Any) -> None:
    """Write what came of a check at once."""
    file.write(json.dumps(result) + "\n")
    file.flush()


def result_of(check: Check, place: Place) -> dict[str, Any]:
    """Make one check, and return what is to be told of it."""
    told = {"check": check.name, "device": place.name, "state": "not run", "note": "", "seconds": 0.0}
    if place.num_gpus < check.num_gpus:
        return told | {"note": f"needs {check.num_gpus} GPU{'s'[: check.num_gpus > 1]}, here are {place.num_gpus}"}
    if check.needs:
        return told | {"note": f"needs {check.needs}"}
    begin = time.monotonic()
    try:
        came = {"state": "passed", "note": check.run(place) or ""}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        came = {"state": "failed", "note": f"{type(error).__name__}: {lines[0]}"}
    return told | came | {"seconds": time.monotonic() - begin}


def main() -> None:
    """Make all checks; results are written as they come, whatever becomes of the rest."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # names that newer PyTorch has replaced
    torch.set_num_threads(1)
    place = choose_place(RANK)
    trace = RESULTS / f"trace-{RANK}.json"
    with (RESULTS / f"rank-{RANK}.jsonl").open("w") as file:
        with syncline.init(timeout_s=TIMEOUT.total_seconds(), trace=trace) as fleet:
            for check in checks(fleet):
                tell(result_of(check, place), file)
        tell(result_of(Check(name="a trace shows copies beside the network", run=partial(traces, trace)), place), file)


if __name__ == "__main__":
    main()
