"""What a clustered training puts on the lab's links is what its formula says: between sites, vectors once a period."""

import json
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab_clustered import NUM_BYTES

from rank_scripts import script_environment
from syncline.lab import Lab
from syncline.topology import Topology
from syncline.topology.tree import DirectedLink

PERIOD, REELECT_EVERY, NUM_STEPS = 4, 2, 16
DEADLINE_S = 120.0
MOST_EXCESS = 0.06
"""Headers, acknowledgements, grants, and the heads of messages."""


def start(lab, clusters):
    argv = [sys.executable, str(Path(__file__).with_name("lab_clustered.py"))]
    argv += [*map(str, (PERIOD, REELECT_EVERY, NUM_STEPS)), json.dumps(clusters)]
    common = {"PYTHONPATH": script_environment()["PYTHONPATH"], "WORLD_SIZE": str(lab.topology.num_ranks)}
    return [
        lab.spawn(
            host.name,
            argv,
            env=common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in lab.plan.hosts
        for rank in lab.topology.ranks_of(host.name)
    ]


def hear(ranks, expected):
    """Read a line from each rank; it writes a line at a time, so what can be read is a whole one."""
    deadline = time.monotonic() + DEADLINE_S
    for number, rank in enumerate(ranks):
        ready, _, _ = select.select([rank.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"rank {number} did not say {expected!r} within {DEADLINE_S:g} s"
        assert rank.stdout.readline().strip() == expected


def tell(ranks):
    for rank in ranks:
        rank.stdin.write("go on\n")
        rank.stdin.flush()


@pytest.mark.parametrize("name", ["two-sites", "three-racks-uneven-uplinks"])
def test_bytes_between_and_inside_clusters_are_as_the_formula_says(name):
    topology = Topology.load(name)
    clusters = {
        site.name: [rank for host in site.children for rank in topology.ranks_of(host.name)]
        for site in topology.root.children
    }
    with Lab(topology) as lab:
        ranks = start(lab, list(clusters.values()))
        hear(ranks, "ready")
        before = lab.link_bytes()
        tell(ranks)
        hear(ranks, "done")
        carried = {link: count - before[link] for link, count in lab.link_bytes().items()}
        tell(ranks)
        for rank in ranks:
            rank.communicate(timeout=DEADLINE_S)  # closes its pipes too
        assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    num_periods = NUM_STEPS // PERIOD
    num_exchanges = num_periods + num_periods // REELECT_EVERY
    between = num_exchanges * 2 * (len(clusters) - 1) * NUM_BYTES  # servers send 2 (C-1)/C of a vector each, on average
    for direction in ("up", "down"):
        of_sites = [carried[DirectedLink(site, direction)] for site in clusters]
        assert between <= sum(of_sites) <= between * (1 + MOST_EXCESS), direction
        if len(clusters) == 2:
            assert max(of_sites) <= between / 2 * (1 + MOST_EXCESS), direction
    num_members = topology.num_ranks - len(clusters)
    inside = num_members * (2 * NUM_STEPS + num_exchanges) * NUM_BYTES  # gradients, means, and what was exchanged
    everything = inside + between
    of_hosts = sum(carried[DirectedLink(host.name, "up")] for host in topology.hosts)
    assert everything <= of_hosts <= everything * (1 + MOST_EXCESS)
