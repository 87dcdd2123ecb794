"""All-reduces over links that lose packets: this library and gloo, each with bbr and with cubic, in turns.

    syncline lab run net.yaml -- syncline run benchmarks/losses.py 4 16 --rounds 5

Each size is in MiB. A process sets the control of the routes of its host before it connects, so it is for the lab.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from syncline.pytorch.environment import Arguments, find_group, read_environment
from syncline.pytorch.init import open_fleet

Call = Callable[[torch.Tensor], object]


def connect(control: str) -> dict[str, Call]:
    """Return an all-reduce of this library and one of gloo whose connections have that control."""
    interface = ("dev", os.environ["SYNCLINE_INTERFACE"])
    network, *_, address = _ip("-4", "route", "show", "scope", "link", *interface).split("src")[0:2]
    _ip(
        "route",
        "replace",
        network.split()[0],
        *interface,
        "scope",
        "link",
        "src",
        address.split()[0],
        "congctl",
        control,
    )
    if dist.is_initialized():
        group = dist.new_group()
    else:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    given = Arguments(insecure=True, congestion=control, job_id=control)
    fleet = open_fleet(read_environment(given=given, group=find_group()), is_current=False)

    def gloo(values: torch.Tensor) -> None:
        dist.all_reduce(values, group=group)

    return {f"ours, {control}": fleet.all_reduce, f"gloo, {control}": gloo}


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def resent() -> int:
    """Return how many segments all hosts have sent again."""
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
    total = torch.tensor([int(values[names.index("RetransSegs")])])
    dist.all_reduce(total)
    return int(total)


def measure(calls: dict[str, Call], mib: int, num_rounds: int) -> None:
    """Print, for each, the median and all seconds of its calls, and how many segments TCP sent again in each."""
    values = torch.zeros(mib << 18)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    again = dict.fromkeys(calls, 0)
    for turn in range(num_rounds + 1):
        for name, call in calls.items():
            before = resent()
            begin_s = time.perf_counter()
            call(values)
            taken_s = time.perf_counter() - begin_s
            num_resent = resent() - before
            if turn:
                seconds[name].append(taken_s)
                again[name] += num_resent
    if dist.get_rank():
        return
    for name, each in seconds.items():
        shown = " ".join(f"{one:.2f}" for one in sorted(each))
        load = os.getloadavg()[0]
        print(
            f"{mib:3} MiB  {name:12} {statistics.median(each):6.2f} s  ({shown})  {again[name] / num_rounds:.0f} resent"
            f"  load {load:.1f}",
            flush=True,
        )


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mib", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--controls", nargs="+", default=["bbr", "cubic"])
    parser.add_argument("--without-gloo", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls: dict[str, Call] = {}
    for control in options.controls:
        calls |= connect(control)
    calls = {name: call for name, call in calls.items() if not (options.without_gloo and name.startswith("gloo"))}
    for mib in options.mib:
        measure(calls, mib, options.rounds)
    os._exit(0)


if __name__ == "__main__":
    main()
