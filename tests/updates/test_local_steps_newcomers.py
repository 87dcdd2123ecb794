"""Newcomers come into a job with local steps when a round ends, also in place of who was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from newcomer_play import DEATHS, KILLED, SPLITS, play, play_death, play_return, play_split

SCRIPT = Path(__file__).with_name("local_steps_process.py")
RULES = {
    "overlapped": {"period": 4, "fragments": 4, "bucket_bytes": 64},
    "in turn": {"period": 2, "fragments": 1, "overlap": False},
    "momentum": {"period": 4, "fragments": 2, "momentum": True, "bucket_bytes": 64},
    "own pace": {"period": 8, "fragments": 4, "pace": "own", "bucket_bytes": 64},
}

TWO_SITES = """
switch: wide-area
children:
  - {switch: a, uplink: 1 Gbit/s, children: [{host: a0, uplink: 1 Gbit/s}, {host: a1, uplink: 1 Gbit/s}]}
  - {switch: b, uplink: 1 Gbit/s, children: [{host: b0, uplink: 1 Gbit/s}, {host: b1, uplink: 1 Gbit/s}]}
"""


def ended(all_left: list[list[Any]]) -> dict[str, Any]:
    """Those that are left ended with the same; return that."""
    first, *others = [told[-1] for told in all_left]
    for other in others:
        for name in ("counts", "last", "members", "iteration", "rate", "parties"):
            assert other[name] == first[name], name
    return dict(first)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("rule", RULES)
def test_who_was_killed_comes_back(rule: str, victim: int, tmp_path: Path) -> None:
    """Also as the one that led; all go on with what they have moved since, and the newcomer with what all have."""
    (_, told), left = play_return(tmp_path, victim, {"rule": RULES[rule]}, script=SCRIPT)
    end = ended([told[own] for own in left])
    assert end["members"] == left
    assert end["rate"] == 1.0
    assert told[1][-1]["changes"] == [[[victim], []], [[], [3]]]
    if rule in ("overlapped", "in turn"):
        for counts in end["counts"]:
            assert counts[left[0]] == pytest.approx(counts[left[1]], abs=1e-6)
            share = (end["iteration"] - told[3][-1]["came"]) / 3  # less where members bring more to its first rounds
            assert share / 2 < counts[3] < share + 1e-6


def test_newcomers_get_what_all_have_also_from_who_has_no_state(tmp_path: Path) -> None:
    """Adam keeps no state on a rank that has made no step, and the momentum of rounds must be the same on all."""
    rule = RULES["momentum"]
    plan = {"members": 2, "come": {"2": 12, "3": 12}, "together": 2, "switches": 1, "rule": rule}
    results, told = play(tmp_path, 4, plan | {"optimizer": "adam", "idle": [0]}, script=SCRIPT)
    assert [status for status, _ in results] == [0] * 4, results
    assert ended(told)["members"] == [0, 1, 2, 3]
    assert told[0][-1]["changes"] == [[[], [2, 3]]]


@DEATHS
def test_whoever_dies_in_a_switch_those_that_live_go_on_and_take_the_next_one_in(
    tmp_path: Path, who: int, place: str, left: list[int], told_newcomer: str
) -> None:
    plan = {"rule": RULES["overlapped"]}
    all_left = play_death(tmp_path, (who, place, left, told_newcomer), plan, script=SCRIPT)
    assert ended(all_left)["members"][:-1] == left


@SPLITS
def test_members_that_are_split_between_two_fabrics_go_on_in_one(
    tmp_path: Path, miss: list[int], num_come: int, left: list[int]
) -> None:
    ended(play_split(tmp_path, (miss, num_come, left), {"rule": RULES["overlapped"]}, script=SCRIPT))


def test_a_party_takes_in_who_comes_to_its_site(tmp_path: Path) -> None:
    """Its mate averaged gradients with nobody meanwhile, and does with the newcomer then."""
    topology = tmp_path / "net.yaml"
    topology.write_text(TWO_SITES)
    plan = {"members": 4, "leave": {"3": 7}, "come": {"4": 9}, "switches": 1, "topology": str(topology)}
    plan |= {"hosts": ["a0", "a1", "b0", "b1", "b1"], "rule": RULES["overlapped"]}
    results, told = play(tmp_path, 5, plan, script=SCRIPT)
    assert [status for status, _ in results] == [0, 0, 0, KILLED, 0], results
    end = ended([told[own] for own in (0, 1, 2, 4)])
    assert end["parties"] == [[0, 1], [2, 3]]
    assert end["members"] == [0, 1, 2, 4]
