"""What a start plans on each rank: seconds of a processor, alone and where one rank plans for all.

Uneven racks of 64 to 1,024 ranks, 8 on a host and 1 on a host: the balanced sharded step of 64 MiB, what the others do
with rank 0's (unpack and prove it), and all-reduces and broadcasts of the sizes that a start asks for. Seconds are
those of a processor, so that a busy machine does, though not as well as an idle one.

    python benchmarks/planning.py    the table, as Markdown
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from syncline.runtime.plans import Plans
from syncline.schedule import Collective, plan_sharded_step
from syncline.schedule.sharded_step import pack_step, unpack_step
from syncline.topology import Topology

NUM_BYTES = 64 << 20
JOBS = [(64, 8), (64, 1), (256, 8), (256, 1), (512, 8), (512, 1), (1024, 8), (1024, 1)]
SIZES = {Collective.ALL_REDUCE: (32, 512, 2 << 20, 4 << 20), Collective.BROADCAST: (1, 2 << 20, 4 << 20)}


def uneven_racks(num_ranks: int, per_host: int) -> Topology:
    """Build some nine racks, whose sizes differ by a host and whose uplinks carry 1 to 3 Gbit/s, as their hosts' 1."""
    racks: list[str] = []
    left, most = num_ranks // per_host, max(1, num_ranks // per_host // 8)
    while left:
        number = len(racks)
        size = max(1, min(left, most + number % 3 - 1))
        host = f"{{host: 'h{number}-[0-{size - 1}]', uplink: 1 Gbit/s, ranks: {per_host}}}"
        racks.append(f"{{switch: r{number}, uplink: {1 + number % 3} Gbit/s, children: [{host}]}}")
        left -= size
    return Topology.parse(f"{{switch: core, children: [{', '.join(racks)}]}}")


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long a processor was busy with ``work``, and what it returned."""
    begun = time.process_time()
    result = work()
    return time.process_time() - begun, result


def whole_calls(topology: Topology) -> None:
    """Plan all-reduces and broadcasts of the sizes that a start asks for."""
    plans = Plans(topology, slice_bytes=None)
    for collective, sizes in SIZES.items():
        for size in sizes:
            plans.schedule(collective, size)


def main() -> None:
    """Print one row for each job."""
    plan_sharded_step(Topology.flat(4, rate=1e6), 1 << 20)  # loads the solver
    print("| ranks | on a host | all-reduces and broadcasts | sharded step | packed (KB) | unpacked and proved |")
    print("|---|---|---|---|---|---|")
    for num_ranks, per_host in JOBS:
        topology = uneven_racks(num_ranks, per_host)
        slice_bytes = Plans(topology, slice_bytes=None).bucket_slice_bytes(4 << 20)
        calls_s, _ = seconds(lambda: whole_calls(topology))  # noqa: B023  # called at once
        step_s, step = seconds(lambda: plan_sharded_step(topology, NUM_BYTES, slice_bytes=slice_bytes))  # noqa: B023
        cells = [str(num_ranks), str(per_host), f"{calls_s:.2f}", f"{step_s:.2f}"]
        packed = pack_step(step)
        told_s, _ = seconds(lambda: unpack_step(packed))  # noqa: B023  # called at once
        cells += [f"{len(packed) / 1e3:.0f}", f"{told_s:.3f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
