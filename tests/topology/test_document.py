"""Topology files: what they may say, and how each mistake is reported with its line."""

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from topology_trees import topologies

from syncline.errors import TopologyError
from syncline.topology import Link, Topology
from syncline.topology.marked import read_marked


def parse(text):
    return Topology.parse(text, source="net.yaml")


def test_a_full_file():
    topology = parse(
        """
topology: lab
switch: core
children:
  - {host: "a[1-2]", uplink: 1 Gbit/s}
  - switch: rack
    uplink: {up: 100 MB/s, down: 200 MB/s, latency: 5 ms, loss: 0.2 %}
    children:
      - host: b
        uplink: {rate: 1 MB/s}
        ranks: 2
        local: [1 GB/s, unlimited]
        features: {gpu: a100, memory_gib: 40}
"""
    )
    assert topology.name == "lab"
    assert [host.name for host in topology.hosts] == ["a1", "a2", "b"]
    assert topology.ranks_of("b") == (2, 3)
    links = dict(topology.links())
    assert links["rack"] == Link(up_bytes_per_s=1e8, down_bytes_per_s=2e8, latency_s=0.005, loss_share=0.002)
    assert links["rank 2"] == Link.symmetric(1e9)
    assert links["rank 3"] == Link.unlimited()
    assert topology.hosts[2].features == {"gpu": "a100", "memory_gib": 40.0}


SOCKETS = """
switch: s
children:
  - host: "a[0-1]"
    uplink: 1 Gbit/s
    memory: 64 GB
    gateway: one
    children:
      - {socket: "s[0-1]", uplink: 20 GB/s, ranks: 2, local: 40 GB/s}
      - socket: x
        uplink: 10 GB/s
        children:
          - {socket: y, uplink: 5 GB/s}
  - {host: b, uplink: 1 Gbit/s, memory: 8 GiB}
"""


def test_hosts_may_have_sockets_memory_and_a_gateway():
    topology = parse(SOCKETS)
    assert topology.num_ranks == 11
    assert topology.ranks_of("a1") == (5, 6, 7, 8, 9)
    assert [node.name for node in topology.path(9)] == ["rank 9", "a1/x/y", "a1/x", "a1"]
    assert dict(topology.links())["a0/s1"] == Link.symmetric(20e9)
    assert dict(topology.links())["rank 6"] == Link.symmetric(40e9)
    assert [host.memory_bytes for host in topology.hosts] == [64 * 10**9, 64 * 10**9, 8 << 30]
    assert topology.gateways == {1: 0, 2: 0, 3: 0, 4: 0, 6: 5, 7: 5, 8: 5, 9: 5}


def test_one_host_alone_and_the_name_taken_from_the_file():
    topology = parse("host: box\nranks: 4\n")
    assert (topology.name, topology.num_ranks, topology.path(3)[0].name) == ("net", 4, "rank 3")


def test_rank_numbers_are_given_in_file_order():
    topology = parse("switch: s\nrank_numbers: [2, 0, 1]\nchildren:\n  - {host: 'h[0-2]', uplink: 1 Gbit/s}\n")
    assert [topology.host_of(rank).name for rank in range(3)] == ["h1", "h2", "h0"]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(topologies())
def test_what_is_written_reads_back_equal(topology):
    again = Topology.parse(topology.to_yaml())
    assert again == topology
    assert again.digest == topology.digest
    assert again.to_yaml() == topology.to_yaml()


HOST = "  - {host: h0, uplink: 1 Gbit/s}\n"
HEAD = "switch: s\nchildren:\n"
SOCKET_LINE = "  - {socket: s, uplink: 1 GB/s}\n"
SOCKET = "children:\n" + SOCKET_LINE


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (HEAD + HOST + "  - {host: h1, uplnk: 1 Gbit/s}\n", 4, "unknown key 'uplnk'; did you mean 'uplink'?"),
        (
            HEAD + "  - host: h1\n    uplink:\n      quux: 1\n",
            5,
            "unknown key 'quux'; the keys here are rate, up, down",
        ),
        ("switch: s\nname: x\nchildren:\n" + HOST, 2, "unknown key 'name'; the keys here are topology, rank_numbers"),
        (HEAD + HOST + HOST, 4, "host 'h0' is a name given before, in line 3"),
        (HEAD + "  - {host: s, uplink: 1 Gbit/s}\n", 3, "host 's' is a name given before, in line 1"),
        (HEAD + "  - {host: h0, uplink: 0 Gbit/s}\n", 3, "link rate '0 Gbit/s' is zero"),
        (HEAD + "  - {host: h0, uplink: 10 Gbps/s}\n", 3, "link rate '10 Gbps/s' is not a rate; write '10 Gbit/s'"),
        (HEAD + "  - {host: h0, uplink: 10}\n", 3, "link rate 10 is not a rate"),
        (HEAD + "  - host: h0\n    uplink: {up: 1 GB/s}\n", 4, "a link needs either 'rate', or both 'up' and 'down'"),
        (HEAD + "  - host: h0\n    uplink: {rate: 1 GB/s, latency: 5}\n", 4, "link latency 5 is not a duration"),
        (HEAD + "  - host: h0\n    uplink: {rate: 1 GB/s, loss: 1}\n", 4, "link loss 1 is not a share"),
        (HEAD + "  - host: h0\n    uplink: {rate: 1 GB/s, loss: 100 %}\n", 4, "link loss '100 %' is all"),
        (HEAD + "  - host: h0\n", 3, "key 'uplink' is missing"),
        (HEAD + "  - {uplink: 1 GB/s}\n", 3, "this entry is neither a host nor a switch"),
        (HEAD + "  - 7\n", 3, "this entry is neither a host nor a switch"),
        ("switch: s\nchildren: []\n", 2, "this switch is empty"),
        (HEAD + HOST + "  - switch: t\n    uplink: 1 GB/s\n    children: []\n", 6, "this switch is empty"),
        ("switch: s\n", 1, "key 'children' is missing"),
        ("switch: s\nuplink: 1 GB/s\nchildren:\n" + HOST, 2, "the root has an uplink"),
        ("host: 'h[0-1]'\n", 1, "the root is one host"),
        ("host: h\nranks: 0\n", 2, "'ranks' cannot be 0"),
        ("host: h\nranks: two\n", 2, "'ranks' cannot be 'two'"),
        ("host: h\nranks: 100000\n", 2, "'ranks' cannot be 100000"),
        ("host: h\nranks: 3\nlocal: [1 GB/s, 1 GB/s]\n", 1, "'local' lists 2 links for 3 ranks"),
        ("host: h\nfeatures: {gpu: true}\n", 2, "a feature is a number or text, not True; quote it"),
        ("host: h\nfeatures: {x: 1" + "0" * 400 + "}\n", 2, "a feature is too large a number"),
        ("host: h\nrank_numbers: [1]\n", 2, "'rank_numbers' must list each of 0 to 0 once"),
        (HEAD + "  - {host: 5, uplink: 1 GB/s}\n", 3, "'host' must be text, not 5; quote it"),
        (HEAD + "  - {host: a b, uplink: 1 GB/s}\n", 3, "host name 'a b' cannot be used"),
        (HEAD + "  - {host: 'h[3-1]', uplink: 1 GB/s}\n", 3, "range '3-1' in 'h[3-1]' runs backwards"),
        (
            "switch: s\nchildren: &c\n  - switch: t\n    uplink: 1 GB/s\n    children: *c\n",
            5,
            "this value contains itself (an alias to an ancestor)",
        ),
        ("host: h\nmemory: 64\n", 2, "size 64 is not a size; write a number and its unit"),
        (
            "host: h\ngateway: both\n",
            2,
            "'gateway' cannot be 'both': input should be 'every', 'one', 'auto' or 'helper'",
        ),
        ("host: h\ngateway: helper\n", 2, "host 'h' has a helper and no rank that trains; give it 2 ranks or more"),
        ("host: h\nchildren: []\n", 2, "this list of sockets is empty"),
        ("host: h\nranks: 2\n" + SOCKET, 1, "'ranks' and 'local' belong to the sockets under 'children'"),
        ("host: h\n" + SOCKET + SOCKET_LINE, 4, "socket 'h/s' is a name given before, in line 3"),
        ("host: h\nchildren:\n  - {socket: s}\n", 3, "key 'uplink' is missing"),
        ("host: h\nchildren:\n  - {socket: a/b, uplink: 1 GB/s}\n", 3, "socket name 'a/b' cannot be used"),
        (
            "host: h\n" + SOCKET + "  - {socket: t, uplink: 1 GB/s, rank: 2}\n",
            4,
            "unknown key 'rank'; did you mean 'ranks'?",
        ),
        (
            "host: h\nchildren:\n  - {switch: t, socket: u}\n",
            3,
            "unknown key 'switch'; the keys here are uplink, ranks",
        ),
        ("host: h\nhost: g\n", 2, "key 'host' is given twice"),
        ("host: h\n[1]: g\n", 2, "a key must be a plain word"),
        ("host: h\nranks: : 5\n", 2, "this is not YAML"),
        ("host: h\nfeatures: {day: 2001-99-99}\n", 2, "'2001-99-99' cannot be read"),
        ("host: h\nfeatures: {x: !!python/object:os.system 1}\n", 2, "'1' cannot be read"),
        ("", 1, "the file is empty"),
    ],
)
def test_mistakes_name_file_and_line(text, line, message):
    with pytest.raises(TopologyError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"Topology 'net.yaml' line {line}: {message}"), str(caught.value)


def test_several_mistakes_are_told_at_once():
    hosts = "".join(f"  - {{host: h{k}, uplink: 0 bit/s}}\n" for k in range(9))
    with pytest.raises(TopologyError) as caught:
        parse(HEAD + hosts)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0][-6:] for line in lines[:5]] == ["line 3", "line 4", "line 5", "line 6", "line 7"]
    assert lines[5] == "... and 4 more"


def test_aliases_that_multiply_are_stopped():
    text = "a: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
    text += "".join(f"b{k}: &a{k} [{','.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 9))
    with pytest.raises(TopologyError, match="after aliases are followed"):
        parse(text)


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 150 + "]" * 150, "switch: s\nchildren: " + "[" * 100_000, "{a: " * 50_000]
)
def test_endless_nesting_is_stopped(text):
    with pytest.raises(TopologyError, match="nested more than 100 deep"):
        parse(text)  # libyaml itself would overflow the C stack


def test_nesting_by_aliases_is_stopped():
    text = "a: &a0 [1]\n" + "".join(f"b{k}: &a{k} [*a{k - 1}]\n" for k in range(1, 150))
    with pytest.raises(TopologyError, match="nested more than 100 deep"):
        parse(text)


def test_a_file_beyond_any_network_is_not_read():
    with pytest.raises(TopologyError, match="the file has 5000000 characters"):
        parse("#" * 5_000_000)


@pytest.mark.parametrize(
    "host",
    [
        "{host: 'a[0-49999]', uplink: 1 GB/s, ranks: 4}",
        "{host: 'a[0-99]x[0-999]', uplink: 1 GB/s}, {host: b, uplink: 1 GB/s}",
    ],
)
def test_more_ranks_than_any_job_has_are_not_made(host):
    with pytest.raises(TopologyError, match="at most 100000 ranks"):
        parse(f"{{switch: s, children: [{host}]}}")


def test_places_of_many_hosts_are_found_without_a_search_of_each():
    """By operations, not by time: each list of children is indexed once, however many of them are asked for."""
    marked = read_marked(HEAD + "".join(f"  - {{host: h{k}, uplink: 1 GB/s}}\n" for k in range(2000)), label="net")
    places = [marked.line_of(("children", k, "host")) for k in range(2000)]
    assert places == list(range(3, 2003))
    assert len(marked._places) == 2 + 2000


@given(st.text(max_size=60))
@example("\x00")
@example("- *x")
@example("&a : *a")
def test_any_text_is_a_topology_or_a_topology_error(text):
    for candidate in (text, HEAD + f"  - {{host: {text}, uplink: 1 GB/s}}\n"):
        message = "none"
        try:
            parse(candidate)
        except TopologyError as error:
            message = str(error)
        assert message == "none" or message.startswith("Topology 'net.yaml'")
