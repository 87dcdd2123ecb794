"""Small calls: barriers, all-reduces, many at once, and messages, on process groups, fleets, gloo and MPI.

All have the same ranks in the same processes. They take turns, in the other order every second round. Of each call two
times are told: of one that comes after a barrier of gloo, when all ranks have woken up for it at different moments, and
of one of many in a row; each is that of the slowest rank. On loopback, in the lab, and (with mpi4py) beside MPI:

    syncline run --ranks 4 benchmarks/backend_calls.py
    syncline lab run two-racks-5-3 -- syncline run benchmarks/backend_calls.py
    mpiexec -n 2 python benchmarks/backend_calls.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import syncline

SIZES_KIB = (1, 4, 16, 64, 1024, 16384)
NUM_WARM_UPS = 10
ROUND_TRIPS_KIB = (4, 64, 1024)
NUM_AT_ONCE = 100
ROW_BYTES, LONGEST_ROW = 16 << 20, 50
"""How much is moved in a row, and by how many calls at most."""
UNDER_MPI = "OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ

Calls = dict[str, Callable[[], object]]


def calls_of(group: dist.ProcessGroup) -> Calls:
    """Return what is measured of a process group, by name."""
    calls: Calls = {"barrier": partial(dist.barrier, group=group)}
    for size_kib in SIZES_KIB:
        calls[f"all_reduce {size_kib} KiB"] = partial(dist.all_reduce, torch.zeros(size_kib * 256), group=group)
    calls[f"{NUM_AT_ONCE} all_reduces 4 KiB"] = partial(reduce_at_once, group)
    send, receive = partial(dist.send, group=group), partial(dist.recv, group=group)
    return calls | round_trips(dist.get_rank(), dist.get_world_size(), send, receive, torch.zeros)


def calls_of_fleet(fleet: syncline.Fleet) -> Calls:
    """Return the same of a fleet, which sends no messages."""
    reductions: Calls = {
        f"all_reduce {size_kib} KiB": partial(fleet.all_reduce, torch.zeros(size_kib * 256)) for size_kib in SIZES_KIB
    }
    return {"barrier": fleet.barrier} | reductions


def calls_of_mpi() -> Calls:
    """Return the same of MPI, with memory of numpy."""
    import numpy as np
    from mpi4py import MPI

    world, zeros = MPI.COMM_WORLD, partial(np.zeros, dtype=np.float32)
    reductions: Calls = {
        f"all_reduce {size_kib} KiB": partial(world.Allreduce, MPI.IN_PLACE, zeros(size_kib * 256))
        for size_kib in SIZES_KIB
    }
    trips = round_trips(world.rank, world.size, world.Send, world.Recv, zeros)
    return {"barrier": world.Barrier} | reductions | trips


def round_trips(
    rank: int, size: int, send: Callable[..., Any], receive: Callable[..., Any], zeros: Callable[[int], Any]
) -> Calls:
    """Let each even rank send to the next, and that one back, all pairs at once; a last one without a partner idles."""
    partner = rank ^ 1
    if partner >= size:
        return {f"round trip {size_kib} KiB": lambda: None for size_kib in ROUND_TRIPS_KIB}
    first, second = (send, receive) if rank < partner else (receive, send)

    def make(memory: Any) -> None:
        first(memory, partner)
        second(memory, partner)

    return {f"round trip {size_kib} KiB": partial(make, zeros(size_kib * 256)) for size_kib in ROUND_TRIPS_KIB}


def reduce_at_once(group: dist.ProcessGroup) -> None:
    """Begin many all-reduces, and wait for all."""
    works = [dist.all_reduce(torch.zeros(1024), group=group, async_op=True) for _ in range(NUM_AT_ONCE)]
    for work in works:
        work.wait()


def measure(call: Callable[[], object], num_calls: int) -> float:
    """Seconds of a call of so many in a row, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    elapsed = torch.tensor([(time.perf_counter() - start) / num_calls])
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def row_length(name: str) -> int:
    """How many calls are made in a row: as many as move so much together."""
    words = name.split()
    size_bytes = int(words[-2]) << 10 if words[-1] == "KiB" else 0
    if words[0] == str(NUM_AT_ONCE):
        size_bytes *= NUM_AT_ONCE
    return max(1, min(LONGEST_ROW, ROW_BYTES // max(size_bytes, 1)))


def measure_all(libraries: dict[str, Calls], rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the medians in microseconds, by call and library: of a call by itself, and of one in a row."""
    medians_us: dict[str, dict[str, tuple[float, float]]] = {}
    for name in libraries["gloo"]:
        calls = {library: calls[name] for library, calls in libraries.items() if name in calls}
        seconds: dict[str, tuple[list[float], list[float]]] = {library: ([], []) for library in calls}
        for number in range(-NUM_WARM_UPS, rounds):
            for library in sorted(calls, reverse=bool(number % 2)):
                measured_s = [measure(calls[library], length) for length in (1, row_length(name))]
                if number >= 0:
                    for times, one_s in zip(seconds[library], measured_s, strict=True):
                        times.append(one_s)
        medians_us[name] = {
            library: (statistics.median(alone) * 1e6, statistics.median(in_row) * 1e6)
            for library, (alone, in_row) in seconds.items()
        }
    return medians_us


def find_place() -> None:
    """Under MPI, tell all ranks where rank 0 listens: a launcher of ours does that in variables."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = world.bcast(one.getsockname()[1])
    place = {"RANK": world.rank, "WORLD_SIZE": world.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})


def main() -> None:
    """Measure on all ranks; rank 0 prints the table, and writes it where it is told to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", default="", help="calls whose names begin so")
    parser.add_argument("--record", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if UNDER_MPI:
        find_place()
    dist.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        # Its own way to rank 0 would be the port on which gloo's ranks have met.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        fleet = stack.enter_context(syncline.init())
        gloo = calls_of(dist.new_group(backend="gloo"))
        libraries = {
            "syncline": calls_of(dist.new_group(backend="syncline")),
            "fleet": calls_of_fleet(fleet),
            "gloo": {name: call for name, call in gloo.items() if name.startswith(arguments.only)},
        }
        if UNDER_MPI:
            libraries["mpi"] = calls_of_mpi()
        medians_us = measure_all(libraries, arguments.rounds)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks, microseconds, medians of {arguments.rounds}: alone / in a row")
            for name, row in medians_us.items():
                figures = (f"{library} {alone:>7.1f} /{in_row:>7.1f}" for library, (alone, in_row) in row.items())
                print(f"{name:<22}", "   ".join(figures))
            if arguments.record:
                arguments.record.write_text(json.dumps(medians_us, indent=1))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
