"""What ``syncline advise`` predicts, beside the same steps in the lab: the step's time, and which rule is fastest.

    sudo python benchmarks/advise_lab.py --to rows.jsonl
    python benchmarks/advise_lab.py --tables rows.jsonl

On each shipped topology, and for each of three models (``advise_lab_rank.py``), every rule that ``advise`` names trains
in the lab, one after the other in one job. A row is written for each as its job ends; jobs whose rows are there are not
made again. The latency of a topology is left out of both.

The processors of one machine stand for those of all hosts (``--one-machine``). What the emulated network takes of them
``advise`` leaves out: fast networks are emulated in slow motion, with rates divided and computing multiplied by the
same number (``SLOWLY``), predictions too; ``--slowly 1`` is their real pace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from advise_lab_rank import BACKWARD_PER_FORWARD, MEASURED_STEPS, MODELS, RING, TIMES

from syncline.cli.launcher.scratch import shared_secret
from syncline.lab import operations
from syncline.priorities.settings import Priorities
from syncline.topology import Link, Switch, Topology

RANK = Path(__file__).with_name("advise_lab_rank.py")
NETWORKS = (
    "flat-8",
    "two-racks-5-3",
    "three-racks-uneven-uplinks",
    "deep-asymmetric",
    "two-sites",
    "demo-1-3",
)
SLOWLY = {"two-sites": 1}
"""How many times slower a network and what is computed on it are; 3 for the others, which hold 2 cores a third busy."""
TIED = 0.05
"""Rules whose steps differ by less are equally fast."""
WITHIN = 0.15


def slowed(node: Any, times: int) -> Any:
    """Return the tree with the rates alone, divided."""
    if node.link is not None:
        up, down = node.link.up_bytes_per_s / times, node.link.down_bytes_per_s / times
        node = replace(node, link=Link(up_bytes_per_s=up, down_bytes_per_s=down))
    children = (slowed(child, times) for child in node.children) if isinstance(node, Switch) else ()
    return replace(node, children=tuple(children)) if isinstance(node, Switch) else node


def advice(network: Path, model: str, times: int) -> list[dict[str, Any]]:
    """Ask ``syncline advise`` as a user does; return its rules."""
    spec = f"{RANK}:{model.replace(' ', '_')}"
    compute = ["--compute", f"{times * sum(MODELS[model].forward_ms) * (1 + BACKWARD_PER_FORWARD)} ms"]
    command = [sys.executable, "-m", "syncline", "advise", str(network), "--model", spec, *compute]
    command += ["--one-machine", "--json"]
    environment = {**os.environ, TIMES: str(times)}
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    return list(told["rules"])


def measure(topology: Topology, model: str, rules: list[str], folder: Path, times: int) -> dict[str, list[float]]:
    """Train by each rule in the lab; return the seconds of rank 0's steps."""
    said = folder / "said"
    command = [sys.executable, "-m", "syncline", "run", str(RANK), model, json.dumps(rules)]
    with shared_secret({}) as secret, said.open("w+") as output:
        status = operations.run(topology, command, env={**secret, TIMES: str(times)}, output=output)
    lines = said.read_text().splitlines()
    found = [json.loads(line[line.index("{") :]) for line in lines if '{"rule"' in line]
    if status or len(found) < len(rules):
        said_last = "\n".join(lines[-20:])
        raise SystemExit(f"a job ended with status {status}, after {len(found)} of {len(rules)} rules:\n{said_last}")
    return {row["rule"]: row["steps_s"] for row in found}


def rows_of(network: str, model: str, times: int) -> Iterator[dict[str, Any]]:
    """Yield one row for each rule."""
    topology = Topology.load(network)
    early = Priorities(measure_steps=MEASURED_STEPS)
    topology = replace(topology, root=slowed(topology.root, times), priorities=early)
    with tempfile.TemporaryDirectory(prefix="syncline-advise-") as name:
        file = Path(name) / "network.yaml"
        file.write_text(topology.to_yaml())
        predicted = advice(file, model, times)
        measured = measure(topology, model, [row["name"] for row in predicted], Path(name), times)
    for row in predicted:
        steps_s = measured[row["name"]]
        shares = {"predicted_s": row["step_s"], "measured_s": median(steps_s), "steps_s": steps_s}
        yield {"network": network, "model": model, "rule": row["name"], "slowly": times, **shares}


def error(row: dict[str, Any]) -> float:
    """Return by how much of the measured step the prediction is above it."""
    return float(row["predicted_s"] / row["measured_s"] - 1)


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of jobs and one of rules."""
    yield "| network | model | rules within 15 % | largest error | pairs in order | advised | fastest | lost |"
    yield "|---|---|---|---|---|---|---|---|"
    for network, model in dict.fromkeys((row["network"], row["model"]) for row in rows):
        here = [row for row in rows if (row["network"], row["model"]) == (network, model)]
        yield _job(network, model, here)
    yield ""
    yield "| rule | jobs | within 15 % | median error | from | to |"
    yield "|---|---|---|---|---|---|"
    for rule in dict.fromkeys(row["rule"] for row in rows):
        errors = sorted(error(row) for row in rows if row["rule"] == rule)
        near = sum(abs(each) <= WITHIN for each in errors)
        yield f"| `{rule}` | {len(errors)} | {near} | {median(errors):+.0%} | {errors[0]:+.0%} | {errors[-1]:+.0%} |"


def _job(network: str, model: str, here: list[dict[str, Any]]) -> str:
    ours = [row for row in here if row["rule"] != RING]
    near, worst = sum(abs(error(row)) <= WITHIN for row in here), max(here, key=lambda row: abs(error(row)))
    pairs = [(one, other) for one in here for other in here if one["measured_s"] * (1 + TIED) < other["measured_s"]]
    right = sum(one["predicted_s"] < other["predicted_s"] * (1 + TIED) for one, other in pairs)
    advised, fastest = (min(ours, key=lambda row: row[key]) for key in ("predicted_s", "measured_s"))
    lost = advised["measured_s"] / fastest["measured_s"] - 1
    return (
        f"| {network} | {model} | {near} of {len(here)} | {error(worst):+.0%} `{worst['rule']}` | "
        f"{right} of {len(pairs)} | `{advised['rule']}` | `{fastest['rule']}` | {lost:.0%} |"
    )


def main() -> None:
    """Make the jobs that are not there yet, or print the tables of those that are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--slowly", type=int, help="how many times slower all is, in place of the networks' numbers")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--tables", type=Path, help="print the tables of these rows, and measure nothing")
    options = parser.parse_args()
    if options.tables:
        print("\n".join(tables([json.loads(line) for line in options.tables.read_text().splitlines()])))
        return
    there = options.to.read_text().splitlines() if options.to.exists() else []
    done = {(row["network"], row["model"]) for row in map(json.loads, there)}
    for network in options.networks:
        for model in options.models:
            if (network, model) not in done:
                made = list(rows_of(network, model, options.slowly or SLOWLY.get(network, 3)))
                with options.to.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in made)
                print(_job(network, model, made), flush=True)


if __name__ == "__main__":
    main()
