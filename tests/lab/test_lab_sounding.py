"""Ranks that no topology tells of their network measure it themselves, and all hold the same numbers."""

import json
import subprocess
import sys
from pathlib import Path

from rank_scripts import script_environment
from syncline.lab import Lab
from syncline.topology import Topology

DEADLINE_S = 120
HOST_BYTES_PER_S = 125e6
"""What the hosts' own links carry, in `two-sites`; 20 Mbit/s between the sites are no host's uplink.

A link lets a burst pass at once, so that a short message may seem faster.
"""


def test_what_is_measured_is_what_the_network_is():
    topology = Topology.load("two-sites")
    environment = {"PYTHONPATH": script_environment()["PYTHONPATH"], "WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, str(Path(__file__).with_name("lab_sounding.py"))]
    with Lab(topology) as lab:
        ranks = [
            lab.spawn(host.name, argv, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for host in topology.hosts
            for rank in topology.ranks_of(host.name)
        ]
        told = [json.loads(rank.communicate(timeout=DEADLINE_S)[0]) for rank in ranks]
    first = told[0]
    assert [{**found, "taken_s": 0} for found in told] == [{**first, "taken_s": 0}] * len(told)
    assert first["echoes"] == [[other for other in range(8) if other != host] for host in range(8)]
    assert all(HOST_BYTES_PER_S / 8 < uplink < 3 * HOST_BYTES_PER_S for uplink in first["uplinks"]), first
