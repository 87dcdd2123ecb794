"""What a newcomer lacks crosses each link once, from the nearest member."""

import json
import subprocess
from pathlib import Path

import pytest

from rank_scripts import forked_python, script_environment
from syncline.lab import Lab
from syncline.topology import Topology
from syncline.topology.tree import DirectedLink

NUM_BYTES = 16 << 20
MOST_EXCESS = 0.25
"""Headers, acknowledgements, and the steps that are made meanwhile."""
DEADLINE_S = 120.0
TREE = """
topology: two-racks
switch: core
children:
  - {switch: rack-a, uplink: 300 Mbit/s, children: [{host: "a[0-1]", uplink: 1 Gbit/s}]}
  - {switch: rack-b, uplink: 300 Mbit/s, children: [{host: "b[0-1]", uplink: 1 Gbit/s}]}
"""


def start(lab, host, *arguments, **variables):
    environment = {"PYTHONPATH": script_environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    argv = [forked_python(), str(Path(__file__).with_name("lab_growth.py")), *arguments]
    return lab.spawn(host, argv, env=environment | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def play(num_bytes):
    """Lose a rank and take it back in; return what all told at the end, and what each link carried meanwhile."""
    with Lab(Topology.parse(TREE)) as lab:
        ranks = [
            start(lab, host, str(num_bytes), RANK=str(rank), WORLD_SIZE="4")
            for rank, host in enumerate(("a0", "a1", "b0", "b1"))
        ]
        member = ranks[0].stdout.readline().strip()
        ranks[3].communicate(timeout=DEADLINE_S)
        before = lab.link_bytes()
        newcomer = start(lab, "b1", str(num_bytes), member)
        assert newcomer.stdout.readline() == "may wait\n"
        for rank in ranks[:3]:
            rank.stdin.write("go on\n")
            rank.stdin.flush()
        ranks[3] = newcomer
        outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
        carried = {link: count - before[link] for link, count in lab.link_bytes().items()}
    return [json.loads(output.splitlines()[-1]) for output in outputs], carried


@pytest.mark.parametrize("num_bytes", [NUM_BYTES])
def test_who_comes_back_is_given_its_state_by_its_neighbour(num_bytes):
    told, carried = play(num_bytes)
    assert len({one["sum"] for one in told}) == 1, "the newcomer has what all have"
    assert told[0]["members"] == [0, 1, 2, 4]
    for link in (DirectedLink("b0", "up"), DirectedLink("b1", "down")):
        assert num_bytes < carried[link] < (1 + MOST_EXCESS) * num_bytes, carried
    for link in (DirectedLink("rack-a", "up"), DirectedLink("rack-b", "down"), DirectedLink("a1", "up")):
        assert carried[link] < MOST_EXCESS * num_bytes, carried
