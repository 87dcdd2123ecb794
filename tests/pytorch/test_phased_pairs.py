"""Who is whose partner."""

import pytest

from syncline.errors import ConfigurationError
from syncline.pytorch.phased.setup import find_pair, pair_ranks
from syncline.topology import Topology

UNEVEN = """
topology: uneven
switch: core
children:
  - switch: left
    uplink: 1 Gbit/s
    children:
      - {host: a, uplink: 1 Gbit/s, ranks: 3}
      - {host: b, uplink: 1 Gbit/s, ranks: 2}
      - {host: c, uplink: 1 Gbit/s, ranks: 2}
  - switch: right
    uplink: 1 Gbit/s
    children:
      - {host: d, uplink: 1 Gbit/s, ranks: 1}
      - {host: e, uplink: 1 Gbit/s, ranks: 2}
      - {host: f, uplink: 1 Gbit/s, ranks: 1}
      - {host: g, uplink: 1 Gbit/s, ranks: 1}
"""


def test_neighbours_on_one_switch() -> None:
    assert pair_ranks(Topology.flat(6)) == ((0, 1), (2, 3), (4, 5))


def test_partners_share_a_host_or_else_a_switch() -> None:
    pairs = pair_ranks(Topology.parse(UNEVEN))
    # a has 0 1 2, b 3 4, c 5 6; d 7, e 8 9, f 10, g 11
    assert pairs == ((0, 1), (2, 11), (3, 4), (5, 6), (7, 10), (8, 9))
    assert find_pair(pairs, 11) == (1, 1)
    assert find_pair(pairs, 8) == (5, 0)


def test_partners_follow_the_network_and_not_the_numbers() -> None:
    interleaved = Topology.load("two-racks-5-3").permuted((0, 5, 1, 6, 2, 7, 3, 4))
    crossing = [
        (first, second)
        for first, second in pair_ranks(interleaved)
        if len(interleaved.route(first, second)) > min(len(interleaved.route(0, 2)), 4)
    ]
    assert len(crossing) == 1  # five and three: one pair has to cross


def test_an_odd_number_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"even, not 3; start one more, or one less"):
        pair_ranks(Topology.flat(3))
