"""Ranks that no topology tells of their network measure it themselves, and make clusters of what they measured."""

import json
import subprocess
from pathlib import Path

from rank_scripts import forked_python, script_environment
from syncline.lab import Lab
from syncline.machines.network import CLEAR_FACTOR
from syncline.topology import Topology

DEADLINE_S = 120
FAST, SLOW = range(3), range(3, 6)
RATIO = 25
"""Far above what is asserted: a processor that others use too takes from the fast rates alone."""
NETWORK = f"""
switch: core
children:
  - {{host: 'h[0-2]', uplink: {4 * RATIO} Mbit/s}}
  - {{host: 'h[3-5]', uplink: 4 Mbit/s}}
"""


def test_ranks_measure_which_uplinks_are_slow_and_divide_themselves_by_that():
    topology = Topology.parse(NETWORK)
    common = {"PYTHONPATH": script_environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    common["WORLD_SIZE"] = str(topology.num_ranks)
    argv = [forked_python(), str(Path(__file__).with_name("lab_probe.py"))]
    with Lab(topology) as lab:
        ranks = [
            lab.spawn(host.name, argv, env=common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for host in topology.hosts
            for rank in topology.ranks_of(host.name)
        ]
        told = [json.loads(rank.communicate(timeout=DEADLINE_S)[0]) for rank in ranks]
    first = told[0]
    assert told == [first] * len(told)
    for host, (echoes, rates) in enumerate(first["network"]):
        assert [other for other, _ in echoes] == [other for other in range(6) if other != host]
        assert len(rates) == 4
    slowest_fast = min(first["uplinks"][host] for host in FAST)
    assert slowest_fast > CLEAR_FACTOR * max(first["uplinks"][host] for host in SLOW), first["uplinks"]
    assert first["clusters"] == [list(FAST), list(SLOW)]
