"""Collectives on loopback: Syncline and gloo in the same processes, in the same run, call by call in turns.

Both are called through their public face with float32 tensors, or those of ``--dtypes`` in turns (in place for
all-reduce, from an input into an output for reduce-scatter and all-gather), with one arithmetic thread for each rank.
Training buckets are moved as an update rule moves them, all at once: by all-reduces, or by reduce-scatters and, as each
is over, all-gathers; gloo moves the same buckets by all-reduces that do not wait for each other. The rate is
size / time, where size is that of the whole tensor (the input of a reduce-scatter, the output of an all-gather, all
buckets) and time is the median over the rounds of the slowest rank's time. Each round calls both, in the other order
than the round before, so that what drifts hits both. Ratios of one run are worth more than its absolute figures; the
table's last columns say how far calls scatter, as times in microseconds that a tenth, half and nine tenths of the calls
stay under.

    python benchmarks/loopback.py --ranks 2 4 --megabytes 1 16 64 --record benchmarks/records/DATE_loopback
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import syncline
from syncline.pytorch.flatten import flatten, plan_model
from syncline.schedule import Collective
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketScheduleOptions, plan_bucket_schedules
from syncline.updates.control import ControlStream

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
BUCKET_OPERATIONS = ("buckets: AllReduce", "buckets: Sharded")
PARAMETER_ELEMENTS = 1 << 18
"""Of the parameters that fill the buckets: 1 MiB each."""
NUM_WARM_UP = 3
"""Rounds that are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. Rates in bytes per second of tensor size."""

    ranks: int
    operation: str
    size_bytes: int
    syncline_s: tuple[float, float, float]
    """What a tenth, half and nine tenths of the calls took at most."""
    gloo_s: tuple[float, float, float]
    dtype: str = "float32"

    @property
    def ratio(self) -> float:
        """How many times gloo's rate, by the medians."""
        return self.gloo_s[1] / self.syncline_s[1]


def calls(
    fleet: syncline.Fleet, operation: str, size_bytes: int, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Return the same operation through both libraries, on tensors of their own."""
    share = size_bytes // dtype.itemsize // fleet.world_size
    whole, part = torch.ones(share * fleet.world_size, dtype=dtype), torch.ones(share, dtype=dtype)
    if operation == "all_reduce":
        return {"syncline": lambda: fleet.all_reduce(whole), "gloo": lambda: dist.all_reduce(whole)}
    if operation == "reduce_scatter":
        return {
            "syncline": lambda: fleet.reduce_scatter(part, whole),
            "gloo": lambda: dist.reduce_scatter_single(part, whole),
        }
    return {"syncline": lambda: fleet.all_gather(whole, part), "gloo": lambda: dist.all_gather_single(whole, part)}


def bucket_calls(
    fleet: syncline.Fleet, operation: str, size_bytes: int, _dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Return how a rule moves its buckets, which are float32, and how gloo does, on buckets of their own."""
    num_elements = size_bytes // 4 // fleet.world_size * fleet.world_size
    sizes = [min(PARAMETER_ELEMENTS, num_elements - start) for start in range(0, num_elements, PARAMETER_ELEMENTS)]
    named = {torch.nn.Parameter(torch.ones(size)): (str(number), 0) for number, size in enumerate(sizes)}
    plans = plan_model(named, bucket_bytes=DEFAULT_BUCKET_BYTES)
    communicator, streams = fleet.communicator, fleet.reserve_streams(len(plans) + 1)
    options = BucketScheduleOptions(is_divided=operation == "buckets: Sharded")
    collectives = BucketCollectives(
        communicator,
        control=ControlStream(communicator, stream=streams[0]),
        bucket_schedules=plan_bucket_schedules(communicator, plans, options, first_stream=streams[1]),
    )
    collectives.share_memory([plan.num_bytes for plan in plans])
    ours = flatten(named, plans)[::-1]
    theirs = [torch.zeros(plan.num_elements) for plan in reversed(plans)]
    for tensor in (*theirs, *(bucket.gradients for bucket in ours)):
        tensor.fill_(1.0)  # memory that was never written is not there yet

    def reduce_all() -> None:
        wait_for([collectives.start(bucket, Collective.ALL_REDUCE, None) for bucket in ours])

    def reduce_and_gather() -> None:
        reductions = [collectives.start(bucket, Collective.REDUCE_SCATTER, None) for bucket in ours]
        gathers = []
        for bucket, reduction in zip(ours, reductions, strict=True):
            reduction.wait()
            gathers.append(collectives.start(bucket, Collective.ALL_GATHER, None))
        wait_for(gathers)

    return {
        "syncline": reduce_and_gather if options.is_divided else reduce_all,
        "gloo": lambda: wait_for([dist.all_reduce(tensor, async_op=True) for tensor in theirs]),
    }


def wait_for(works: Sequence[Any]) -> None:
    """Wait for all of them."""
    for work in works:
        work.wait()


def spread(seconds: list[float]) -> tuple[float, float, float]:
    """Return the first, fifth and ninth decile."""
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return deciles[0], deciles[4], deciles[8]


def measure(call: Callable[[], object]) -> float:
    """Seconds of one call, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    call()
    elapsed = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def run_rank(
    rank: int,
    world_size: int,
    ports: tuple[int, int],
    operations: Sequence[str],
    sizes: list[int],
    dtypes: Sequence[str],
    rounds: int,
    out: str,
) -> None:
    """One rank: every operation and size, both libraries in turns."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[1]}", rank=rank, world_size=world_size)
    rows = []
    with syncline.init() as fleet:
        for operation in operations:
            for size_bytes in sizes:
                make = calls if operation in OPERATIONS else bucket_calls
                every = {
                    (dtype, name): call
                    for dtype in (dtypes if operation in OPERATIONS else ["float32"])
                    for name, call in make(fleet, operation, size_bytes, getattr(torch, dtype)).items()
                }
                times: dict[tuple[str, str], list[float]] = {key: [] for key in every}
                for i in range(-NUM_WARM_UP, rounds):
                    for key in sorted(every, reverse=bool(i % 2)):
                        seconds = measure(every[key])
                        if i >= 0:
                            times[key].append(seconds)
                rows += [
                    Row(
                        ranks=world_size,
                        operation=operation,
                        size_bytes=size_bytes,
                        syncline_s=spread(times[dtype, "syncline"]),
                        gloo_s=spread(times[dtype, "gloo"]),
                        dtype=dtype,
                    )
                    for dtype in dict.fromkeys(dtype for dtype, _ in every)
                ]
    dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(json.dumps([asdict(row) for row in rows]))


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = tuple(one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    return ports


def table(rows: list[Row]) -> str:
    """Return the rows as text, rates in MB/s."""
    lines = [
        f"{'ranks':>5} {'operation':<18} {'dtype':<8} {'size':>7} {'syncline':>11} {'gloo':>11} {'ratio':>6}"
        f"   {'syncline p10/p50/p90 us':>24}   {'gloo p10/p50/p90 us':>24}"
    ]
    for row in rows:
        rates = [row.size_bytes / times_s[1] / 1e6 for times_s in (row.syncline_s, row.gloo_s)]
        spreads = ["/".join(f"{seconds * 1e6:.0f}" for seconds in times_s) for times_s in (row.syncline_s, row.gloo_s)]
        lines.append(
            f"{row.ranks:>5} {row.operation:<18} {row.dtype:<8} {row.size_bytes // 2**20:>4} MB "
            f"{rates[0]:>6.0f} MB/s {rates[1]:>6.0f} MB/s {row.ratio:>6.2f}   {spreads[0]:>24}   {spreads[1]:>24}"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the arguments, start the ranks, print and record the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--operations", nargs="+", default=[*OPERATIONS, *BUCKET_OPERATIONS])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="float32, bfloat16, ...")
    parser.add_argument("--rounds", type=int, default=15, help="at least 100 for a claim about 1 MB")
    parser.add_argument("--record", type=Path, help="folder for table.txt and results.json")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for world_size in arguments.ranks:
        out = Path(f"/tmp/syncline-loopback-{os.getpid()}.json")
        sizes = [megabytes * 2**20 for megabytes in arguments.megabytes]
        what = (arguments.operations, sizes, arguments.dtypes, arguments.rounds)
        settings = (world_size, free_ports(2), *what, str(out))
        mp.spawn(run_rank, settings, nprocs=world_size)  # type: ignore[attr-defined]
        rows += [Row(**row) for row in json.loads(out.read_text())]
        out.unlink()
    print(table(rows))
    if arguments.record:
        arguments.record.mkdir(parents=True, exist_ok=True)
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.release()}"
        versions = f"torch {torch.__version__}, syncline {syncline.__version__}, Python {platform.python_version()}"
        command = f"python benchmarks/loopback.py {' '.join(sys.argv[1:])}"
        (arguments.record / "table.txt").write_text(f"{command}\n{machine}\n{versions}\n\n{table(rows)}\n")
        (arguments.record / "results.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
