"""Who may go on of whom, who is believed, and who takes over."""

import pytest

from syncline.errors import PeerLostError, UpdateError
from syncline.members import Membership, Quorum, QuorumLostError, successor


def membership(num_members: int, lost=(), left=()) -> Membership:
    known = Membership(tuple(range(num_members)))
    for rank in (*left, *lost):
        known.lose(rank, has_left=rank in left)
    return known


@pytest.mark.parametrize(
    ("lost", "left", "may_go_on"),
    [
        ((1,), (), True),
        ((2, 3), (), True),
        ((0, 1), (), False),
        ((1, 2, 3), (), False),
        ((2,), (0, 1), False),
        ((3,), (0, 1), True),
        ((), (0, 1, 2), True),
        ((), (0, 1, 2, 3), True),
    ],
)
def test_who_may_go_on_of_four(lost: tuple, left: tuple, may_go_on: bool) -> None:
    assert (membership(4, lost, left).shortage(Quorum()) is None) is may_go_on


@pytest.mark.parametrize("num_members", range(1, 7))
@pytest.mark.parametrize("part", [0.5, 0.6, 0.9])
def test_of_two_parts_that_lose_sight_of_each_other_at_most_one_goes_on(num_members: int, part: float) -> None:
    """Also where each side knows only of some who have left; those who left go on nowhere."""
    for code in range(4**num_members):
        of = [code // 4**rank % 4 for rank in range(num_members)]  # on one side, on the other, left: told one, or both
        sides = [[rank for rank in range(num_members) if of[rank] == side] for side in (0, 1)]
        told = [{rank for rank in range(num_members) if of[rank] in tells} for tells in ({2, 3}, {3})]
        go_on = 0
        for side, left in zip(sides, told, strict=True):
            lost = [rank for rank in range(num_members) if rank not in side and rank not in left]
            go_on += bool(side) and membership(num_members, lost, sorted(left)).shortage(Quorum(part=part)) is None
        assert go_on <= 1, (sides, told)


def test_a_smaller_part_lets_few_go_on() -> None:
    assert membership(6, (0, 1, 2, 3)).shortage(Quorum(part=0.3)) is None
    assert membership(6, (0, 1, 2, 3, 4)).shortage(Quorum(part=0.3)) is not None


def test_a_fixed_number_is_of_all_members() -> None:
    assert membership(4, (1,), (2,)).shortage(Quorum(part=0.0, least=2)) is None
    error = membership(4, (1,), (2,)).shortage(Quorum(part=0.0, least=3), what="workers")
    assert isinstance(error, QuorumLostError)
    assert error.missing == (1, 2)
    assert "needs 3 of 4 workers, but 2 are left: rank 1 and rank 2 lost" in str(error)


def test_a_shortage_names_who_is_missing() -> None:
    error = membership(4, (0, 1)).shortage(Quorum(), describe=lambda rank: f"rank {rank} (host h{rank})")
    assert error is not None
    assert error.missing == (0, 1)
    assert str(error) == (
        "2 of 4 ranks are in reach: rank 0 (host h0) and rank 1 (host h1) lost, who may live and go on elsewhere; "
        "only more than half go on, or half with the lowest rank; start again from a checkpoint"
    )


def test_since_when_a_rank_is_lost_and_why() -> None:
    now_s = 3.0
    known = Membership((0, 1, 2), clock=lambda: now_s)
    assert known.lose(2)
    now_s = 5.0
    error = PeerLostError("rank 2 is silent", rank=2, host="c")
    assert not known.lose(2, error), "others had told of it"
    assert not known.lose(2, UpdateError("something that came of it"))
    assert known.lose(1, UpdateError("rank 1 hangs"))
    assert (known.losses[2].error, known.losses[2].since_s) == (error, 3.0)
    assert [*known.lost] == [2, 1]
    assert known.living == (0,)
    now_s = 15.0
    assert known.describe_lost("rank {}".format) == "; lost before: rank 2, 12.0 s ago; rank 1, 10.0 s ago"
    assert membership(2).describe_lost("rank {}".format) == ""


def test_the_first_of_an_order_that_lives_serves() -> None:
    assert successor((2, 0, 1), {2}) == 0
    assert successor((2, 0, 1), {2, 0}) == 1
    assert successor((2,), {2}) is None
