"""Who is told that it was left behind takes nobody along; and who is told of another passes it on."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from syncline.errors import PeerLostError
from syncline.members import Membership, Quorum
from syncline.updates.messaging import Driver, LeftBehind
from syncline.updates.overlapped.server_client import ServerClient


class Client(SimpleNamespace):
    """What of a rank's client hears of losses, in a job of five; what it tells is kept."""

    _on_note, _on_lost, _leave = Driver._on_note, ServerClient._on_lost, Driver._leave
    _tell_others, _lose, _find_shortage = Driver._tell_others, Driver._lose, ServerClient._find_shortage

    def __init__(self, rank: int) -> None:
        membership = Membership(tuple(range(5)))
        super().__init__(
            _port=SimpleNamespace(rank=rank, world_size=5, describe_peer=lambda peer: f"rank {peer}"),
            membership=membership,
            lost=membership.lost,
            layout=SimpleNamespace(survival=Quorum(part=0.0)),
            hosted={},
            _move_buckets=lambda: None,
            _changed=threading.Condition(),
            _failure=None,
            _newcomers=None,
            _elders=(),
            _may_switch=False,
            told=[],
        )

    def _send_note(self, peer: int, note: LeftBehind) -> None:
        self.told.append((peer, note.rank))

    def fail(self, error: Exception) -> None:
        self._failure = error


def test_who_was_left_behind_stops_and_accuses_nobody() -> None:
    """Rank 3 takes rank 0 for hung; rank 0 is lower."""
    client = Client(0)
    client._on_note(3, LeftBehind(rank=0))
    assert "rank 0 was left behind: rank 3 takes this rank for hung" in str(client._failure)
    client._on_note(2, LeftBehind(rank=1))
    assert not client.told
    assert not client.lost


def test_who_hears_of_one_that_hangs_goes_on_without_it_and_says_so_once() -> None:
    client = Client(4)
    for _ in range(2):
        client._on_note(0, LeftBehind(rank=2))
    assert client.told == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert list(client.lost) == [2]
    assert "rank 2 hangs, as rank 0 reports" in str(client.membership.losses[2].error)


def test_nothing_that_a_lost_rank_tells_counts_and_of_losses_the_fabric_tells() -> None:
    client = Client(2)
    client._on_lost(4, PeerLostError("rank 4 closed its connections", rank=4, host="h"))
    client._on_note(4, LeftBehind(rank=1))
    assert client.told == []
    assert list(client.lost) == [4]
