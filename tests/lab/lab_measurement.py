"""Flows between hosts of a lab, and what each carried."""

import json
import subprocess
import sys
import time
from pathlib import Path

TRAFFIC = Path(__file__).with_name("lab_traffic.py")


def measure_flows(lab, flows, *, window_s=1.5, warm_up_s=0.5, start_s=1.0):
    """Run ``flows`` ({"source", "destination", ...}) at once; return each with its `bytes_per_s` of payload."""
    begin = time.monotonic() + start_s + warm_up_s
    timing = {"begin": begin, "end": begin + window_s, "warm_up_s": warm_up_s}
    processes = []
    for host in lab.plan.hosts:
        own = [
            {**flow, "address": lab.plan.host(flow["destination"]).address}
            for flow in flows
            if flow["source"] == host.name
        ]
        num_incoming = sum(flow["destination"] == host.name for flow in flows)
        spec = {**timing, "flows": own, "num_incoming": num_incoming}
        if own or num_incoming:
            argv = [sys.executable, "-S", str(TRAFFIC), json.dumps(spec)]
            processes.append(lab.spawn(host.name, argv, stdout=subprocess.PIPE, text=True))
    results = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    arrived = [flow for result in results for flow in result["arrived"]]
    assert len(arrived) == len(flows)
    resent = sum(result["resent"] for result in results)
    return [{**flow, "bytes_per_s": flow["num_bytes"] / window_s} for flow in arrived], resent


def total_rate(flows):
    return sum(flow["bytes_per_s"] for flow in flows)


def jain_fairness(flows):
    """Return 1 where all flows are equal, 1/n where one has everything."""
    rates = [flow["bytes_per_s"] for flow in flows]
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))
