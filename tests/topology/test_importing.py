"""Trees of other tools: each format gives the same one, and its mistakes are named by line."""

from pathlib import Path

import pytest

from syncline.errors import TopologyError
from syncline.topology import Topology

FOLDER = Path(__file__).parent / "imported"
TREES = {
    "topology.conf": "slurm",
    "topology.yaml": "slurm",
    "blocks.yaml": "slurm",
    "addresses": "slurm-env",
    "topograph.json": "topograph",
    "topograph-model.yaml": "topograph",
    "nodes.yaml": "k8s-nodes",
    "infragraph.yaml": "infragraph",
}


def divisions(topology: Topology) -> set[frozenset[int]]:
    """Return the hosts below each switch, by their numbers."""
    number = {host.name: place for place, host in enumerate(sorted(topology.hosts, key=lambda host: host.name))}
    found: dict[str, set[int]] = {}
    for host in topology.hosts:
        for node in topology.path(host.ranks[0].rank)[2:]:
            found.setdefault(node.name, set()).add(number[host.name])
    return set(map(frozenset, found.values()))


@pytest.mark.parametrize(("file", "origin"), TREES.items())
def test_each_format_gives_the_tree(file: str, origin: str) -> None:
    tree = Topology.imported((FOLDER / file).read_text(), origin, rates=[1e8, 2e8], source=file)
    assert divisions(tree) == {frozenset({0, 1, 2}), frozenset({3, 4})}
    assert tree.num_ranks == 5
    links = dict(tree.links())
    assert {links[host.name].up_bytes_per_s for host in tree.hosts} == {1e8}
    assert {links[node.name].down_bytes_per_s for node in tree.root.children} == {2e8}
    assert Topology.parse(tree.to_yaml()) == tree


def test_a_tree_of_slurm_with_ranks():
    topology = Topology.imported(
        "# comment\n\nSwitchName=leaf1 Nodes=n[01-02]  # two\nswitchname=leaf2 LinkSpeed=5 NODES=n03\n"
        "SwitchName=spine Switches=leaf[1-2] Nodes=login\n",
        "slurm",
        ranks_per_host=2,
    )
    assert [host.name for host in topology.hosts] == ["n01", "n02", "n03", "login"]
    assert topology.ranks_of("n02") == (2, 3)
    assert [node.name for node in topology.path(4)] == ["rank 4", "n03", "leaf2"]
    assert not topology.has_rates


def test_blocks_of_slurm_with_the_sizes_that_its_manual_puts_below_them():
    text = "BlockName=b1 Nodes=n[0-3]\nBlockName=b2 Nodes=n[4-7]\nBlockSizes=4,8\n"
    assert divisions(Topology.imported(text, "slurm")) == {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})}


def test_a_line_of_slurm_that_ends_in_a_backslash_goes_on_in_the_next():
    racks = "SwitchName=a \\\n  Nodes=n0,\\\nn1\nSwitchName=b\\  # the other\n\tNodes=n2\n"
    text = f"# two racks\n{racks}SwitchName=c Switches=a,b\\"
    assert [host.name for host in Topology.imported(text, "slurm").hosts] == ["n0", "n1", "n2"]
    with pytest.raises(TopologyError, match="line 2: 'Node=n0,n1' is not understood"):
        Topology.imported(text.replace("Nodes=n0", "Node=n0"), "slurm", source="net")


def test_more_rates_than_levels_are_refused():
    text = "SwitchName=a Nodes=x,y\nSwitchName=b Nodes=z\nSwitchName=c Switches=a,b"
    assert Topology.imported(text, "slurm", rates=[1e8, 2e8]).has_rates
    with pytest.raises(TopologyError, match="3 rates are given for 2 levels of links; give at most 2, the hosts' "):
        Topology.imported(text, "slurm", rates=[1e8, 2e8, 3e8])


def test_ranks_and_rates_that_a_file_tells():
    hosts = Topology.imported("a slots=2\nb:3 # three\nc\nc\n", "hostfile")
    assert [len(host.ranks) for host in hosts.hosts] == [2, 3, 2]
    hosts = Topology.imported("a slots=2\nb\n", "hostfile", ranks_per_host=4)
    assert [len(host.ranks) for host in hosts.hosts] == [4, 4]
    tasks = Topology.imported("SLURM_TOPOLOGY_ADDR=a\n1: SLURM_TOPOLOGY_ADDR=a\nSLURM_NODEID=0\n", "slurm-env")
    assert [len(host.ranks) for host in tasks.hosts] == [2]
    graph = Topology.imported((FOLDER / "infragraph.yaml").read_text(), "infragraph")
    assert {link.up_bytes_per_s for _, link in graph.links() if link.up_bytes_per_s < 1e12} == {10e9 / 8, 2 * 20e9 / 8}


def test_edges_of_infragraph_are_slices_of_instances():
    text = """
    links: [{name: e, bandwidth: {gigabits_per_second: 8}}]
    instances: [{name: h, device: d, count: 3}, {name: s, device: t, count: 1}]
    edges: [{ep1: {instance: h, component: 'nic[0:2]'}, ep2: {instance: s, component: 'port[0:6]'}, link: e}]
    """
    with pytest.raises(TopologyError, match=r"line 4: edge of 6 ends to 7"):
        Topology.imported(text.replace("port[0:6]", "port[0:7]"), "infragraph")
    assert [(host.name, host.link.up_bytes_per_s) for host in Topology.imported(text, "infragraph").hosts] == [
        (f"h-{k}", 2e9) for k in range(3)
    ]


def test_names_that_mean_two_places_get_their_own():
    nodes = "[{id: a, network_layers: [r/1, east]}, {id: b, network_layers: [r/1, west]}, {id: east}]"
    tree = Topology.imported(f"instances: {nodes}", "topograph")
    assert [node.name for node in tree.path(0)] == ["rank 0", "a", "r-1"]
    assert [node.name for node in tree.path(1)] == ["rank 1", "b", "network-r-1"]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file names no switch"),
        ("some: text", 1, "the text of the file is not a list"),
        ("SwitchName=", 1, "'SwitchName=' is not understood"),
        ("SwitchName=a Nodes=x\nSwitchName=b Nodes=y", 2, "nothing joins the switches a,b; add one above them"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", 1, "switch 'a' is below itself"),
        ("SwitchName=t Nodes=x\nSwitchName=a Switches=b\nSwitchName=b Switches=a", 2, "switch 'a' is below itself"),
        ("SwitchName=a Switches=b", 1, "switch 'b' is told nowhere"),
        ("SwitchName=a", 1, "switch 'a' is empty"),
        (
            "SwitchName=a Nodes=n[1-60000]\nSwitchName=b Nodes=m[1-60000]\nSwitchName=c Switches=a,b",
            2,
            "a topology has at most 100000",
        ),
        ("SwitchName=a Nodes=x,x", 1, "'x' has a place already, in line 1"),
        ("SwitchName=a Nodes=x\nSwitchName=a Nodes=y", 2, "switch 'a' has a line already, 1"),
        ("SwitchName=a Nodes=x\nNodes=y", 2, "the line has no SwitchName="),
        ("SwitchName=a Node=x", 1, "'Node=x' is not understood"),
        ("SwitchName=a Nodes=x[2-1]", 1, "range '2-1' in 'x[2-1]' runs backwards"),
        ("SwitchName=a Nodes=x/y", 1, "node name 'x/y' cannot be used"),
        ("- topology: t\n  flat: true", 1, "this topology is neither a tree nor blocks"),
        ("- tree:\n    switches:\n    - switch: s\n      nodes: x[\n", 3, "'x[' is not a list of names"),
        ("- tree: {switches: 3}", 1, "'switches' is not a list"),
        ("slurm-env|", 1, "no line has an address"),
        ("topograph|instances: [{network_layers: []}]", 1, "key 'id' is missing"),
        ("topograph|switches: {a: {}}\nblocks: [{switch: b, nodes: [x]}]", 2, "switch 'b' is not among 'switches'"),
        ("k8s-nodes|items: []", 1, "there is no node"),
        ("k8s-nodes|items: [{metadata: {labels: {}}}]", 1, "key 'name' is missing"),
        ("hostfile|# none", 1, "the file names no host"),
        ("hostfile|a\nb slots=x", 2, "'x' is not a number of ranks; write 'node1 slots=4'"),
        ("hostfile|a slots=0", 1, "'0' is not a number of ranks"),
        ("hostfile|a b", 1, "'a b' is not understood; write 'node1 slots=4'"),
        ("infragraph|links: []\ninstances: []", 1, "nothing is connected"),
        ("infragraph|links: []\ninstances: []\nconnections: [a.b]", 3, "'a.b' is not a connection"),
        ("infragraph|links: []\ninstances: []\nconnections: [a.0.n.0.e.s.0.p.0]", 3, "link 'e' is not among 'links'"),
    ],
)
def test_mistakes_name_the_line(text: str, line: int, message: str) -> None:
    origin, mark, content = text.partition("|")
    with pytest.raises(TopologyError) as caught:
        Topology.imported(content if mark else text, origin if mark else "slurm", source="net")
    assert str(caught.value).startswith(f"Topology 'net' line {line}: {message}"), str(caught.value)


def test_what_is_no_tree_is_named() -> None:
    text = (FOLDER / "infragraph.yaml").read_text() + "    - n.1.nic.1.slow.rack.2.port.7\n"
    with pytest.raises(TopologyError, match="'n-1' is connected to 'rack-2' and to 'rack-1', which have other neigh"):
        Topology.imported(text, "infragraph")


def test_the_format_and_the_ranks_are_checked() -> None:
    with pytest.raises(TopologyError, match="no format is called 'dot'; take one of slurm, slurm-env"):
        Topology.imported("", "dot")
    with pytest.raises(TopologyError, match="a host needs at least 1 rank, not 0"):
        Topology.imported("SwitchName=a Nodes=x", "slurm", ranks_per_host=0)
