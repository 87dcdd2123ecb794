"""Whether many ranks on one machine come together, and how long it takes, beside gloo's, in turns.

    python benchmarks/many_ranks.py --ranks 64 --times 20

Ranks are forked when PyTorch and this library are imported, so that starting them, joining, and a first all-reduce of
one number are timed. A start that fails, or that takes longer than ``--patience``, is counted and shown.

    python benchmarks/many_ranks.py --ranks 32 --times 3 --fresh

starts Python for each rank. Timed is a rank's first call, ``init`` or ``init_process_group``, from the end of its own
import of PyTorch and this library to the call's: of the median rank, and what it takes of a processor.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import syncline


def join(backend: str, rank: int, num_ranks: int, port: int, pipe: Connection) -> None:
    """Be one rank; tell the parent how it ended."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
    torch.set_num_threads(1)
    numbers = torch.ones(1)
    try:
        if backend == "fleet":
            with syncline.init() as fleet:
                fleet.all_reduce(numbers)
        else:
            dist.init_process_group(backend)
            dist.all_reduce(numbers)
            dist.destroy_process_group()
        pipe.send(None if numbers.item() == num_ranks else f"the sum was {numbers.item()}")
    except Exception as error:  # whatever it is, it is shown
        pipe.send(f"{type(error).__name__}: {error}")


def join_fresh(backend: str) -> None:
    """Be one rank in a process of its own; print how long its first call takes, and of a processor."""
    torch.set_num_threads(1)
    numbers, began_s, used_s = torch.ones(1), time.monotonic(), time.process_time()
    fleet = syncline.init() if backend == "fleet" else dist.init_process_group(backend)
    print(json.dumps([time.monotonic() - began_s, time.process_time() - used_s]), flush=True)
    if fleet is not None:
        fleet.all_reduce(numbers)
        fleet.close()
    else:
        dist.all_reduce(numbers)
        dist.destroy_process_group()
    if numbers.item() != int(os.environ["WORLD_SIZE"]):
        raise SystemExit(f"the sum was {numbers.item()}")


def start_fresh(backend: str, num_ranks: int, patience: float) -> tuple[float, list[str]]:
    """Start a Python for each rank; return how long the median rank's first call took, and what went wrong."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    command = [sys.executable, __file__, "--be", backend]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(num_ranks),
            },
            stdout=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]
    until_s = time.monotonic() + patience
    found = [json.loads(last_words(process, until_s) or "[Infinity, 0.0]") for process in ranks]
    print(f"of a processor, each rank: {statistics.mean(used_s for _, used_s in found):.3f} s")
    wrong = [f"rank {rank}: status {process.returncode}" for rank, process in enumerate(ranks) if process.returncode]
    return statistics.median(took_s for took_s, _ in found), wrong


def last_words(process: subprocess.Popen[bytes], until_s: float) -> bytes:
    """Return what a rank has printed; it is ended then."""
    try:
        return process.communicate(timeout=max(0.0, until_s - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def start(backend: str, num_ranks: int, patience: float) -> tuple[float, list[str]]:
    """Start all ranks; return how long it took, and what went wrong."""
    fork, port, began_s = get_context("fork"), free_port(), time.perf_counter()
    pairs: list[tuple[Any, Connection]] = []
    for rank in range(num_ranks):
        here, there = fork.Pipe(duplex=False)
        process = fork.Process(target=join, args=(backend, rank, num_ranks, port, there))
        process.start()
        there.close()
        pairs.append((process, here))
    wrong = []
    for rank, (_, pipe) in enumerate(pairs):
        try:
            is_there = pipe.poll(max(0.0, began_s + patience - time.perf_counter()))
            found = pipe.recv() if is_there else f"nothing within {patience:g} s"
        except EOFError:
            found = "ended without a word"
        wrong += [f"rank {rank}: {found}"] if found else []
    took_s = time.perf_counter() - began_s
    for process, _ in pairs:
        if wrong:
            process.kill()
        process.join()
    return took_s, wrong


def main() -> None:
    """Start each backend so many times, and print how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--patience", type=float, default=120.0)
    parser.add_argument("--backends", nargs="*", default=["fleet", "syncline", "gloo"])
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        join_fresh(options.be)
        return
    begin = start_fresh if options.fresh else start
    found: dict[str, list[float]] = {backend: [] for backend in options.backends}
    for _ in range(options.times):
        for backend in options.backends:
            took_s, wrong = begin(backend, options.ranks, options.patience)
            print(f"{backend}: {took_s:.2f} s, {len(wrong)} ranks failed", *wrong[:3], sep="\n  ", flush=True)
            found[backend] += [] if wrong else [took_s]
    for backend, seconds in found.items():
        times = f"median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s" if seconds else ""
        print(f"{backend}, {options.ranks} ranks: {len(seconds)} of {options.times} came together; {times}")


if __name__ == "__main__":
    main()
