"""Newcomers come into a job with local steps when a round ends, also in place of who was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("local_steps_process.py")
KILLED = -9
RULES = {
    "overlapped": {"period": 4, "fragments": 4, "bucket_bytes": 64},
    "in turn": {"period": 2, "fragments": 1, "overlap": False},
    "momentum": {"period": 4, "fragments": 2, "momentum": True, "bucket_bytes": 64},
}

TWO_SITES = """
switch: wide-area
children:
  - {switch: a, uplink: 1 Gbit/s, children: [{host: a0, uplink: 1 Gbit/s}, {host: a1, uplink: 1 Gbit/s}]}
  - {switch: b, uplink: 1 Gbit/s, children: [{host: b0, uplink: 1 Gbit/s}, {host: b1, uplink: 1 Gbit/s}]}
"""


def play(folder: Path, number: int, plan: dict[str, Any]) -> tuple[list[tuple[int, str]], list[dict[str, Any] | None]]:
    """Run a plan (see the script) with ``number`` processes; return what each wrote, and what it told in JSON."""
    for newcomer in plan["come"]:
        os.mkfifo(folder / f"come-{newcomer}")
    results = run_script(SCRIPT, number, str(folder), json.dumps(plan))
    told = [
        next((json.loads(line[5:]) for line in output.splitlines() if line.startswith("told ")), None)
        for _, output in results
    ]
    return results, told


def ended(told: list[dict[str, Any] | None], left: list[int]) -> dict[str, Any]:
    """Those that are left ended with the same; return that."""
    first, *others = [told[own] for own in left]
    assert first is not None
    for other in others:
        assert other is not None
        for name in ("counts", "last", "members", "iteration", "rate", "parties"):
            assert other[name] == first[name], name
    return first


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("rule", RULES)
def test_who_was_killed_comes_back(rule: str, victim: int, tmp_path: Path) -> None:
    """Also as the one that led; all go on with what they have moved since, and the newcomer with what all have."""
    plan = {"members": 3, "leave": {str(victim): 7}, "come": {"3": 8}, "door": 1, "switches": 1, "rule": RULES[rule]}
    results, told = play(tmp_path, 4, plan)
    assert [status for status, _ in results] == [KILLED if own == victim else 0 for own in range(4)], results
    left = [own for own in range(3) if own != victim]
    end = ended(told, [*left, 3])
    assert end["members"] == [*left, 3]
    assert end["rate"] == 1.0
    assert told[1]["changes"] == [[[victim], []], [[], [3]]]
    if rule != "momentum":
        for counts in end["counts"]:
            assert counts[left[0]] == pytest.approx(counts[left[1]], abs=1e-6)
            share = (end["iteration"] - told[3]["came"]) / 3  # less where members bring more steps to its first rounds
            assert share / 2 < counts[3] < share + 1e-6


def test_newcomers_get_what_all_have_also_from_who_has_no_state(tmp_path: Path) -> None:
    """Adam keeps no state on a rank that has made no step, and the momentum of rounds must be the same on all."""
    rule = RULES["momentum"]
    plan = {"members": 2, "come": {"2": 12, "3": 12}, "together": 2, "switches": 1, "rule": rule}
    results, told = play(tmp_path, 4, plan | {"optimizer": "adam", "idle": [0]})
    assert [status for status, _ in results] == [0] * 4, results
    end = ended(told, [0, 1, 2, 3])
    assert end["members"] == [0, 1, 2, 3]
    assert told[0] is not None
    assert told[0]["changes"] == [[[], [2, 3]]]


@pytest.mark.parametrize(
    ("who", "place", "left"),
    [(4, "take", [0, 1, 2, 3]), (4, "resume", [0, 1, 2, 3]), (1, "meet", [0, 2, 3]), (0, "give", [1, 2, 3])],
)
def test_whoever_dies_in_a_switch_those_that_live_go_on_and_take_the_next_one_in(
    tmp_path: Path, who: int, place: str, left: list[int]
) -> None:
    plan = {"members": 4, "die": {str(who): place}, "come": {"4": 4, "5": 0}, "door": 2, "switches": 2}
    results, told = play(tmp_path, 6, plan | {"rule": RULES["overlapped"]})
    for own, (status, _) in enumerate(results):
        assert status == (KILLED if own == who else 0 if own in (*left, 5) else 1), results
    assert ended(told, [*left, 5])["members"][:-1] == left


@pytest.mark.parametrize(
    ("miss", "num_come", "left"),
    [([1, 2, 3], 3, [1, 2, 3]), ([3], 1, [0, 1, 2, 4])],
    ids=["most go back", "one goes back"],
)
def test_members_that_are_split_between_two_fabrics_go_on_in_one(
    tmp_path: Path, miss: list[int], num_come: int, left: list[int]
) -> None:
    come = {str(own): 4 for own in range(4, 4 + num_come)}
    plan = {"members": 4, "miss": miss, "come": come, "together": num_come, "switches": 1, "rule": RULES["overlapped"]}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results, told = play(tmp_path, 4 + num_come, plan | {"meeting_port": store.port})
    for own, (status, output) in enumerate(results):
        assert status == (0 if own in left else 1), results
        assert own in left or ("PeerLostError" if own in miss and own >= 4 else "QuorumLostError") in output
    ended(told, left)


def test_a_party_takes_in_who_comes_to_its_site(tmp_path: Path) -> None:
    """Its mate averaged gradients with nobody meanwhile, and does with the newcomer then."""
    topology = tmp_path / "net.yaml"
    topology.write_text(TWO_SITES)
    plan = {"members": 4, "leave": {"3": 7}, "come": {"4": 9}, "switches": 1, "topology": str(topology)}
    plan |= {"hosts": ["a0", "a1", "b0", "b1", "b1"], "rule": RULES["overlapped"]}
    results, told = play(tmp_path, 5, plan)
    assert [status for status, _ in results] == [0, 0, 0, KILLED, 0], results
    end = ended(told, [0, 1, 2, 4])
    assert end["parties"] == [[0, 1], [2, 3]]
    assert end["members"] == [0, 1, 2, 4]
