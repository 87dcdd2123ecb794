"""What steps of `Sharded()` put on the links of hosts of several ranks: each range once for each host."""

import pytest
from lab_ranks import carried_between, start
from lab_sharded import NUM_BYTES, NUM_LAYERS

from syncline.lab import Lab
from syncline.schedule import plan_sharded_step
from syncline.topology import DirectedLink, Topology

NUM_STEPS = 4
MOST_EXCESS = 0.06
"""Headers, acknowledgements, grants, and what the ranks say to each other beside the buckets."""


def hosts_of(*num_ranks, gateway="every"):
    """Return hosts a, b ... of so many ranks at one switch."""
    hosts = ", ".join(
        f"{{host: {name}, uplink: 1 Gbit/s, ranks: {number}, gateway: {gateway}}}"
        for name, number in zip("abc", num_ranks, strict=True)
    )
    return Topology.parse(f"{{switch: s, children: [{hosts}]}}")


def planned(topology):
    """Return the bytes that one step puts on each link, in both halves together, and on each host's link both ways."""
    step = plan_sharded_step(topology, NUM_BYTES // NUM_LAYERS)
    halves = [half.link_bytes(topology, NUM_BYTES) for half in (step.reduce_scatter, step.all_gather)]
    return {link: sum(half.get(link, 0) for half in halves) for link in halves[0]}


@pytest.mark.parametrize("gateway", ["every", "one"])
def test_a_step_puts_each_range_on_a_hosts_link_once(gateway):
    """A host sends what others own and what it owns to each of them: as many bytes as if it had one rank."""
    topology = hosts_of(2, 3, 1, gateway=gateway)
    expected = planned(topology)
    of_hosts = [expected[DirectedLink(host, way)] for host in "abc" for way in ("up", "down")]
    alone = planned(hosts_of(1, 1, 1))
    assert sum(of_hosts) == pytest.approx(sum(alone[link] for link in alone if link.child in "abc"), rel=1e-3)
    with Lab(topology) as lab:
        carried = carried_between(lab, start(lab, "lab_sharded.py", str(NUM_STEPS)))
    for host in "abc":
        for way in ("up", "down"):
            link = DirectedLink(host, way)
            planned_bytes = NUM_STEPS * expected[link]
            assert planned_bytes <= carried[link] <= planned_bytes * (1 + MOST_EXCESS), link
