"""Small networks: six ranks in two racks behind unequal uplinks, and four at two sites far apart."""

from __future__ import annotations

from syncline.topology import Topology

RACKS = """
topology: racks
switch: core
children:
  - switch: left
    uplink: 200 Mbit/s
    children: [{host: "a[0-1]", uplink: 1 Gbit/s, ranks: 2}]
  - switch: right
    uplink: 100 Mbit/s
    children: [{host: b, uplink: 1 Gbit/s, ranks: 2}]
"""

TWO_SITES = Topology.parse("""
switch: wide-area
children:
  - {switch: a, uplink: 20 Mbit/s, children: [{host: a0, uplink: 1 Gbit/s}, {host: a1, uplink: 1 Gbit/s}]}
  - {switch: b, uplink: 20 Mbit/s, children: [{host: b0, uplink: 1 Gbit/s}, {host: b1, uplink: 1 Gbit/s}]}
""")
