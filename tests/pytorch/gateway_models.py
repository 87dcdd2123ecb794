"""Hosts of 2, 3 and 1 ranks for tests of gateways and helpers."""

from __future__ import annotations

from syncline.topology import Topology


def hosts_of_2_3_1(gateway: str) -> Topology:
    """One switch with hosts a, b and c; ranks 0 and 2 are the first of theirs, 5 is alone."""
    hosts = ", ".join(
        f"{{host: {name}, uplink: 1 Gbit/s, ranks: {num_ranks}, gateway: {gateway if num_ranks > 1 else 'every'}}}"
        for name, num_ranks in (("a", 2), ("b", 3), ("c", 1))
    )
    return Topology.parse(f"{{switch: s, children: [{hosts}]}}")
