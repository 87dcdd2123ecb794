"""A topology of six ranks: two hosts of two ranks in one rack, one of two in another, behind unequal uplinks."""

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
