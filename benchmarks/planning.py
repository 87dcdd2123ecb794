"""What a start plans on each rank: seconds of a processor, alone and where one rank plans for all.

Uneven racks of 64 to 1,024 ranks, 8 on a host and 1 on a host: the balanced sharded step of 64 MiB, what the others do
with rank 0's (unpack and prove it), and all-reduces and broadcasts of the sizes that a start asks for. Seconds are
those of a processor, so that a busy machine does, though not as well as an idle one.

With ``--command``: what `syncline plan` takes as a program, of 64 MiB on networks of 1,000 hosts to 100,000 ranks.

    python benchmarks/planning.py              the table, as Markdown
    python benchmarks/planning.py --command    the other one
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
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


def pods(racks: Sequence[int], num_pods: int, per_host: int, draw: random.Random | None = None) -> str:
    """Write pods with racks of so many hosts each, whose links carry 25 Gbit/s, or what is drawn for each."""
    of_pod = []
    for pod in range(num_pods):
        of_rack = []
        for rack, size in enumerate(racks):
            names = [f"p{pod}r{rack}h[0-{size - 1}]"] if draw is None else [f"p{pod}r{rack}h{k}" for k in range(size)]
            hosts = [
                f"{{host: '{name}', uplink: {draw.uniform(20, 30) if draw else 25:.4g} Gbit/s, ranks: {per_host}}}"
                for name in names
            ]
            of_rack.append(f"{{switch: p{pod}r{rack}, uplink: 100 Gbit/s, children: [{', '.join(hosts)}]}}")
        of_pod.append(f"{{switch: p{pod}, uplink: 400 Gbit/s, children: [{', '.join(of_rack)}]}}")
    return f"{{switch: core, children: [{', '.join(of_pod)}]}}"


def networks() -> dict[str, str]:
    """Return topologies of many ranks, as files have them."""
    uneven = [47 + number % 7 for number in range(25)]
    return {
        "1,000 hosts on a switch": "{switch: s, children: [{host: 'h[0-999]', uplink: 25 Gbit/s}]}",
        "1,000 hosts, 20 racks": pods([50] * 5, 4, 1),
        "4,096 hosts, 64 racks": pods([64] * 8, 8, 1),
        "100,000 ranks, 250 racks of 50 hosts": pods([50] * 25, 10, 8),
        "99,520 ranks, racks of 47 to 53": pods(uneven, 10, 8),
        "100,000 ranks, 12,500 rates": pods([50] * 25, 10, 8, random.Random(1)),
    }


def command() -> None:
    """Print one row for each network and collective: what the program took, and what it said."""
    print("| network | collective | s of a processor | s | MB | how it was verified |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, text) in enumerate(networks().items()):
            file = Path(folder) / f"n{number}.yaml"
            file.write_text(text)
            for collective in ("all_reduce", "sharded_step"):
                begun = time.monotonic()
                child = subprocess.Popen(
                    [sys.executable, "-m", "syncline", "plan", str(file), "--collective", collective],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, "COLUMNS": "120"},
                )
                assert child.stdout is not None
                proof = next(line for line in child.stdout if " is verified " in line).split(" is verified ")[1]
                child.stdout.read()
                _, _, used = os.wait4(child.pid, 0)
                seconds_s, took_s = used.ru_utime + used.ru_stime, time.monotonic() - begun
                memory = f"{used.ru_maxrss / 1e3:.0f}"
                cells = (name, collective, f"{seconds_s:.2f}", f"{took_s:.1f}", memory, proof.strip())
                print("| " + " | ".join(cells) + " |", flush=True)


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
    command() if sys.argv[1:] == ["--command"] else main()
