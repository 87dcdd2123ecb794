"""Whether many ranks on one machine come together, and how long it takes, beside gloo's, in turns.

    python benchmarks/many_ranks.py --ranks 64 --times 20

Ranks are forked when PyTorch and this library are imported, so that starting them, joining, and a first all-reduce of
one number are timed. A start that fails, or that takes longer than ``--patience``, is counted and shown.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
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
    options = parser.parse_args()
    found: dict[str, list[float]] = {backend: [] for backend in options.backends}
    for _ in range(options.times):
        for backend in options.backends:
            took_s, wrong = start(backend, options.ranks, options.patience)
            print(f"{backend}: {took_s:.2f} s, {len(wrong)} ranks failed", *wrong[:3], sep="\n  ", flush=True)
            found[backend] += [] if wrong else [took_s]
    for backend, seconds in found.items():
        times = f"median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s" if seconds else ""
        print(f"{backend}, {options.ranks} ranks: {len(seconds)} of {options.times} came together; {times}")


if __name__ == "__main__":
    main()
