"""Slurm's topology.conf: read as a tree, with its mistakes named by line."""

import pytest

from syncline.errors import TopologyError
from syncline.topology import Topology


def test_a_tree():
    topology = Topology.from_slurm(
        "# comment\n\nSwitchName=leaf1 Nodes=n[01-02]  # two\nswitchname=leaf2 LinkSpeed=5 NODES=n03\n"
        "SwitchName=spine Switches=leaf[1-2] Nodes=login\n",
        host_rate=1e8,
        uplink_rate=2e8,
        ranks_per_host=2,
        source="topology.conf",
    )
    assert [host.name for host in topology.hosts] == ["n01", "n02", "n03", "login"]
    assert topology.ranks_of("n02") == (2, 3)
    assert [node.name for node in topology.path(4)] == ["rank 4", "n03", "leaf2"]
    links = dict(topology.links())
    assert (links["leaf1"].up_bytes_per_s, links["n01"].down_bytes_per_s) == (2e8, 1e8)
    assert topology.lines["n03"] == 4
    assert Topology.parse(topology.to_yaml()) == topology


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file names no switch"),
        ("SwitchName=a Nodes=x\nSwitchName=b Nodes=y", 2, "nothing joins the switches a,b; add a line 'SwitchName=top"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", 1, "every switch is below another"),
        ("SwitchName=t Nodes=x\nSwitchName=a Switches=b\nSwitchName=b Switches=a", 2, "switch 'a' is below itself"),
        ("SwitchName=a Switches=b", 1, "switch 'b' has no line of its own"),
        ("SwitchName=a", 1, "switch 'a' is empty"),
        ("SwitchName=a Switches=b Nodes=n[1-60000]\nSwitchName=b Nodes=m[1-60000]", 1, "a topology has at most 100000"),
        ("SwitchName=a Nodes=x,x", 1, "'x' has a place already, in line 1"),
        ("SwitchName=a Nodes=x\nSwitchName=a Nodes=y", 2, "switch 'a' has a line already, 1"),
        ("SwitchName=a Nodes=x\nNodes=y", 2, "the line has no SwitchName="),
        ("SwitchName=a Node=x", 1, "'Node=x' is not understood"),
        ("SwitchName=a Nodes=x[2-1]", 1, "range '2-1' in 'x[2-1]' runs backwards"),
        ("SwitchName=a Nodes=x/y", 1, "node name 'x/y' cannot be used"),
    ],
)
def test_mistakes_name_the_line(text, line, message):
    with pytest.raises(TopologyError) as caught:
        Topology.from_slurm(text, source="topology.conf")
    assert str(caught.value).startswith(f"Topology 'topology.conf' line {line}: {message}"), str(caught.value)


def test_a_host_has_a_rank():
    with pytest.raises(TopologyError, match="a host needs at least 1 rank, not 0"):
        Topology.from_slurm("SwitchName=a Nodes=x", ranks_per_host=0)
