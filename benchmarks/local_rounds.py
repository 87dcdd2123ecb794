"""Steps per second of local steps with rounds between, in the lab: our rules beside torchft's ``DiLoCo``.

    sudo python benchmarks/local_rounds.py two-sites --to rows.jsonl
    sudo python benchmarks/local_rounds.py two-sites --mib 3 --only alone 'LocalSteps(period=16)' --to rows.jsonl

Each method is a job of its own on every rank of the topology. torchft (0.2 was tried) must be installed; without it
its methods are left out. The losses that these methods reach are those of ``syncline bench convergence``: this is about
what a step takes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from advise_lab_rank import TIMES

from syncline.cli.launcher.scratch import shared_secret
from syncline.lab import operations
from syncline.topology import Topology

RANK = Path(__file__).with_name("local_rounds_rank.py")
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "computing alone"},
    {"method": "LocalSteps(period=16)", "rule": "LocalSteps(period=16)"},
    {"method": "LocalSteps(parties=None, period=16)", "rule": "LocalSteps(parties=None, period=16)"},
    {
        "method": "LocalSteps, DiLoCo's outer step, waited for",
        "rule": "LocalSteps(outer=Nesterov(learning_rate=0.7, momentum=0.9), fragments=1, parties=None, overlap=False)",
    },
    *(
        {"method": rule, "rule": rule}
        for rule in (
            "LocalSteps(within=Sharded(), period=16)",
            "Clustered()",
            "Clustered(within=AllReduce())",
            "Clustered(within=Sharded())",
            "AllReduce()",
            "Sharded()",
        )
    ),
    {"method": "torchft DiLoCo", "torchft": {}},
    {"method": "torchft DiLoCo, 2 fragments, delay 4", "torchft": {"fragments": 2, "fragment_sync_delay": 4}},
)


def measure(topology: Topology, *, mib: float, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each method whose name ends with one of ``only``."""
    for task in METHODS:
        is_missing = "torchft" in task and importlib.util.find_spec("torchft") is None
        if is_missing or not task["method"].endswith(tuple(only)):
            continue
        work = json.dumps({**task, "mib": mib})
        command = [sys.executable, "-m", "syncline", "run", str(RANK), work]
        with tempfile.TemporaryFile("w+") as output, shared_secret({}) as secret:
            status = operations.run(topology, command, env={**secret, TIMES: "1"}, output=output, errors=output)
            output.seek(0)
            lines = output.read().splitlines()
        found = [json.loads(line[line.index("{") :]) for line in lines if '{"method"' in line]
        if status or not found:
            raise SystemExit(f"{task['method']} ended with status {status}:\n" + "\n".join(lines[-30:]))
        yield {"network": topology.name, "mib": mib, **found[0]}


def main() -> None:
    """Measure all methods, write rows, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology")
    parser.add_argument("--mib", type=float, default=1.5, help="parameters; the default is the GPT's of convergence")
    parser.add_argument("--only", nargs="+", default=[""], metavar="METHOD", help="what the names of methods end with")
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    print("| method | step, mean | longest step | sent by rank 0's host, a step |\n|---|---|---|---|")
    for row in measure(Topology.load(options.topology), mib=options.mib, only=options.only):
        with options.to.open("a") as file:
            file.write(json.dumps(row) + "\n")
        mean_s, most_s = statistics.mean(row["steps_s"]), max(row["steps_s"])
        sent = row["sent_bytes"] / len(row["steps_s"]) / 1024
        print(f"| {row['method']} | {mean_s:.3f} s | {most_s:.2f} s | {sent:.0f} KiB |", flush=True)


if __name__ == "__main__":
    main()
