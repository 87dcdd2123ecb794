"""One rank of the jobs that ``local_rounds.py`` times: local steps with rounds between, by this library or torchft.

Its argument is a JSON object: a method, the MiB of parameters, and the rule as Python has it, or the arguments of
torchft's ``DiLoCo``; with neither each rank trains alone. Every rank computes by sleeping (see ``advise_lab_rank.py``).
Rank 0 prints the seconds of each of its steps, and the bytes that its host has sent in them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from advise_lab_rank import Shape, rule_of
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import syncline

PERIOD, NUM_PERIODS = 16, 4
"""The first is not timed."""
NUM_LAYERS = 6
LIGHTHOUSE_PORT = 29_700
PATIENCE = timedelta(minutes=2)


def build(mib: float) -> nn.Module:
    """Build a model of ``mib`` MiB, in layers that compute for 100 ms in a step."""
    return Shape(mib=(mib / NUM_LAYERS,) * NUM_LAYERS, forward_ms=(100 / 3 / NUM_LAYERS,) * NUM_LAYERS).build()


def own_address() -> str:
    """Return the address by which this host reaches rank 0's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))
        address: str = probe.getsockname()[0]
    return address


def sent_bytes() -> int:
    """Return what this host has sent by its interfaces but loopback."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(counts.split()[8]) for name, counts in lines if name.strip() != "lo")


def train(model: nn.Module, step: Callable[[], object]) -> tuple[list[float], int]:
    """Make all steps; return the seconds of those that count, and the bytes sent in them."""
    x, ends_s, before = torch.ones(1), [], 0
    for number in range(PERIOD * NUM_PERIODS):
        model(x).backward()
        step()
        if number == PERIOD - 1:
            before = sent_bytes()
        ends_s.append(time.perf_counter())
    starts_s = ends_s[PERIOD - 1 :]
    return [after - begun for begun, after in pairwise(starts_s)], sent_bytes() - before


def by_syncline(model: nn.Module, rule: str | None) -> tuple[list[float], int]:
    """Train by a rule of ours, or alone."""
    with syncline.init():
        trained = model
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if rule is not None:
            trained, optimizer = syncline.distribute(model, optimizer, update=rule_of(rule))

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return train(trained, step)


def by_torchft(model: nn.Module, arguments: dict[str, Any]) -> tuple[list[float], int]:
    """Train by torchft: every rank is a replica group of one; the lighthouse is rank 0's."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found,unused-ignore]
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found,unused-ignore]
    from torchft.manager import Manager  # type: ignore[import-not-found,unused-ignore]
    from torchft.process_group import ProcessGroupGloo  # type: ignore[import-not-found,unused-ignore]

    rank, num_ranks, address = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), own_address()
    lighthouse = f"{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}"
    server = LighthouseServer(bind=f"[::]:{LIGHTHOUSE_PORT}", min_replicas=num_ranks) if rank == 0 else None
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=num_ranks,
        use_async_quorum=False,
        timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{lighthouse}",
        replica_id=f"replica_{rank}",
        hostname=address,
        init_sync=False,
    )
    layers = list(model.children())
    count = arguments.pop("fragments", 1)
    parts = [nn.Sequential(*layers[at * len(layers) // count : (at + 1) * len(layers) // count]) for at in range(count)]
    with ExitStack() as stack:
        stack.callback(manager.shutdown)
        stack.enter_context(DiLoCo(manager, parts, inner, outer, sync_every=PERIOD, pin_memory=False, **arguments))

        def step() -> None:
            inner.step()
            inner.zero_grad()

        found = train(model, step)
    del server
    return found


def main() -> None:
    """Train by one method."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model = build(task["mib"])
    by_peer = "torchft" in task
    steps_s, num_bytes = by_torchft(model, task["torchft"]) if by_peer else by_syncline(model, task.get("rule"))
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"method": task["method"], "steps_s": steps_s, "sent_bytes": num_bytes}), flush=True)


if __name__ == "__main__":
    main()
