"""The table of links: its numbers, and which link is marked."""

import pytest

from syncline.report import link_table, network_links
from syncline.topology import DirectedLink, Topology

TREE = """
topology: small
switch: core
children:
  - switch: rack
    uplink: 200 Mbit/s
    children:
      - {host: h0, uplink: {up: 1 Gbit/s, down: 2 Gbit/s}, ranks: 2}
  - {host: h1, uplink: 1 Gbit/s}
"""


@pytest.fixture
def topology():
    return Topology.parse(TREE, source="small.yaml")


def amounts_of(**amounts):
    return {DirectedLink(name, way): amount for name, pair in amounts.items() for way, amount in pair.items()}


def rows_of(table):
    return list(zip(*(list(column.cells) for column in table.columns), strict=True))


def test_ranks_inside_a_machine_have_no_row(topology):
    assert [(name, depth) for name, _, depth in network_links(topology)] == [("rack", 0), ("h0", 1), ("h1", 0)]


def test_each_link_has_its_bytes_its_rate_and_the_time_they_need(topology):
    amounts = amounts_of(rack={"up": 1 << 20, "down": 50_000_000}, h0={"up": 125_000_000})
    assert rows_of(link_table(topology, amounts, title="Bytes")) == [
        ("rack", "1 MiB", "47.68 MiB", "200 Mbit/s", "2.00 s"),
        ("  h0", "119.2 MiB", "0 B", "1 Gbit/s / 2 Gbit/s", "1.00 s"),
        ("h1", "0 B", "0 B", "1 Gbit/s", "-"),
    ]


def test_other_amounts_stand_beside_and_mark_nothing(topology):
    other = amounts_of(rack={"up": 75_000_000}, h1={"down": 250_000_000})
    table = link_table(topology, amounts_of(rack={"up": 25_000_000}), title="Bytes", beside={"a ring": other})
    assert [str(column.header) for column in table.columns[4:]] == ["\nneeds", "a ring\nbytes", "\nneeds"]
    assert [row[4:] for row in rows_of(table)] == [
        ("1.00 s", "71.53 MiB", "3.00 s"),
        ("-", "0 B", "-"),
        ("-", "238.4 MiB", "2.00 s"),
    ]
    assert [bool(row.style) for row in table.rows] == [True, False, False]


def test_the_busiest_link_is_marked_by_time_not_by_bytes(topology):
    table = link_table(topology, amounts_of(rack={"up": 50_000_000}, h1={"up": 125_000_000}), title="Bytes")
    assert [bool(row.style) for row in table.rows] == [True, False, False]


def test_nothing_is_marked_where_nothing_moved_or_nothing_limits(topology):
    assert not any(row.style for row in link_table(topology, {}, title="Bytes").rows)
    flat = Topology.flat(2)
    table = link_table(flat, amounts_of(h0={"up": 1000}), title="Bytes")
    assert not any(row.style for row in table.rows)


def test_links_of_sockets_are_inside_a_machine():
    sockets = "[{socket: s, uplink: 1 GB/s}, {socket: t, uplink: 1 GB/s}]"
    topology = Topology.parse(f"{{switch: w, children: [{{host: a, uplink: 1 Gbit/s, children: {sockets}}}]}}")
    assert [name for name, _, _ in network_links(topology)] == ["a"]
