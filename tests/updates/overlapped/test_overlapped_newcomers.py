"""Newcomers come into a job with the overlapped update when a period ends, also in place of who was killed."""

from pathlib import Path

import pytest
from torch.distributed import TCPStore

from newcomer_play import KILLED, check_replayed, ends_of, members_at_last, play


@pytest.mark.parametrize("victim", [0, 2])
def test_who_was_killed_comes_back(victim: int, tmp_path: Path) -> None:
    """Also as the one that led, whose place another takes for those that ask to come in."""
    door = 1
    plan = {"members": 3, "leave": {str(victim): 7}, "come": {"3": 8}, "door": door, "switches": 1, "last": 2}
    results, told = play(tmp_path, 4, plan)
    assert [status for status, _ in results] == [KILLED if own == victim else 0 for own in range(4)], results
    left = [own for own in range(3) if own != victim]
    all_left = [told[own] for own in (*left, 3)]
    came = told[3][0][0]
    assert members_at_last(all_left) == [*left, 3]
    assert told[door][-1] == {"changes": [[[victim], [], 9], [[], [3], came + 1]], "num_updaters": 1}
    assert f"syncline: rank 3 came in after step {came}; 3 ranks go on in epoch 1" in results[left[0]][1]
    check_replayed(all_left, unlike=range(7, came + 1))


def test_two_come_in_together_with_the_state_that_members_have(tmp_path: Path) -> None:
    """With Adam's steps made anew on global gradients; nobody was lost before."""
    plan = {"members": 2, "come": {"2": 4, "3": 4}, "together": 2, "optimizer": "adam", "max_staleness": 8}
    results, told = play(tmp_path, 4, plan | {"switches": 1, "last": 2})
    assert [status for status, _ in results] == [0] * 4, results
    assert members_at_last(told) == [0, 1, 2, 3]
    came = told[2][0]
    assert came == told[3][0]
    assert told[0][-1]["changes"] == [[[], [2, 3], came[0] + 1]]
    assert came in told[0], "Adam has counted what rank 0's has, which is each rank's own"


@pytest.mark.parametrize("alters", [{"width": 16}, {"period": 8}])
def test_another_training_is_refused_and_the_job_goes_on(alters: dict[str, int], tmp_path: Path) -> None:
    plan = {"members": 2, "come": {"2": 4, "3": 8}, "alters": {"2": alters}, "switches": 1, "last": 2}
    results, told = play(tmp_path, 4, plan)
    assert [status for status, _ in results] == [0, 0, 1, 0], results
    assert "its training is another one" in results[2][1]
    all_left = [told[0], told[1], told[3]]
    check_replayed(all_left)
    assert members_at_last(all_left) == [0, 1, 2]


@pytest.mark.parametrize(
    ("who", "place", "left", "told_newcomer"),
    [
        (4, "take", [0, 1, 2, 3], ""),
        (4, "resume", [0, 1, 2, 3], ""),
        (1, "meet", [0, 2, 3], "PeerLostError: rank 1"),
        (0, "give", [1, 2, 3], "PeerLostError: rank 0"),
    ],
)
def test_whoever_dies_in_a_switch_those_that_live_go_on_and_take_the_next_one_in(
    tmp_path: Path, who: int, place: str, left: list[int], told_newcomer: str
) -> None:
    plan = {"members": 4, "die": {str(who): place}, "come": {"4": 4, "5": 0}, "door": 2, "switches": 2, "last": 2}
    results, told = play(tmp_path, 6, plan)
    for own, (status, output) in enumerate(results):
        assert status == (KILLED if own == who else 0 if own in (*left, 5) else 1), results
        assert own != 4 or told_newcomer in output
    all_left = [told[own] for own in (*left, 5)]
    assert members_at_last(all_left)[:-1] == left
    check_replayed(all_left, unlike=range(5, told[5][0][0] + 1))


@pytest.mark.parametrize(
    ("miss", "num_come", "left"),
    [([1, 2, 3], 3, [1, 2, 3]), ([3], 1, [0, 1, 2, 4])],
    ids=["most go back", "one goes back"],
)
def test_members_that_are_split_between_two_fabrics_go_on_in_one(
    tmp_path: Path, miss: list[int], num_come: int, left: list[int]
) -> None:
    """Whatever newcomers say: where most of the members went back, rank 0 stops, though four of seven are with it."""
    come = {str(own): 4 for own in range(4, 4 + num_come)}
    plan = {"members": 4, "miss": miss, "come": come, "together": num_come, "switches": 1, "last": 3}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results, told = play(tmp_path, 4 + num_come, plan | {"meeting_port": store.port})
    for own, (status, output) in enumerate(results):
        assert status == (0 if own in left else 1), results
        assert own in left or ("PeerLostError" if own in miss and own >= 4 else "QuorumLostError") in output
    ends_of([told[own] for own in left])
