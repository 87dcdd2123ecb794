"""What a clustered training puts on the lab's links is what its formula says: between sites, vectors once a period."""

import json

import pytest
from lab_clustered import NUM_BYTES
from lab_ranks import carried_between, start

from syncline.lab import Lab
from syncline.topology import Topology
from syncline.topology.tree import DirectedLink

PERIOD, REELECT_EVERY, NUM_STEPS = 4, 2, 16
MOST_EXCESS = 0.06
"""Headers, acknowledgements, grants, and the heads of messages."""


@pytest.mark.parametrize("name", ["two-sites", "three-racks-uneven-uplinks"])
def test_bytes_between_and_inside_clusters_are_as_the_formula_says(name):
    topology = Topology.load(name)
    clusters = {
        site.name: [rank for host in site.children for rank in topology.ranks_of(host.name)]
        for site in topology.root.children
    }
    arguments = (*map(str, (PERIOD, REELECT_EVERY, NUM_STEPS)), json.dumps(list(clusters.values())))
    with Lab(topology) as lab:
        carried = carried_between(lab, start(lab, "lab_clustered.py", *arguments))
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
