"""Small calls of torch.distributed: barriers, all-reduces, many at once, and messages, on our backend and on gloo.

Both groups have the same ranks in the same processes. They take turns, call by call, in the other order every second
round; a time is that of the slowest rank, and calls begin after a barrier of gloo. On loopback, and in the lab:

    syncline run --ranks 4 benchmarks/backend_calls.py
    syncline lab run two-racks-5-3 -- syncline run benchmarks/backend_calls.py
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from loopback import measure

SIZES_KIB = (1, 4, 16, 64)
NUM_WARM_UPS = 20
ROUND_TRIPS_KIB = (4, 64, 1024)
NUM_AT_ONCE = 100
BACKENDS = ("syncline", "gloo")


def calls_of(group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    calls: dict[str, Callable[[], object]] = {"barrier": partial(dist.barrier, group=group)}
    for size_kib in SIZES_KIB:
        tensor = torch.zeros(size_kib * 256)
        calls[f"all_reduce {size_kib} KiB"] = partial(dist.all_reduce, tensor, group=group)
    calls[f"{NUM_AT_ONCE} all_reduces 4 KiB"] = partial(reduce_at_once, group)
    for size_kib in ROUND_TRIPS_KIB:
        calls[f"round trip {size_kib} KiB"] = partial(make_round_trip, torch.zeros(size_kib * 256), group)
    return calls


def reduce_at_once(group: dist.ProcessGroup) -> None:
    """Begin many all-reduces, and wait for all."""
    works = [dist.all_reduce(torch.zeros(1024), group=group, async_op=True) for _ in range(NUM_AT_ONCE)]
    for work in works:
        work.wait()


def make_round_trip(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Let each even rank send to the next, and that one back, all pairs at once; a last one without a partner idles."""
    rank = dist.get_rank()
    partner = rank ^ 1
    if partner >= dist.get_world_size():
        return
    first, second = (dist.send, dist.recv) if rank < partner else (dist.recv, dist.send)
    first(tensor, partner, group=group)
    second(tensor, partner, group=group)


def main() -> None:
    """Measure on all ranks; rank 0 prints the table, and writes it where it is told to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--record", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    of_backends = {backend: calls_of(dist.new_group(backend=backend)) for backend in BACKENDS}
    medians_us: dict[str, dict[str, float]] = {}
    for name in of_backends["gloo"]:
        seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for i in range(-NUM_WARM_UPS, arguments.rounds):
            for backend in sorted(BACKENDS, reverse=bool(i % 2)):
                measured_s = measure(of_backends[backend][name])
                if i >= 0:
                    seconds[backend].append(measured_s)
        medians_us[name] = {backend: statistics.median(times) * 1e6 for backend, times in seconds.items()}
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, microseconds, median of {arguments.rounds}")
        for name, row in medians_us.items():
            print(f"{name:<20} syncline {row['syncline']:>8.0f}   gloo {row['gloo']:>8.0f}")
        if arguments.record:
            arguments.record.write_text(json.dumps(medians_us, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
