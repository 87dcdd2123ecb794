"""What a job does when an uplink is halved in mid-job and given back later, beside jobs that begin on each network.

    sudo python benchmarks/rates_change.py --link rack-b --runs 3 --to rows.jsonl

In the lab, ``Sharded()`` trains on what the topology says and follows the rates of links (``init(replan=True)``). After
some time the link has half its rate, and later its own one again; meanwhile every rank goes on, and nothing tells it.
Then two jobs train on the same lab from the start, each with a file that is true. For each change a row is written as
the run ends: after how many seconds the job had planned again, and the medians of steps before that and from then on,
beside those of the job that knew.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from advise_lab_rank import Layer
from hidden_faults_kinds import limit
from torch import nn

import syncline
from syncline.cli.launcher.scratch import shared_secret
from syncline.lab import Lab
from syncline.lab.operations import run_on_hosts
from syncline.topology import DirectedLink, Topology
from syncline.topology.tree import relinked

NUM_LAYERS, LAYER_NUMBERS, FORWARD_S = 8, 1 << 19, 0.01
BEFORE_S, CHANGED_S, AFTER_S, KNOWN_S = 45.0, 110.0, 110.0, 40.0
NUM_LEADING = 3
"""Steps after which what was left from the plan before, or the start, is over."""


def train(topology: str, seconds: float, *, follows: bool) -> None:
    """Train for so long; rank 0 prints when each step ended, how long it took, and how often it had planned again."""
    torch.set_num_threads(1)
    with syncline.init(topology, replan=follows) as fleet:
        model = nn.Sequential(*(Layer(LAYER_NUMBERS, FORWARD_S) for _ in range(NUM_LAYERS)))
        own = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        model, optimizer = syncline.distribute(model, own, syncline.Sharded())
        is_over, end_s, last_s = torch.zeros(1), time.time() + seconds, time.time()
        while not is_over.item():
            model(torch.ones(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            now_s = time.time()
            if fleet.rank == 0:
                num_plans = fleet.follower.num_plans if fleet.follower is not None else 0
                print(json.dumps({"at_s": now_s, "step_s": now_s - last_s, "plans": num_plans}), flush=True)
            last_s = now_s
            is_over.fill_(now_s > end_s)
            fleet.broadcast(is_over)


def steps_of(lab: Lab, network: Topology, folder: Path, seconds: float, *, follows: bool) -> list[dict[str, Any]]:
    """Train on every host of the lab, and return what rank 0 printed."""
    file, said = folder / "network.yaml", folder / "said"
    file.write_text(network.to_yaml())
    rank = [sys.executable, "-m", "syncline", "run", __file__, "--rank", str(file), str(seconds)]
    with shared_secret({}) as secret, said.open("w+") as output:
        command = [*rank, *(["--follows"] if follows else [])]
        status = run_on_hosts(lab, command, env=secret, report=print, output=output, errors=sys.stderr)
    lines = said.read_text().splitlines()
    if status:
        raise SystemExit(f"a job ended with status {status}:\n" + "\n".join(lines[-20:]))
    return [json.loads(line[line.index("{") :]) for line in lines if '{"at_s"' in line]


def change_of(steps: list[dict[str, Any]], at_s: float, until_s: float, known_s: float) -> dict[str, Any]:
    """Return what became of the steps after a change, beside those of a job that knew of it."""
    since = [step for step in steps if at_s < step["at_s"] - step["step_s"] and step["at_s"] < until_s]
    num_plans = max(step["plans"] for step in steps if step["at_s"] <= at_s)
    old = [step["step_s"] for step in since if step["plans"] == num_plans]
    new = [step for step in since if step["plans"] > num_plans]
    planned = {"planned_after_s": new[0]["at_s"] - at_s, "pause_s": new[0]["step_s"]} if new else {}
    later = [step["step_s"] for step in new[NUM_LEADING:]]
    return {"step_s": median(old), **planned, "then_s": median(later) if later else None, "known_s": known_s}


def rows_of(network: str, link: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for the change, and one for the way back."""
    whole = Topology.load(network)
    own = dict(whole.links())[link]
    half = replace(own, up_bytes_per_s=own.up_bytes_per_s / 2, down_bytes_per_s=own.down_bytes_per_s / 2)
    halved = replace(whole, root=relinked(whole.root, {link: half}))
    changes_s: list[float] = []

    def set_rates(lab: Lab, topology: Topology) -> None:
        for way in ("up", "down"):
            limit(lab, DirectedLink(link, way), topology.bytes_per_s(DirectedLink(link, way)))
        changes_s.append(time.time())

    with Lab(whole) as lab:
        timers = [
            threading.Timer(BEFORE_S, set_rates, (lab, halved)),
            threading.Timer(BEFORE_S + CHANGED_S, set_rates, (lab, whole)),
        ]
        for timer in timers:
            timer.start()
        steps = steps_of(lab, whole, folder, BEFORE_S + CHANGED_S + AFTER_S, follows=True)
        known_s = {}
        for name, topology in (("whole", whole), ("halved", halved)):
            set_rates(lab, topology)
            known = steps_of(lab, topology, folder, KNOWN_S, follows=False)
            known_s[name] = median(step["step_s"] for step in known[NUM_LEADING:])
    first_s, second_s = changes_s[:2]
    yield {"change": f"{link} halved", **change_of(steps, first_s, second_s, known_s["halved"])}
    yield {"change": f"{link} given back", **change_of(steps, second_s, steps[-1]["at_s"], known_s["whole"])}


def main() -> None:
    """Make the runs, or be one rank of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="three-racks-uneven-uplinks")
    parser.add_argument("--link", default="rack-b")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--to", type=Path, default=Path("rates_change.jsonl"))
    parser.add_argument("--rank", nargs=2, metavar=("TOPOLOGY", "SECONDS"), help=argparse.SUPPRESS)
    parser.add_argument("--follows", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train(options.rank[0], float(options.rank[1]), follows=options.follows)
        return
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="syncline-rates-") as name:
            rows = list(rows_of(options.network, options.link, Path(name)))
        with options.to.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print("\n".join(map(json.dumps, rows)), flush=True)


if __name__ == "__main__":
    main()
