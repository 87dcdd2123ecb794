"""Flows between hosts of a lab, and what each carried."""

import json
import subprocess
import sys
import time
from pathlib import Path

TRAFFIC = Path(__file__).with_name("lab_traffic.py")
PATIENCE_S = 60


def measure_flows(lab, flows, *, window_s=1.5, warm_up_s=0.5):
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


def tell(processes, awaited, text):
    """Write a line to all processes once all of them have written ``awaited``."""
    for process in processes:
        assert process.stdout.readline() == f"{awaited}\n"
    for process in processes:
        process.stdin.write(f"{text}\n")
        process.stdin.flush()


def start_traffic(lab, host, flows):
    """Start the generator on a host; None where no flow begins or ends there."""
    outgoing = [flow for flow in flows if flow["source"] == host]
    num_incoming = sum(flow["destination"] == host for flow in flows)
    if not outgoing and not num_incoming:
        return None
    addressed = [{**flow, "address": lab.plan.host(flow["destination"]).address} for flow in outgoing]
    argv = [sys.executable, "-S", str(TRAFFIC), json.dumps({"flows": addressed, "num_incoming": num_incoming})]
    return lab.spawn(host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def total_rate(flows):
    return sum(flow["bytes_per_s"] for flow in flows)


def undisturbed(flows):
    """Return the least part of the time in which this machine had all its processors, but no less than half.

    Where machines share processors, each may be taken away at any time, one after the other in the worst case; a link
    is idle as long as the processor is away that its packets or its timer are on. A link that carries less than half
    of what it should is not excused by that.
    """
    return max(0.5, 1.0 - max(flow["stolen"] for flow in flows))


def jain_fairness(flows):
    """Return 1 where all flows are equal, 1/n where one has everything."""
    rates = [flow["bytes_per_s"] for flow in flows]
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))
