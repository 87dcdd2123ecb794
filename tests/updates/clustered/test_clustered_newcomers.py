"""Newcomers come into a job with the clustered update when a term ends, also in place of who was killed."""

from pathlib import Path

import pytest

from newcomer_play import (
    DEATHS,
    KILLED,
    SPLITS,
    check_return,
    ends_of,
    members_at_last,
    play,
    play_death,
    play_return,
    play_split,
)

TWO = {"rule": "clustered", "settings": {"clusters": 2}, "hosts": ["a", "a", "b", "b", "b", "b", "b"]}


@pytest.mark.parametrize("victim", [0, 2])
def test_who_was_killed_comes_back_into_one_cluster(victim: int, tmp_path: Path) -> None:
    """Also as the one that led, whose place another takes for those that ask to come in."""
    played, left = play_return(tmp_path, victim, {"rule": "clustered"})
    check_return(played, left, victim)


def moment_at(iteration: int, told: list) -> float:
    """Return what a rank's optimizer had when so many steps were made."""
    return next(line[5] for line in told if line[0] == iteration)


@pytest.mark.parametrize("settings", [{}, {"period": 1}, {"forecast": 0.5}, {"reelect_every": 2}])
@pytest.mark.parametrize("victim", [0, 3])
def test_who_was_killed_comes_back_into_one_of_two_clusters(victim: int, settings: dict, tmp_path: Path) -> None:
    plan = {"members": 4, "leave": {str(victim): 7}, "come": {"4": 8}, "door": 1, "switches": 1, "last": 2}
    hosts = [*TWO["hosts"][:4], TWO["hosts"][victim]]
    plan |= TWO | {"optimizer": "adam", "hosts": hosts, "settings": TWO["settings"] | settings}
    results, told = play(tmp_path, 5, plan)
    assert [status for status, _ in results] == [KILLED if own == victim else 0 for own in range(5)], results
    left = [own for own in range(4) if own != victim]
    all_left = [told[own] for own in (*left, 4)]
    assert members_at_last(all_left) == [*left, 4]
    came, after = told[4][0], told[4][1]
    assert came[4] == came[0], "Adam has counted all steps"
    for line in (came, after):
        moments = {own: moment_at(line[0], told[own]) for own in (*left, 4)}
        mates = [[own for own in moments if hosts[own] == host] for host in ("a", "b")]
        assert [len({moments[own] for own in ranks}) for ranks in mates] == [1, 1], moments
        assert len(set(moments.values())) == (1 if settings == {"period": 1} else 2), "each cluster has its own"


def test_who_comes_from_several_clusters_into_one_begins_with_an_optimizer_without_state(tmp_path: Path) -> None:
    """Three equal hosts are the clusters (0) and (1, 2), four are (0, 1) and (2, 3)."""
    plan = {"members": 3, "come": {"3": 4}, "switches": 1, "last": 2, "optimizer": "adam"}
    results, told = play(tmp_path, 4, plan | TWO | {"hosts": ["a", "b", "c", "d"]})
    assert [status for status, _ in results] == [0] * 4, results
    came = told[3][0][0]
    counted = {own: next(line[4] for line in told[own] if line[0] == came) for own in range(4)}
    assert counted == {0: 0, 1: 0, 2: came, 3: came}
    assert members_at_last(told) == [0, 1, 2, 3]


@DEATHS
def test_whoever_dies_in_a_switch_those_that_live_go_on_and_take_the_next_one_in(
    tmp_path: Path, who: int, place: str, left: list[int], told_newcomer: str
) -> None:
    plan = TWO | {"hosts": ["a", "a", "b", "b", "a", "a"], "door": 3}
    all_left = play_death(tmp_path, (who, place, left, told_newcomer), plan)
    assert members_at_last(all_left)[:-1] == left


@SPLITS
def test_members_that_are_split_between_two_fabrics_go_on_in_one(
    tmp_path: Path, miss: list[int], num_come: int, left: list[int]
) -> None:
    """Where most of the members went back, rank 0 stops, though four of seven are with it."""
    ends_of(play_split(tmp_path, (miss, num_come, left), TWO))
