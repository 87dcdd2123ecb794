"""Shares of links, without a network and without a clock."""

from syncline.fabric.link_share import SEGMENT_BYTES, LinkShare
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


def lossy(*, least_bytes=20_000):
    return LinkShare(100_000, most_bytes=300_000, least_bytes=least_bytes, target_s=0.02)


def length(share, *, num_lost=0, delay_s=0.001):
    """Let as much arrive as the share is long; so many of its segments were sent again."""
    num_bytes = share.limit_bytes
    share.granted(num_bytes, 0.0)
    share.lost(num_lost)
    share.arrived(num_bytes, delay_s)
    return share.limit_bytes


def test_a_share_shrinks_below_its_part_where_much_is_lost_and_no_further_than_its_least():
    share = lossy()
    limits = [length(share, num_lost=10) for _ in range(12)]
    assert limits[:2] == [70_000, 49_000]
    assert limits[-1] == 20_000
    assert share.quantum_bytes(0) == 20_000, "no grant is larger than the share"
    assert share.underway_bytes == 0


def test_a_share_that_may_not_shrink_does_not():
    assert length(LinkShare(100_000, target_s=0.02), num_lost=1000) == 100_000


def test_a_fiftieth_may_be_lost():
    assert length(lossy(), num_lost=1) == 100_000
    assert length(lossy(), num_lost=2) == 70_000


def test_a_share_grows_back_to_its_part_by_a_segment_for_eight_of_its_lengths():
    share = lossy()
    length(share, num_lost=10)
    for _ in range(8):
        length(share)
    assert 0 <= 70_000 + SEGMENT_BYTES - share.limit_bytes < 8
    grown = share.limit_bytes
    assert length(share, delay_s=0.03) == grown, "what comes late lets it stay"
    for _ in range(300):
        length(share)
    assert share.limit_bytes == 100_000


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
