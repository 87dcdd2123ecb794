"""Who is in a round: all orders in which ranks of a small job can begin rounds, and time can pass."""

import itertools

import pytest

from syncline.errors import ConfigurationError
from syncline.updates import Grace
from syncline.updates.attendance import Attendance

GRACE_S, PATIENCE_S = 1.0, 30.0


def attendance(*parties: list[int], quorum: int = 2) -> Attendance:
    return Attendance(parties or [[0], [1], [2]], quorum=quorum, grace_s=GRACE_S, patience_s=PATIENCE_S)


def test_all_that_came_last_time_are_waited_for_until_the_window_ends() -> None:
    one = attendance()
    one.begin(0, 0, ends=False, now_s=0.0)
    assert one.decide(5.0) is None, "there is no quorum"
    one.begin(1, 0, ends=False, now_s=7.0)
    assert one.look_s == 7.0 + GRACE_S
    assert one.decide(7.9) is None
    assert one.decide(8.0) == (2,)
    for rank in (0, 1):
        one.begin(rank, 1, ends=False, now_s=9.0)
    assert one.decide(9.0) == (2,), "nobody waits for it again"
    one.begin(2, 0, ends=False, now_s=9.1)
    assert one.decide(9.1) is None
    for rank in (0, 1):
        one.begin(rank, 2, ends=False, now_s=9.2)
    assert one.decide(9.3) is None, "it has come back"
    one.begin(2, 2, ends=False, now_s=9.4)
    assert one.decide(9.4) == ()


def test_a_party_is_there_when_all_of_its_ranks_are() -> None:
    one = attendance([0, 1], [2, 3], quorum=1)
    for rank in (0, 1, 2):
        one.begin(rank, 0, ends=False, now_s=0.0)
    assert one.decide(GRACE_S) == (1,)


def test_where_nobody_can_be_gone_without_all_are_in() -> None:
    one = attendance()
    one.begin(0, 0, ends=False, now_s=0.0)
    assert one.look_s == PATIENCE_S
    assert one.decide(PATIENCE_S) == (), "errors of the sums name who is missing"
    for rank in (0, 1):
        one.begin(rank, 1, ends=True, now_s=40.0)
    assert one.decide(40.5) is None
    assert one.decide(41.0) == (), "who ends has nothing better to do than wait"
    for rank, ends in enumerate((True, False)):
        one.begin(rank, 2, ends=ends, now_s=50.0)
    assert one.decide(51.0) == (2,), "one of them still trains"


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_whoever_comes_when_each_round_has_a_quorum_or_waits_for_all(quorum: int) -> None:
    """Each rank begins its next round, the one that is not decided yet, in all orders of five events."""
    for events in itertools.product(("0", "1", "2", "time"), repeat=6):
        one, now_s = attendance(quorum=quorum), 0.0
        begun: dict[int, int] = {}
        for event in events:
            now_s += GRACE_S if event == "time" else 0.0
            if event != "time" and begun.get(int(event), -1) < one.number:
                begun[int(event)] = one.number
                one.begin(int(event), one.number, ends=False, now_s=now_s)
            number, left_out = one.number, one.decide(now_s)
            if left_out is not None:
                there = {rank for rank, last in begun.items() if last == number}
                assert there == {0, 1, 2}.difference(left_out)
                assert len(there) >= quorum
                assert one.number == number + 1
            elif len(begun) == 3 and set(begun.values()) == {number}:
                pytest.fail(f"all are there, and nothing is decided: {events}")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"seconds": -1.0}, "Grace: seconds must be a number from 0 up"),
        ({"quorum": 0}, "Grace: quorum must be"),
    ],
)
def test_a_window_out_of_range_is_refused(arguments: dict, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Grace(**arguments)
