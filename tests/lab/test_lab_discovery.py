"""Hosts of an emulated network find its tree, with no file."""

import ast

import pytest
from lab_ranks import DEADLINE_S, start

from syncline.lab import Lab
from syncline.topology import Switch, Topology

RACKS = """
switch: core
children:
  - {switch: rack-a, uplink: {rate: 20 Mbit/s, latency: 5 ms}, children: [{host: "h[0,2,4]", uplink: 100 Mbit/s}]}
  - {switch: rack-b, uplink: {rate: 20 Mbit/s, latency: 5 ms}, children: [{host: "h[1,3]", uplink: 100 Mbit/s}]}
"""
"""Slow, so that two cores carry it while other tests run."""


def found_by(lab, word):
    """Return the topology that each rank says it has."""
    ranks = start(lab, "lab_discovery.py", word)
    said = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    return [Topology.parse(ast.literal_eval(each)) for each in said]


def test_ranks_find_the_racks_that_they_are_in(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Lab(Topology.parse(RACKS)) as lab:
        first, *others = found_by(lab, "auto")
        flat = found_by(lab, "flat")[0]
    assert all(other == first for other in others)
    racks = {
        frozenset(host.name for host in first.hosts if node in first.path(host.ranks[0].rank)): node
        for node in first.walk()
        if isinstance(node, Switch) and node.link
    }
    assert set(racks) == {frozenset({"h0", "h2", "h4"}), frozenset({"h1", "h3"})}
    for rack in racks.values():
        assert rack.link.up_bytes_per_s == pytest.approx(2.5e6, rel=0.6)
        assert rack.link.down_bytes_per_s == pytest.approx(2.5e6, rel=0.6)
        assert 0.005 <= rack.link.latency_s <= 0.015, "of both together no more than busy processors add"
    for host in first.hosts:
        assert host.link.up_bytes_per_s == pytest.approx(12.5e6, rel=0.6)
    assert not flat.has_rates
    assert len(list(tmp_path.rglob("*.yaml"))) == 1
