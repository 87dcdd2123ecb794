"""The shipped topologies load by name, with the hosts and rates that the benchmarks count on."""

import pytest

from syncline.errors import TopologyError
from syncline.topology import Topology
from syncline.topology.document import shipped_names


def test_all_names():
    assert shipped_names() == (
        "deep-asymmetric", "demo-1-3", "flat-8", "three-racks-uneven-uplinks", "two-racks-5-3", "two-sites",
    )  # fmt: skip


@pytest.mark.parametrize("name", shipped_names())
def test_each_loads_and_reads_back(name):
    topology = Topology.load(name)
    assert topology.name == name
    assert topology.source == f"{name}.yaml"
    assert [host.name for host in topology.hosts] == [f"h{k}" for k in range(len(topology.hosts))]
    assert Topology.parse(topology.to_yaml()) == topology


@pytest.mark.parametrize(
    ("name", "host_rate", "uplinks"),
    [
        ("two-racks-5-3", 125e6, {"rack-a": (5, 25e6), "rack-b": (3, 25e6)}),
        ("three-racks-uneven-uplinks", 125e6, {"rack-a": (2, 12.5e6), "rack-b": (3, 25e6), "rack-c": (4, 50e6)}),
        ("two-sites", 125e6, {"site-a": (4, 2.5e6), "site-b": (4, 2.5e6)}),
        ("demo-1-3", 125e6, {"rack-a": (1, 25e6), "rack-b": (3, 25e6)}),
        ("flat-8", 125e6, {}),
    ],
)
def test_rates(name, host_rate, uplinks):
    topology = Topology.load(name)
    links = dict(topology.links())
    assert all(
        links[host.name].up_bytes_per_s == links[host.name].down_bytes_per_s == host_rate for host in topology.hosts
    )
    for rack, (num_hosts, rate) in uplinks.items():
        assert len(topology.node(rack).children) == num_hosts
        assert (links[rack].up_bytes_per_s, links[rack].down_bytes_per_s) == (rate, rate)


def test_two_sites_are_far_apart():
    assert dict(Topology.load("two-sites").links())["site-a"].latency_s == 0.01


def test_a_file_goes_before_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flat-8").write_text("host: mine\n")
    assert Topology.load("flat-8").root.name == "mine"


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(TopologyError, match=r"'nowhere' cannot be read .*shipped topologies: deep-asymmetric"):
        Topology.load("nowhere")
    with pytest.raises(TopologyError, match="cannot be read"):
        Topology.load(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TopologyError, match="is not UTF-8"):
        Topology.load(tmp_path / "bytes.yaml")
