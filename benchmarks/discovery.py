"""How long a job takes to measure its network, and how near what it finds is to what is there.

    sudo python benchmarks/discovery.py two-racks-5-3 two-sites     # in the lab; without names, all shipped ones
    sudo python benchmarks/discovery.py --steps 5 --random 20       # training, too, and racks-0 to racks-19
    python benchmarks/discovery.py --simulated                       # rounds, seconds of the fit, and accuracy alone

In the lab one job for each topology, with ranks on hosts in no order, measures ``--times`` times. With ``--steps`` it
then trains 4.2 MB of parameters with ``Sharded()``, in three turns on what was found last and by the file: medians of
so many steps. ``--slowly`` divides all rates, so that processors, which all hosts share, do not count. Simulated are
the shipped ones, 20 random ones, and 32 hosts, on flows that are 5 % off. *off*: by how much what can pass a link,
by the tree that is found, is off what can by the file (the worst link's, and the mean); a tree is right where it has
the switches of the file that divide two or more hosts from two or more others.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from advise_lab import slowed
from torch import nn

import syncline
from syncline.cli.launcher.scratch import shared_secret
from syncline.cli.topology import compare
from syncline.discovery import discover_network
from syncline.discovery.discovery import find_tree
from syncline.discovery.tree_search import build_topology
from syncline.lab import operations
from syncline.topology import Switch, Topology

SHIPPED = ("two-racks-5-3", "three-racks-uneven-uplinks", "deep-asymmetric", "demo-1-3", "two-sites", "flat-8")
NUM_RANDOM, NOISE = 20, 0.05
NUM_TURNS = 3
RACKS_OF_32 = (
    "{switch: s, children: ["
    + ", ".join(
        f"{{switch: r{place}, uplink: {rate} Mbit/s, children: [{{host: 'r{place}h[1-{size}]', uplink: 1 Gbit/s}}]}}"
        for place, (size, rate) in enumerate([(12, 500), (8, 200), (7, 400), (5, 100)])
    )
    + "]}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How near a tree is to the one that is there."""

    is_right: bool
    worst: float
    mean: float

    @classmethod
    def of(cls, found: Topology, true: Topology) -> Accuracy:
        """Compare what is found with what is there."""
        off = [abs(each.other_bytes_per_s / each.one_bytes_per_s - 1) for each in compare(true, found)]
        return cls(is_right=divisions(found) == divisions(true), worst=max(off), mean=statistics.mean(off))

    def __str__(self) -> str:
        return f"{'yes' if self.is_right else 'no'} | {self.worst:.0%} | {self.mean:.0%}"


def divisions(topology: Topology) -> set[frozenset[frozenset[str]]]:
    """Return how the links above switches divide the hosts: which side is above is open."""
    everyone = frozenset(host.name for host in topology.hosts)
    below = (
        frozenset(host.name for host in topology.hosts if node in topology.path(host.ranks[0].rank))
        for node in topology.walk()
        if isinstance(node, Switch) and node.link is not None
    )
    return {frozenset((hosts, everyone - hosts)) for hosts in below if 1 < len(hosts) < len(everyone) - 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a job has found: in how long, how sure it is, and how long steps take by it and by the file, in turns."""

    seconds: float
    error: float
    topology: Topology
    steps_s: dict[str, list[float]]

    def __str__(self) -> str:
        if not self.steps_s:
            return ""
        found_s, file_s = (statistics.mean(self.steps_s[way]) for way in ("found", "file"))
        turns = (", ".join(f"{each:.2f}" for each in self.steps_s[way]) for way in ("found", "file"))
        return f" | {' | '.join(turns)} | {found_s / file_s:.2f}"


def measured(topology: Topology, times: int, num_steps: int) -> Iterator[Found]:
    """Yield what was found, for each time, in a lab of this topology; steps with the last."""
    options = ["--times", str(times), "--steps", str(num_steps)]
    command = [sys.executable, "-m", "syncline", "run", __file__, "--rank", *options]
    with tempfile.TemporaryFile("w+") as output, shared_secret({}) as secret:
        status = operations.run(topology, command, env=secret, output=output, errors=output)
        output.seek(0)
        lines = output.read().splitlines()
    found = [json.loads(line[line.index("{") :]) for line in lines if '{"seconds"' in line]
    if status or len(found) != times:
        raise SystemExit(f"{topology.name} ended with status {status}:\n" + "\n".join(lines[-30:]))
    for each in found:
        yield Found(**each | {"topology": Topology.parse(each["topology"])})


def be_rank(times: int, num_steps: int) -> None:
    """Measure with the other ranks of the job, and train; rank 0 prints a line for each time."""
    with syncline.init("flat") as fleet:
        finds = [discover_network(fleet.communicator) for _ in range(times)]
    steps_s: dict[str, list[float]] = {}
    for way, topology in (("found", finds[-1].topology), ("file", None)) * (NUM_TURNS if num_steps else 0):
        steps_s.setdefault(way, []).append(step_s(topology, num_steps))
    for place, found in enumerate(finds):
        row = {"seconds": found.seconds, "error": found.error, "topology": found.topology.to_yaml()}
        if fleet.rank == 0:
            print(json.dumps(row | {"steps_s": steps_s if place == times - 1 else {}}), flush=True)


def step_s(topology: Topology | None, num_steps: int) -> float:
    """Return the median time of a step, in seconds, that is planned on this topology; without, on the lab's file."""
    torch.set_num_threads(1)
    with syncline.init(topology) as fleet:
        layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]
        model = nn.Sequential(*layers)
        model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
        seconds: list[float] = []
        for _ in range(2 + num_steps):
            began_s = time.monotonic()
            model(torch.randn(1, 512) + fleet.rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.monotonic() - began_s)
    return statistics.median(seconds[2:])


def simulate(topology: Topology) -> str:
    """Return a row: hosts, rounds, seconds of a processor for fits, accuracy."""
    network = EmulatedNetwork(topology, noise=NOISE, seed=1)
    began_s = time.process_time()
    tree = find_tree(network.sites, network.measure)
    took_s = time.process_time() - began_s
    accuracy = Accuracy.of(build_topology(tree, network.flat, name="found"), topology)
    return f"| {topology.name} | {len(topology.hosts)} | {network.num_rounds} | {took_s:.2f} | {accuracy} |"


def network(name: str) -> Topology:
    """Return a shipped network, a file's, or (``racks-7``) a random one, with ranks on its hosts in no order."""
    kind, _, number = name.partition("-")
    seed = int(number) if kind == "racks" else 3
    there: Topology = shuffled(random_racks(seed) if kind == "racks" else Topology.load(name), seed=seed)
    return there


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", default=SHIPPED)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--random", type=int, default=0, help="of so many random networks, too")
    parser.add_argument("--slowly", type=int, default=1)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.times, options.steps)
        return
    there = [network(name) for name in options.topologies]
    if options.simulated:
        there += [network(f"racks-{seed}") for seed in range(NUM_RANDOM)]
        there += [Topology.flat(32, rate=125e6), shuffled(Topology.parse(RACKS_OF_32, source="racks-32"), seed=3)]
        print("| network | hosts | rounds | processor s | tree right | off, worst | mean |\n" + "|---" * 7 + "|")
        for topology in there:
            print(simulate(topology), flush=True)
        return
    there += [network(f"racks-{seed}") for seed in range(options.random)]
    more = " | step, found | by the file | ratio" if options.steps else ""
    head = f"| network | hosts | seconds | told error | tree right | off, worst | mean{more} |"
    print(head + "\n" + "|---" * (head.count("|") - 1) + "|")
    for topology in (replace(each, root=slowed(each.root, options.slowly)) for each in there):
        for found in measured(topology, options.times, options.steps):
            told = "failed" if math.isinf(found.error) else f"{found.error:.0%}"
            accuracy = Accuracy.of(found.topology, topology)
            row = f"| {topology.name} | {len(topology.hosts)} | {found.seconds:.2f} | {told} | {accuracy}{found} |"
            print(row, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "discovery"))
    from emulated_networks import EmulatedNetwork, random_racks, shuffled  # type: ignore[import-not-found]

    main()
