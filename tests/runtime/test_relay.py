"""The relay: what it keeps for groups that are not open yet, and how much of it."""

import pytest

from syncline.errors import FabricError
from syncline.runtime.relay import COST_BYTES, MAX_EARLY_BYTES, Relay, enclose


class Noting:
    """An engine, or a group with these streams, that notes what it is told."""

    def __init__(self, first_stream=0, stop_stream=1):
        self.streams = range(first_stream, stop_stream)
        self.told = []

    def on_control(self, peer, payload):
        self.told.append((peer, payload))

    def on_peer_lost(self, peer, error):
        pass

    def on_stall(self):
        self.told.append("a stall")


def tell(relay, peer, group, payload, times=1):
    for _ in range(times):
        relay.on_control(peer, enclose(group, payload))


def test_what_came_before_a_group_was_opened_is_told_in_its_order():
    relay, group = Relay(Noting()), Noting(7, 9)
    tell(relay, 1, 7, b"one")
    tell(relay, 2, 7, b"two")
    tell(relay, 1, 9, b"for another group")
    relay.add_group(group)
    tell(relay, 1, 7, b"three")
    assert group.told == [(1, b"one"), (2, b"two"), (1, b"three")]


def test_every_engine_hears_of_a_stall():
    engine, group, closed = Noting(), Noting(7, 8), Noting(8, 9)
    relay = Relay(engine)
    relay.add_group(group)
    relay.add_group(closed)
    relay.remove_group(closed)
    relay.on_stall()
    assert (engine.told, group.told, closed.told) == (["a stall"], ["a stall"], [])


@pytest.mark.parametrize("payload", [b"", bytes(10_000)])
def test_a_rank_that_tells_an_unopened_group_too_much_spoils_that_group_alone(payload):
    relay, other, later = Relay(Noting()), Noting(3, 4), Noting(5, 6)
    tell(relay, 1, 3, b"kept")
    tell(relay, 2, 7, payload, times=1 + MAX_EARLY_BYTES // (len(payload) + COST_BYTES))
    tell(relay, 2, 5, b"there is room again")
    assert sum(len(message) for kept in relay._early.values() for _, message in kept) < 100, "nothing of it is kept"
    relay.add_group(other)
    relay.add_group(later)
    assert other.told == [(1, b"kept")]
    assert later.told == [(2, b"there is room again")]
    with pytest.raises(FabricError, match=r"Rank 2 .* more than 4 MiB .* group 7, .* let all its ranks"):
        relay.add_group(Noting(7, 8))


def test_groups_that_are_opened_in_turn_never_fill_what_may_be_kept():
    relay = Relay(Noting())
    for number in range(1000):
        group = Noting(number, number + 1)
        tell(relay, 1, number, bytes(10_000))
        relay.add_group(group)
        assert len(group.told) == 1
