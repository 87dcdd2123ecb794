"""Links whose rates have changed are found, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulated_networks import EmulatedNetwork

from syncline.discovery.discovery import flows_of_links
from syncline.discovery.following import changed_rates
from syncline.discovery.tree_search import Round
from syncline.topology import Link, Switch, Topology


def with_uplink(known: Topology, name: str, factor: float) -> Topology:
    """Return the topology in which a switch's uplink is so many times as fast."""

    def scaled(link: Link) -> Link:
        return Link(up_bytes_per_s=link.up_bytes_per_s * factor, down_bytes_per_s=link.down_bytes_per_s * factor)

    children = tuple(
        replace(child, link=scaled(child.link)) if child.name == name and child.link else child
        for child in known.root.children
    )
    assert isinstance(known.root, Switch)
    return replace(known, root=replace(known.root, children=children))


@pytest.mark.parametrize(
    ("shipped", "before", "now"),
    [
        ("two-racks-5-3", 1.0, 0.5),
        ("two-racks-5-3", 0.5, 1.0),
        ("three-racks-uneven-uplinks", 0.5, 1.0),
    ],
)
def test_an_uplink_that_is_halved_and_given_back_is_found(shipped: str, before: float, now: float) -> None:
    known, true = (with_uplink(Topology.load(shipped), "rack-a", factor) for factor in (before, now))
    ranks = list(range(known.num_ranks))
    network = EmulatedNetwork(true, noise=0.08, seed=3)
    measured = [network.measure(flows) for part in flows_of_links(known, ranks, network.sites) for flows in part]
    payload = [Round(each.flows, tuple(0.9 * rate for rate in each.rates)) for each in measured]
    found = changed_rates(known, ranks, payload)
    links = dict(true.links())
    assert [name for name, link in found.links() if link != dict(known.links())[name]] == ["rack-a"]
    for name, link in found.links():
        for way in ("up", "down"):
            assert link.bytes_per_s(way) == pytest.approx(links[name].bytes_per_s(way), rel=0.1)


@pytest.mark.parametrize("shipped", ["two-racks-5-3", "deep-asymmetric"])
def test_what_is_as_it_was_stays_as_it_was(shipped: str) -> None:
    known = Topology.load(shipped)
    ranks = [host.ranks[0].rank for host in known.hosts]
    network = EmulatedNetwork(known, noise=0.1, seed=5, outliers=0.02)
    rounds = [network.measure(flows) for part in flows_of_links(known, ranks, network.sites) for flows in part]
    assert changed_rates(known, ranks, rounds) is known
