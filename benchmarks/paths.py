"""What a topology cannot say: networks with several ways between two switches, beside the trees that stand for them.

    sudo python benchmarks/paths.py [--steps 8]

The lab emulates trees. Here the uplinks of one are cut into parts once it is built, so that they are:

- *two ways*: two racks of 4 hosts, and in place of one link of 50 Mbit/s between them two of 25; a connection goes by
  the one that its ports say, as switches choose by a hash;
- *own lines*: three sites of 3 hosts, each joined to each other one by 25 Mbit/s, in place of an uplink of 50.

Each is measured, and trains 4.2 MB of parameters with ``Sharded()`` and ``AllReduce()``, planned on what was found and
on the tree of the same rates (medians of so many steps, in turns). *a tree* is the same without the cut. All rates are
low, so that processors, which all hosts share, do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import nn

import syncline
from syncline.cli.launcher.scratch import shared_secret
from syncline.discovery import discover_network
from syncline.lab import operations
from syncline.lab.lab import Lab
from syncline.lab.plan import LabLink
from syncline.lab.programs import Batch, run_batch
from syncline.topology import Switch, Topology

WAY = "25mbit"
QUEUE = "bfifo limit 262144"
TWO_RACKS = (
    "{topology: two ways, switch: core, children: ["
    + ", ".join(
        f"{{switch: {name}, uplink: 50 Mbit/s, children: [{{host: '{name}[0-3]', uplink: 250 Mbit/s}}]}}"
        for name in ("a", "b")
    )
    + "]}"
)
THREE_SITES = (
    "{topology: own lines, switch: core, children: ["
    + ", ".join(
        f"{{switch: {name}, uplink: 50 Mbit/s, children: [{{host: '{name}[0-2]', uplink: 250 Mbit/s}}]}}"
        for name in ("a", "b", "c")
    )
    + "]}"
)
RULES: dict[str, Callable[[], syncline.updates.UpdateRule]] = {
    "Sharded()": syncline.Sharded,
    "AllReduce()": syncline.AllReduce,
}
NUM_TURNS = 2


def uplinks(lab: Lab) -> list[LabLink]:
    """Return the links above the racks, or sites."""
    return [link for link in lab.plan.links if isinstance(lab.topology.node(link.child), Switch)]


def cut(lab: Lab, filters: Callable[[LabLink], Iterator[str]]) -> None:
    """Cut what goes up each uplink in two, and let ``filters`` say what goes by which; what comes down is not held."""
    for link in uplinks(lab):
        up = link.lower_interface
        lines = [f"qdisc del dev {link.upper_interface} root", f"qdisc del dev {up} root"]
        lines += [f"qdisc add dev {up} root handle 1: htb default 10"]
        for way in (10, 11):
            lines += [f"class add dev {up} parent 1: classid 1:{way} htb rate {WAY} ceil {WAY} burst 16k cburst 16k"]
            lines += [f"qdisc add dev {up} parent 1:{way} handle {way}0: {QUEUE}"]
        lines += [f"filter add dev {up} parent 1: protocol ip prio 1 u32 {each}" for each in filters(link)]
        run_batch(Batch(program="tc", namespace=lab.plan.switch_namespace, lines=tuple(lines)))


def cut_by_ports(lab: Lab) -> None:
    """Let connections whose ports differ in the last but one bit go a way of their own; Linux chooses the last."""

    def filters(_: LabLink) -> Iterator[str]:
        for source, target in ((0, 2), (2, 0)):
            yield f"match ip sport {source} 0x0002 match ip dport {target} 0x0002 flowid 1:11"

    cut(lab, filters)


def cut_by_sites(lab: Lab) -> None:
    """Let what goes to the last of the other sites go a way of its own."""
    addresses = {host.name: host.address for host in lab.plan.hosts}

    def filters(link: LabLink) -> Iterator[str]:
        last = [other.child for other in uplinks(lab) if other.child != link.child][-1]
        for host in lab.topology.hosts:
            if host.name.startswith(last):
                yield f"match ip dst {addresses[host.name]}/32 flowid 1:11"

    cut(lab, filters)


NETWORKS = {
    "two ways": (TWO_RACKS, cut_by_ports),
    "own lines": (THREE_SITES, cut_by_sites),
}


def be_rank(num_steps: int) -> None:
    """Measure, and train by what was found and by the file, in turns; rank 0 prints both."""
    torch.set_num_threads(1)
    with syncline.init("flat") as fleet:
        found, rank = discover_network(fleet.communicator).topology, fleet.rank
    steps_s: dict[str, dict[str, list[float]]] = {rule: {"found": [], "file": []} for rule in RULES}
    for _ in range(NUM_TURNS):
        for way, topology in (("found", found), ("file", None)):
            with syncline.init(topology, replan=False) as fleet:
                for rule, make in RULES.items():
                    steps_s[rule][way] += train(make(), num_steps, fleet.rank)
    if rank == 0:
        medians = {rule: {way: statistics.median(each) for way, each in ways.items()} for rule, ways in steps_s.items()}
        print(json.dumps({"found": found.to_yaml(), "steps_s": medians}), flush=True)


def train(rule: syncline.updates.UpdateRule, num_steps: int, rank: int) -> list[float]:
    """Return the seconds of each step but the first two."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), update=rule)
    ends_s = []
    for _ in range(2 + num_steps):
        model(torch.randn(1, 512) + rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.monotonic())
    return [after - before for before, after in pairwise(ends_s[1:])]


def measure(topology: Topology, change: Callable[[Lab], None], num_steps: int) -> dict[str, object]:
    """Return what rank 0 prints in a lab of this topology that was changed."""
    command = [sys.executable, "-m", "syncline", "run", __file__, "--rank", "--steps", str(num_steps)]
    with tempfile.TemporaryFile("w+") as output, shared_secret({}) as secret, Lab(topology) as lab:
        change(lab)
        streams = {"output": output, "errors": output}
        status = operations.run_on_hosts(lab, command, env=secret, report=lambda _: None, **streams)
        output.seek(0)
        lines = output.read().splitlines()
    if status:
        raise SystemExit(f"{topology.name} ended with status {status}:\n" + "\n".join(lines[-30:]))
    (row,) = [json.loads(line[line.index("{") :]) for line in lines if '{"found"' in line]
    return dict(row)


def main() -> None:
    """Print what was found, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.steps)
        return
    rows = ["| network | uplinks | rule | step, found | by the file |", "|---|---|---|---|---|"]
    for name, (text, change) in NETWORKS.items():
        topology = Topology.parse(text)
        for how, changed in (("a tree", lambda _: None), (name, change)):
            told = measure(topology, changed, options.steps)
            print(f"{name}, {how}:\n{Topology.parse(str(told['found'])).render()}\n", flush=True)
            for rule, seconds in dict(told["steps_s"]).items():  # type: ignore[call-overload]
                rows.append(f"| {name} | {how} | `{rule}` | {seconds['found']:.2f} s | {seconds['file']:.2f} s |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
