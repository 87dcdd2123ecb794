"""What a real all-reduce puts on each link of the lab is what the schedule says."""

import subprocess
from pathlib import Path

import pytest

from rank_scripts import forked_python, script_environment
from syncline.lab import Lab
from syncline.runtime.plans import Plans
from syncline.schedule import Collective
from syncline.topology import DirectedLink, Topology

NUM_BYTES = 16 << 20
MOST_EXCESS = 0.06
"""Headers, acknowledgements, grants, and what the ranks say to each other before and after."""
HERE = Path(__file__).parent


def all_reduce(lab, folder, *, congestion=""):
    """Run it on every rank of the lab, and return what the ranks printed."""
    path = script_environment()["PYTHONPATH"]
    ranks = [
        lab.spawn(
            host.name,
            [
                forked_python(),
                str(HERE / "lab_all_reduce.py"),
                str(folder),
                str(rank),
                host.address,
                str(NUM_BYTES),
                congestion,
            ],
            env={"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in lab.plan.hosts
        for rank in lab.topology.ranks_of(host.name)
    ]
    return [rank.communicate(timeout=60)[0].strip() for rank in ranks]


def test_an_all_reduce_is_right_where_queues_are_too_short_for_what_senders_make_of_them(tmp_path):
    with Lab("two-racks-5-3", queues="short", congestion="bbr") as lab:
        assert all_reduce(lab, tmp_path, congestion="bbr") == ["right"] * 8
        dropped = {link.child for link, number in lab.dropped_packets().items() if number}
    assert dropped >= {"rack-a", "rack-b"}


GATEWAYS = Topology.parse(
    "{switch: s, children: [{host: a, uplink: 1 Gbit/s, ranks: 2, gateway: one}, {host: c, uplink: 1 Gbit/s}, "
    "{host: b, uplink: 1 Gbit/s, ranks: 3, gateway: one}]}"
)


def test_behind_gateways_each_range_is_planned_once_for_each_host():
    schedule = Plans(GATEWAYS, slice_bytes=None).schedule(Collective.ALL_REDUCE, NUM_BYTES)
    planned = schedule.link_bytes(GATEWAYS, NUM_BYTES)
    assert {round(planned[DirectedLink(host, "up")] / NUM_BYTES, 3) for host in "abc"} == {1.333}  # 2 (R - 1)/R


@pytest.mark.parametrize(
    "topology",
    [Topology.load("two-racks-5-3"), Topology.load("deep-asymmetric"), GATEWAYS],
    ids=["two-racks-5-3", "deep-asymmetric", "gateways"],
)
def test_an_all_reduce_puts_on_each_link_what_its_plan_says(topology, tmp_path):
    schedule = Plans(topology, slice_bytes=None).schedule(Collective.ALL_REDUCE, NUM_BYTES)
    with Lab(topology) as lab:
        before = lab.link_bytes()
        assert all_reduce(lab, tmp_path) == ["right"] * topology.num_ranks
        carried = {link: count - before[link] for link, count in lab.link_bytes().items()}
    planned = schedule.link_bytes(topology, NUM_BYTES)
    assert carried.keys() <= planned.keys()
    assert len(carried) >= 2 * len(topology.hosts)
    for link, num_bytes in carried.items():
        assert planned[link] <= num_bytes <= planned[link] * (1 + MOST_EXCESS), link
