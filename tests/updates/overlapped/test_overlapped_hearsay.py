"""Who is told that it was left behind, or given up, takes nobody along; and who believes another says so."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from syncline.errors import PeerLostError
from syncline.fabric import GivenUpError
from syncline.members import Membership, News, Quorum
from syncline.updates.overlapped.messages import Lost
from syncline.updates.overlapped.server_client import ServerClient


class Client(SimpleNamespace):
    """What of a rank's client hears of losses, in a job of five; what it tells is kept."""

    _on_told_loss, _on_lost, _tell_loss = ServerClient._on_told_loss, ServerClient._on_lost, ServerClient._tell_loss
    _believe = ServerClient._believe

    def __init__(self, rank: int) -> None:
        membership = Membership(tuple(range(5)))
        super().__init__(
            _port=SimpleNamespace(rank=rank, describe_peer=lambda peer: f"rank {peer}"),
            membership=membership,
            lost=membership.lost,
            layout=SimpleNamespace(world_size=5, survival=Quorum(part=0.0)),
            hosted={},
            _move_buckets=lambda: None,
            _changed=threading.Condition(),
            _news=News(),
            _failure=None,
            told=[],
        )

    def _tell(self, peer: int, note: Lost) -> None:
        self.told.append(note)

    def fail(self, error: Exception) -> None:
        self._failure = error


def hear(client: Client, reporter: int, note: Lost) -> list[Lost]:
    """Let it hear; return what it tells the others."""
    client.told.clear()
    client._on_told_loss(reporter, note)
    return list(client.told)


def test_who_was_left_behind_accuses_nobody() -> None:
    """Rank 3 takes rank 0 for hung, and then says once more that it is lost; rank 0 is lower."""
    client = Client(0)
    assert hear(client, 3, Lost(rank=0, is_left_behind=True)) == []
    assert "rank 0 was left behind: rank 3 takes this rank for hung" in str(client._failure)
    assert hear(client, 3, Lost(rank=0, is_left_behind=False)) == []
    assert not client.lost


def test_who_believes_another_says_so_and_is_believed() -> None:
    notes = hear(Client(4), 0, Lost(rank=2, is_left_behind=False))
    assert set(notes) == {Lost(rank=2, is_left_behind=False, is_told=True)}
    client = Client(2)
    assert hear(client, 4, notes[0]) == []
    assert "rank 2 was left behind: rank 4 has lost its connection to this rank" in str(client._failure)


def test_who_has_lost_a_lower_rank_that_lives_is_not_believed_until_that_is_lost_too() -> None:
    """Rank 1 has lost rank 0, and takes rank 3, which has given it up, for lost."""
    client = Client(2)
    assert hear(client, 1, Lost(rank=0, is_left_behind=False)) == []
    assert hear(client, 1, Lost(rank=3, is_left_behind=False)) == []
    assert not client.lost
    client._on_lost(0, PeerLostError("rank 0 died", rank=0, host="h"))
    assert set(client.lost) == {0, 3}


def test_of_two_that_lost_each_other_the_lower_one_accuses_the_other() -> None:
    client = Client(2)
    assert set(hear(client, 4, Lost(rank=2, is_left_behind=False))) == {Lost(rank=4, is_left_behind=False)}
    assert client._failure is None


@pytest.mark.parametrize(("kind", "num_told"), [(PeerLostError, 4), (GivenUpError, 0)])
def test_a_peer_that_was_told_to_give_this_rank_up_is_not_accused(kind: type[PeerLostError], num_told: int) -> None:
    client = Client(2)
    client._on_lost(4, kind("rank 4 closed its connections", rank=4, host="h"))
    assert len(client.told) == num_told
    assert list(client.lost) == [4]
