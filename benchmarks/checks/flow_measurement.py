"""Flows between hosts of a lab, and what each carried."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from syncline.lab import Lab

Flow = dict[str, Any]

TRAFFIC = Path(__file__).with_name("flow_traffic.py")
PATIENCE_S = 60


def measure_flows(
    lab: Lab, flows: Sequence[Flow], *, window_s: float = 1.5, warm_up_s: float = 0.5
) -> tuple[list[Flow], int]:
    """Run ``flows`` ({"source", "destination", ...}) at once; return each with its `bytes_per_s` of payload.

    `stolen` is for how long processors were away meanwhile, all together, as part of the time that was measured.
    The second result is the number of segments that were sent again, warm-up included.
    """
    processes = [process for host in lab.plan.hosts if (process := start_traffic(lab, host.name, flows))]
    tell(processes, "listening", "connect")
    begin = time.monotonic() + warm_up_s
    tell(processes, "ready", json.dumps([begin, begin + window_s]))
    results = [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    arrived = [flow for result in results for flow in result["arrived"]]
    assert len(arrived) == len(flows)
    return arrived, sum(result["resent"] for result in results)


def tell(processes: Sequence[subprocess.Popen[str]], awaited: str, text: str) -> None:
    """Write a line to all processes once all of them have written ``awaited``."""
    for process in processes:
        assert pipe(process.stdout).readline() == f"{awaited}\n"
    for process in processes:
        pipe(process.stdin).write(f"{text}\n")
        pipe(process.stdin).flush()


def pipe(one: IO[str] | None) -> IO[str]:
    """Return a pipe that is there."""
    assert one is not None
    return one


def start_traffic(lab: Lab, host: str, flows: Sequence[Flow]) -> subprocess.Popen[str] | None:
    """Start the generator on a host; None where no flow begins or ends there."""
    outgoing = [flow for flow in flows if flow["source"] == host]
    num_incoming = sum(flow["destination"] == host for flow in flows)
    if not outgoing and not num_incoming:
        return None
    addressed = [{**flow, "address": lab.plan.host(flow["destination"]).address} for flow in outgoing]
    argv = [sys.executable, "-S", str(TRAFFIC), json.dumps({"flows": addressed, "num_incoming": num_incoming})]
    process: subprocess.Popen[str] = lab.spawn(host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process


def total_rate(flows: Sequence[Flow]) -> float:
    """Return what flows carried together."""
    return float(sum(flow["bytes_per_s"] for flow in flows))


def undisturbed(flows: Sequence[Flow]) -> float:
    """Return the least part of the time in which this machine had all its processors, but no less than half.

    Where machines share processors, each may be taken away at any time, one after the other in the worst case; a link
    is idle as long as the processor is away that its packets or its timer are on. A link that carries less than half
    of what it should is not excused by that.
    """
    return max(0.5, 1.0 - float(max(flow["stolen"] for flow in flows)))


def jain_fairness(flows: Sequence[Flow]) -> float:
    """Return 1 where all flows are equal, 1/n where one has everything."""
    rates = [float(flow["bytes_per_s"]) for flow in flows]
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))
