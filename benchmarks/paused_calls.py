"""All-reduces of so many MiB, each after a pause of so many seconds: what rank 0 waits for each.

    syncline lab run net.yaml -- syncline run benchmarks/paused_calls.py 16 1.0

After a pause the kernel begins slowly again, which takes some round trips.
"""

from __future__ import annotations

import sys
import time

import torch

import syncline

with syncline.init() as fleet:
    mib, pause_s = int(sys.argv[1]), float(sys.argv[2])
    values = torch.ones(mib << 18)
    took_s = []
    for _ in range(8):
        time.sleep(pause_s)
        fleet.barrier()
        begin_s = time.perf_counter()
        fleet.all_reduce(values)
        took_s.append(time.perf_counter() - begin_s)
    if fleet.rank == 0:
        print(" ".join(f"{each:.3f}" for each in took_s), flush=True)
