"""Shares of links, without a network and without a clock."""

from syncline.fabric.link_share import LinkShare
from syncline.fabric.protocol import BULK, BULK_BYTES


def round_trip(share, delay_s, *, is_wanted=True):
    """Fill the share and let all of it arrive ``delay_s`` later."""
    amounts = []
    while not share.is_used_up:
        share.granted(share.quantum_bytes(0), 0.0)
        amounts.append(share.quantum_bytes(0))
    share.waiting = {1} if is_wanted else set()
    for amount in amounts:
        share.arrived(amount, delay_s)


def test_a_share_grows_while_arrivals_are_quick_up_to_the_whole_window():
    share = LinkShare(100, most_bytes=300, target_s=0.02)
    limits = []
    for _ in range(20):
        round_trip(share, 0.01)
        limits.append(share.limit_bytes)
    assert 140 < limits[0] < 160, "about a quantum for each round trip"
    assert limits == sorted(limits)
    assert limits[-1] == 300
    assert share.underway_bytes == 0


def test_a_share_falls_back_to_its_part_when_the_queue_is_long_and_no_further():
    share = LinkShare(100, most_bytes=300, target_s=0.02)
    for _ in range(20):
        round_trip(share, 0.01)
    round_trip(share, 0.03)
    assert 140 <= share.limit_bytes <= 160, "halved by one slow round trip"
    for _ in range(20):
        round_trip(share, 0.03)
    assert share.limit_bytes == 100


def test_a_share_that_no_one_waits_for_does_not_grow():
    share = LinkShare(100, most_bytes=300, target_s=0.02)
    round_trip(share, 0.0, is_wanted=False)
    assert share.limit_bytes == 100


def test_what_will_not_come_teaches_nothing():
    share = LinkShare(100, most_bytes=300, target_s=0.02)
    share.granted(25, 0.0)
    share.granted(25, 1.0)
    share.forgotten(25)
    share.waiting = {1}
    share.arrived(25, 1.01)
    assert share.underway_bytes == 0
    assert share.limit_bytes > 100, "its delay counts from its own grant"


def test_a_bulk_grant_may_exceed_a_small_share_but_no_second_one_joins_it():
    share = LinkShare(100)
    assert share.quantum_bytes(BULK - 1) == 50
    assert share.quantum_bytes(BULK) == BULK_BYTES
    share.granted(share.quantum_bytes(BULK), 0.0)
    assert share.is_used_up
    wide = LinkShare(4 * BULK_BYTES)
    assert wide.quantum_bytes(BULK) == wide.quantum_bytes(0) == 2 * BULK_BYTES
