"""Grants and credit, without a network."""

import random

from hypothesis import given, strategies as st

from syncline.fabric import _native
from syncline.fabric._native import EagerCredit
from syncline.fabric.protocol import BULK
from syncline.fabric.sizing import GrantWindow, LinkShare

BULK_BYTES = 64 << 10
SEGMENT_BYTES = 1448


class GrantScheduler:
    """The compiled one, on a clock that stands still unless a test moves it."""

    def __init__(self, window_bytes=100, quantum_bytes=50, *, window=None, **sizes):
        self._compiled = _native.GrantScheduler(
            window=window or GrantWindow.fixed(window_bytes), quantum_bytes=quantum_bytes, **sizes
        )
        self.now_s = 0.0

    def grants(self):
        return self._compiled.grants(now_s=self.now_s)

    def arrived(self, peer, *, num_bytes, urgency):
        self._compiled.arrived(peer, num_bytes=num_bytes, urgency=urgency, now_s=self.now_s)

    def __getattr__(self, name):
        return getattr(self._compiled, name)


def scheduler(window_bytes=100, quantum_bytes=50, **sender_bytes):
    sizes = {int(name[1:]): size for name, size in sender_bytes.items()}
    return GrantScheduler(window_bytes, quantum_bytes, sender_bytes=sizes)


def share_of(part_bytes, *, most_bytes=0, least_bytes=0, **settings):
    """Return a share that grows and shrinks only as it is said."""
    return LinkShare(
        part_bytes=part_bytes,
        most_bytes=most_bytes or part_bytes,
        least_bytes=least_bytes or part_bytes,
        **{"target_s": 0.0, **settings},
    )


def grant(peer, tag, limit_bytes):
    return peer, tag, limit_bytes


def test_the_window_bounds_what_is_under_way():
    one = scheduler()
    one.wish(1, 7, num_bytes=300, urgency=0)
    assert one.grants() == [grant(1, 7, 50), grant(1, 7, 100)]
    assert one.grants() == []
    one.arrived(1, num_bytes=10, urgency=0)
    assert one.grants() == [grant(1, 7, 150)]
    assert one.underway_bytes == 140


def test_grants_go_by_urgency_then_arrival_across_senders():
    one = scheduler(window_bytes=1000)
    one.wish(1, 1, num_bytes=50, urgency=5)
    one.wish(2, 2, num_bytes=50, urgency=3)
    one.wish(1, 3, num_bytes=50, urgency=3)
    one.wish(3, 4, num_bytes=50, urgency=1)
    assert [(peer, tag) for peer, tag, _ in one.grants()] == [(3, 4), (2, 2), (1, 3), (1, 1)]


def test_an_urgent_message_overtakes_bulk_of_another_sender():
    one = scheduler()
    one.wish(1, 1, num_bytes=1000, urgency=9)
    one.grants()
    one.wish(2, 2, num_bytes=200, urgency=0)
    found = [grant(2, 2, 50), grant(2, 2, 100)]
    assert one.grants() == found, "less urgent bytes under way do not take the urgent message's window"
    one.arrived(1, num_bytes=50, urgency=9)
    one.arrived(1, num_bytes=50, urgency=9)
    assert one.grants() == []
    one.arrived(2, num_bytes=50, urgency=0)
    assert one.grants() == [grant(2, 2, 150)]
    one.arrived(2, num_bytes=50, urgency=0)
    assert one.grants() == [grant(2, 2, 200)]


def test_what_is_less_urgent_waits_until_most_of_the_urgent_message_is_here():
    one = scheduler()
    one.wish(2, 2, num_bytes=100, urgency=0)
    one.wish(1, 1, num_bytes=1000, urgency=9)
    assert one.grants() == [grant(2, 2, 50), grant(2, 2, 100)]
    one.arrived(2, num_bytes=70, urgency=0)
    assert one.grants() == []
    one.arrived(2, num_bytes=5, urgency=0)
    assert one.grants() == [grant(1, 1, 50), grant(1, 1, 100)]


def test_urgent_bytes_on_a_slow_route_leave_the_rest_of_the_link_to_others():
    one = scheduler(window_bytes=1000, quantum_bytes=400, p2=400)
    one.wish(2, 2, num_bytes=1000, urgency=0)
    one.wish(1, 1, num_bytes=1000, urgency=9)
    assert one.grants() == [grant(2, 2, 400), grant(1, 1, 400), grant(1, 1, 800)]


def test_new_sizes_hold_from_then_on():
    one = scheduler(p1=50)
    one.wish(1, 1, num_bytes=1000, urgency=0)
    assert one.grants() == [grant(1, 1, 50)]
    one.resize(window=GrantWindow.fixed(300), quantum_bytes=200, sender_bytes={1: 120})
    assert one.grants() == [grant(1, 1, 170)]
    one.arrived(1, num_bytes=170, urgency=0)
    one.resize(window=GrantWindow.fixed(60), quantum_bytes=60, sender_bytes={})
    assert one.grants() == [grant(1, 1, 230)]


def test_slow_senders_do_not_starve_an_idle_one():
    one = scheduler()
    one.wish(1, 1, num_bytes=1000, urgency=0)
    one.grants()
    one.wish(2, 2, num_bytes=1000, urgency=0)
    assert one.grants() == [grant(2, 2, 50)]
    one.arrived(2, num_bytes=50, urgency=0)
    assert one.grants() == [grant(2, 2, 100)]


def test_a_less_urgent_idle_sender_waits():
    one = scheduler()
    one.wish(1, 1, num_bytes=1000, urgency=0)
    one.grants()
    one.wish(2, 2, num_bytes=1000, urgency=1)
    assert one.grants() == []


def test_a_sender_has_its_own_limit():
    one = scheduler(window_bytes=1000, p1=50)
    one.wish(1, 1, num_bytes=1000, urgency=0)
    one.wish(2, 2, num_bytes=1000, urgency=1)
    grants = one.grants()
    assert grants[0] == grant(1, 1, 50)
    assert {peer for peer, *_ in grants[1:]} == {2}


def test_a_forgotten_message_is_granted_no_further():
    one = scheduler()
    one.wish(1, 1, num_bytes=1000, urgency=0)
    one.wish(1, 2, num_bytes=1000, urgency=1)
    one.grants()
    one.forget(1, 1)
    one.arrived(1, num_bytes=100, urgency=0)
    assert one.grants() == [grant(1, 2, 50), grant(1, 2, 100)]
    one.forget(1, 99)
    one.forget(9, 99)


def test_a_lost_peer_gives_its_share_back():
    one = scheduler()
    one.wish(1, 1, num_bytes=1000, urgency=0)
    one.wish(2, 2, num_bytes=60, urgency=1)
    one.grants()
    one.forget_peer(1, underway={0: 100})
    assert one.underway_bytes == 0
    assert one.grants() == [grant(2, 2, 50), grant(2, 2, 60)]
    one.forget_peer(5, underway={})


class Driver:
    """Random wishes, arrivals and cancellations, with an account of its own."""

    def __init__(self, seed, window_bytes, quantum_bytes):
        self.generator = random.Random(seed)
        self.limits = {peer: self.generator.randrange(1, 100) for peer in range(1, 5)}
        self.outer, self.inner = (share_of(self.generator.randrange(1, 100)) for _ in range(2))
        self.scheduler = GrantScheduler(
            window_bytes,
            quantum_bytes,
            sender_bytes=self.limits,
            shares={1: (self.inner, self.outer), 2: (self.inner, self.outer), 3: (self.outer,)},
        )
        self.window_bytes, self.quantum_bytes = window_bytes, quantum_bytes
        self.unwished = [(self.generator.randrange(1, 5), tag) for tag in range(12)]
        self.sizes = {key: self.generator.randrange(1, 150) for key in self.unwished}
        self.urgencies = {key: self.generator.randrange(3) for key in self.unwished}
        self.granted = dict.fromkeys(self.sizes, 0)
        self.arrived = dict.fromkeys(self.sizes, 0)

    def is_done(self):
        return not self.unwished and all(
            self.granted[key] == self.arrived[key] == self.sizes[key] for key in self.sizes
        )

    def step(self):
        if self.unwished and self.generator.random() < 0.5:
            key = self.unwished.pop()
            self.scheduler.wish(*key, num_bytes=self.sizes[key], urgency=self.urgencies[key])
        for found in self.scheduler.grants():
            self.check_grant(*found)
        underway = {key: self.granted[key] - self.arrived[key] for key in self.sizes}
        assert self.scheduler.underway_bytes == sum(underway.values()) < 2 * self.window_bytes + self.quantum_bytes
        for link, senders in ((self.inner, {1, 2}), (self.outer, {1, 2, 3})):
            on_link = sum(underway[key] for key in underway if key[0] in senders)
            assert on_link < link.part_bytes + max(1, link.part_bytes // 2)
        moving = [key for key in underway if underway[key]]
        wishing = [key for key in self.sizes if key not in self.unwished and self.granted[key] < self.sizes[key]]
        assert moving or not wishing, "messages wait and nothing moves"
        for key in self.generator.sample(moving, min(len(moving), 2)):
            amount = self.generator.randint(1, underway[key])
            self.arrived[key] += amount
            self.scheduler.arrived(key[0], num_bytes=amount, urgency=self.urgencies[key])
        if wishing and self.generator.random() < 0.05:
            key = self.generator.choice(wishing)
            self.scheduler.forget(*key)
            self.sizes[key] = self.granted[key]

    def check_grant(self, peer, tag, limit_bytes):
        key = (peer, tag)
        assert key not in self.unwished
        assert self.granted[key] < limit_bytes <= min(self.sizes[key], self.granted[key] + self.quantum_bytes)
        self.granted[key] = limit_bytes
        underway = sum(self.granted[other] - self.arrived[other] for other in self.granted if other[0] == peer)
        assert underway < 2 * self.limits[peer]


@given(seed=st.integers(0, 1 << 32), window_bytes=st.integers(1, 300), quantum_bytes=st.integers(10, 200))
def test_everything_is_granted_once_and_the_bounds_hold(seed, window_bytes, quantum_bytes):
    driver = Driver(seed, window_bytes, quantum_bytes)
    while not driver.is_done():
        driver.step()
    assert driver.scheduler.underway_bytes == 0
    assert not driver.scheduler.grants()


def test_credit_is_given_back_in_batches():
    credit = EagerCredit(100)
    assert all(credit.take(10) for _ in range(10))
    assert not credit.take(1)
    credit = EagerCredit(100)
    assert all(credit.take(10) for _ in range(10))
    assert [credit.consume(10) for _ in range(6)] == [0, 0, 30, 0, 0, 30]
    assert credit.used_bytes == 40


def test_senders_behind_one_link_share_what_may_be_under_way_on_it():
    link = share_of(40)
    one = GrantScheduler(1000, 50, shares={1: (link,), 2: (link,)})
    one.wish(1, 1, num_bytes=300, urgency=0)
    one.wish(2, 2, num_bytes=300, urgency=0)
    one.wish(3, 3, num_bytes=60, urgency=0)
    assert one.grants() == [grant(1, 1, 20), grant(1, 1, 40), grant(3, 3, 50), grant(3, 3, 60)]
    assert one.grants() == []
    one.arrived(1, num_bytes=20, urgency=0)
    assert one.grants() == [grant(1, 1, 60)]
    one.forget_peer(1, underway={0: 40})
    assert one.grants() == [grant(2, 2, 20), grant(2, 2, 40)], "what a lost peer held is free for the others"


def test_bulk_messages_come_in_larger_pieces_and_let_others_go_first():
    one = GrantScheduler(
        1 << 20,
        1 << 18,
        sender_bytes={1: BULK_BYTES, 2: BULK_BYTES},
        shares=dict.fromkeys((1, 2), (share_of(32 << 10),)),
    )
    one.wish(1, 1, num_bytes=1 << 20, urgency=BULK)
    assert one.grants() == [grant(1, 1, BULK_BYTES)]
    one.wish(2, 2, num_bytes=20 << 10, urgency=BULK - 1)
    one.arrived(1, num_bytes=BULK_BYTES, urgency=BULK)
    assert one.grants() == [grant(2, 2, 16 << 10), grant(2, 2, 20 << 10), grant(1, 1, 2 * BULK_BYTES)]


def test_a_slow_link_goes_before_a_fast_one_but_not_before_urgency():
    one = GrantScheduler(100, 100, shares={2: (share_of(40),)})
    one.wish(1, 1, num_bytes=100, urgency=0)
    one.wish(2, 2, num_bytes=10, urgency=0)
    one.wish(3, 3, num_bytes=10, urgency=-1)
    assert [peer for peer, *_ in one.grants()] == [3, 2, 1]


def settled(one, *, delay_s, num_bytes=25, steps=400):
    """Let sender 1 bring a piece at a time, each so long after its grant; return the window then."""
    one.wish(1, 1, num_bytes=1 << 30, urgency=0)
    one.grants()
    for _ in range(steps):
        one.now_s += delay_s * num_bytes / one.underway_bytes
        one.arrived(1, num_bytes=num_bytes, urgency=0)
        one.grants()
    return one.window_bytes


WINDOW = GrantWindow(most_bytes=500, least_bytes=200, bytes_per_s=1000.0)


def test_the_window_is_small_where_hosts_answer_quickly_and_stays_large_where_the_link_idles():
    assert settled(GrantScheduler(window=WINDOW), delay_s=0.2) == 200, "more arrives than a busy link brings"
    assert settled(GrantScheduler(window=WINDOW), delay_s=2.0) == 500, "the link idles"


def test_the_window_grows_again_when_hosts_become_slow():
    one = GrantScheduler(window=WINDOW)
    assert settled(one, delay_s=0.2) == 200
    one.forget(1, 1)
    one.forget_peer(1, underway={0: one.underway_bytes})
    assert settled(one, delay_s=2.0) == 500


def test_the_window_learns_from_senders_whose_route_is_as_fast_as_the_link():
    window = GrantWindow(most_bytes=100, least_bytes=20, bytes_per_s=1000.0)
    one = GrantScheduler(window=window, quantum_bytes=25, sender_bytes={2: 50})
    for peer, expected_bytes in ((2, 100), (1, 20)):
        one.wish(peer, peer, num_bytes=1 << 20, urgency=0)
        one.grants()
        for _ in range(200):
            one.now_s += 0.025
            one.arrived(peer, num_bytes=25, urgency=0)
            one.grants()
        assert one.window_bytes == expected_bytes, "what a slow route brings says nothing of the link"
        one.forget_peer(peer, underway={0: one.underway_bytes})


class Sharing:
    """A sender behind a link of which this receiver has a share; its wish never ends."""

    def __init__(self, part_bytes, **share):
        self.one = GrantScheduler(1 << 30, 1 << 30, shares={1: (share_of(part_bytes, target_s=0.02, **share),)})
        self.one.wish(1, 1, num_bytes=1 << 40, urgency=0)
        self.one.grants()

    def round_trip(self, delay_s=0.01, *, num_lost=0):
        """Let all that is under way arrive so much later; return what is under way then."""
        num_bytes = self.one.underway_bytes
        self.one.lost(1, num_lost)
        self.one.now_s += delay_s
        self.one.arrived(1, num_bytes=num_bytes, urgency=0)
        self.one.grants()
        return self.one.underway_bytes


def test_a_share_grows_while_arrivals_are_quick_up_to_the_whole_window():
    sharing = Sharing(100, most_bytes=300)
    found = [sharing.round_trip() for _ in range(20)]
    assert found == sorted(found)
    assert found[0] < 200
    assert 300 <= found[-1] < 350


def test_a_share_falls_back_to_its_part_when_the_queue_is_long_and_no_further():
    sharing = Sharing(100, most_bytes=300)
    for _ in range(20):
        sharing.round_trip()
    found = [sharing.round_trip(0.03) for _ in range(20)]
    assert found == sorted(found, reverse=True)
    assert found[0] < 250
    assert 100 <= found[-1] < 150


def test_a_share_shrinks_below_its_part_where_much_is_lost_and_no_further_than_its_least():
    sharing = Sharing(100_000, most_bytes=300_000, least_bytes=20_000)
    found = [sharing.round_trip(num_lost=100) for _ in range(12)]
    assert found == sorted(found, reverse=True)
    assert 20_000 <= found[-1] < 40_000


def test_a_share_keeps_its_length_where_single_segments_of_it_are_lost():
    sharing = Sharing(34_000, most_bytes=34_000, least_bytes=16_000, least_judged_bytes=500 * SEGMENT_BYTES)
    found = [sharing.round_trip(num_lost=turn % 3 == 0) for turn in range(200)]
    assert min(found) >= 34_000, "one of 72 segments"
    assert [sharing.round_trip(num_lost=1) for _ in range(200)][-1] < 34_000, "one of 24"


def test_a_share_shrinks_at_once_where_as_much_is_lost_as_a_long_one_may_lose():
    sharing = Sharing(34_000, most_bytes=34_000, least_bytes=16_000, least_judged_bytes=500 * SEGMENT_BYTES)
    assert [sharing.round_trip(num_lost=lost) for lost in (10, 0, 0)] == [34_000] * 3
    assert [sharing.round_trip(num_lost=lost) for lost in (11, 11, 0)][-1] < 17_000


def test_a_share_that_tolerates_more_keeps_its_length():
    for tolerated_share, has_fallen in ((0.02, True), (0.04, False)):
        sharing = Sharing(100_000, most_bytes=100_000, least_bytes=20_000, tolerated_share=tolerated_share)
        found = [sharing.round_trip(num_lost=2) for _ in range(100)]
        assert (found[-1] < 100_000) == has_fallen, "two of 69 segments"


def test_a_share_that_may_not_shrink_does_not():
    sharing = Sharing(100_000)
    assert all(sharing.round_trip(0.03, num_lost=1000) == 100_000 for _ in range(5))


def test_a_share_grows_back_slowly_once_nothing_is_lost():
    sharing = Sharing(100_000, most_bytes=100_000, least_bytes=20_000)
    low = [sharing.round_trip(num_lost=100) for _ in range(12)][-1]
    found = [sharing.round_trip() for _ in range(1000)]
    assert found == sorted(found)
    assert found[8] < low + 4 * SEGMENT_BYTES
    assert found[-1] == 100_000
