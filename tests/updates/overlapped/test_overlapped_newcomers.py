"""Newcomers come into a job with the overlapped update when a period ends, also in place of who was killed."""

from pathlib import Path

import pytest

from newcomer_play import (
    DEATHS,
    SPLITS,
    check_replayed,
    check_return,
    ends_of,
    members_at_last,
    play,
    play_death,
    play_return,
    play_split,
)


@pytest.mark.parametrize("victim", [0, 2])
def test_who_was_killed_comes_back(victim: int, tmp_path: Path) -> None:
    """Also as the one that led, whose place another takes for those that ask to come in."""
    played, left = play_return(tmp_path, victim, {})
    check_return(played, left, victim)


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


@DEATHS
def test_whoever_dies_in_a_switch_those_that_live_go_on_and_take_the_next_one_in(
    tmp_path: Path, who: int, place: str, left: list[int], told_newcomer: str
) -> None:
    all_left = play_death(tmp_path, (who, place, left, told_newcomer), {})
    assert members_at_last(all_left)[:-1] == left
    check_replayed(all_left, unlike=range(5, all_left[-1][0][0] + 1))


@SPLITS
def test_members_that_are_split_between_two_fabrics_go_on_in_one(
    tmp_path: Path, miss: list[int], num_come: int, left: list[int]
) -> None:
    """Where most of the members went back, rank 0 stops, though four of seven are with it."""
    ends_of(play_split(tmp_path, (miss, num_come, left), {}))
