"""How long a job takes to measure its network, and how near what it finds is to what is there.

    sudo python benchmarks/discovery.py two-racks-5-3 two-sites     # in the lab; without names, all shipped ones
    python benchmarks/discovery.py --simulated                       # rounds, seconds of the fit, and accuracy alone

In the lab one job for each topology, with ranks on hosts in no order, measures ``--times`` times. Simulated are the
shipped ones, 20 random ones, and 32 hosts, on flows that are 5 % off. *off*: by how much what can pass a link, by the
tree that is found, is off what can by the file (the worst link's, and the mean); a tree is right where it has the
switches of the file that divide two or more hosts from two or more others.
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
from dataclasses import dataclass
from pathlib import Path

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


def measured(topology: Topology, times: int) -> Iterator[tuple[float, float, Topology]]:
    """Yield seconds, the error that is told, and what was found, for each time, in a lab of this topology."""
    command = [sys.executable, "-m", "syncline.cli.main", "run", __file__, "--rank", "--times", str(times)]
    with tempfile.TemporaryFile("w+") as output, shared_secret({}) as secret:
        status = operations.run(topology, command, env=secret, output=output, errors=output)
        output.seek(0)
        lines = output.read().splitlines()
    found = [json.loads(line[line.index("{") :]) for line in lines if '{"seconds"' in line]
    if status or len(found) != times:
        raise SystemExit(f"{topology.name} ended with status {status}:\n" + "\n".join(lines[-30:]))
    for each in found:
        yield each["seconds"], each["error"], Topology.parse(each["found"])


def be_rank(times: int) -> None:
    """Measure with the other ranks of the job; rank 0 prints a line for each time."""
    with syncline.init("flat") as fleet:
        for _ in range(times):
            found = discover_network(fleet.communicator)
            if fleet.rank == 0:
                row = {"seconds": found.seconds, "error": found.error, "found": found.topology.to_yaml()}
                print(json.dumps(row), flush=True)


def simulate(topology: Topology) -> str:
    """Return a row: hosts, rounds, seconds of a processor for fits, accuracy."""
    network = EmulatedNetwork(topology, noise=NOISE, seed=1)
    began_s = time.process_time()
    tree = find_tree(network.sites, network.measure)
    took_s = time.process_time() - began_s
    accuracy = Accuracy.of(build_topology(tree, network.flat, name="found"), topology)
    return f"| {topology.name} | {len(topology.hosts)} | {network.num_rounds} | {took_s:.2f} | {accuracy} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", default=SHIPPED)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.times)
        return
    there = [shuffled(Topology.load(name), seed=3) for name in options.topologies]
    if options.simulated:
        there += [shuffled(random_racks(seed), seed=seed) for seed in range(NUM_RANDOM)]
        there += [Topology.flat(32, rate=125e6), shuffled(Topology.parse(RACKS_OF_32, source="racks-32"), seed=3)]
        print("| network | hosts | rounds | processor s | tree right | off, worst | mean |\n" + "|---" * 7 + "|")
        for topology in there:
            print(simulate(topology), flush=True)
        return
    print("| network | hosts | seconds | told error | tree right | off, worst | mean |\n" + "|---" * 7 + "|")
    for topology in there:
        for seconds, error, found in measured(topology, options.times):
            told = "failed" if math.isinf(error) else f"{error:.0%}"
            accuracy = Accuracy.of(found, topology)
            print(f"| {topology.name} | {len(topology.hosts)} | {seconds:.2f} | {told} | {accuracy} |", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "discovery"))
    from emulated_networks import EmulatedNetwork, random_racks, shuffled  # type: ignore[import-not-found]

    main()
