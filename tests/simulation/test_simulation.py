"""Five hundred seeds of each commit: jobs, partitions, engines, agreements, elections and grants on virtual time."""

import subprocess
import sys
from pathlib import Path

import pytest
import simulate
from scenario_job import FAULTS, JobScenario
from scenario_partition import PartitionScenario
from virtual_time import SimulationError, VirtualTime

NUM_SEEDS = 500
CHUNK = 50


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, CHUNK))
def test_seeds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        outcome = simulate.play(seed)
        assert not outcome.error, f"{outcome.error}\nagain: {simulate.replay_command(seed)}"


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_job(fault: str) -> None:
    for seed in range(4):
        JobScenario(10_000 + seed, fault).run()


def test_every_scenario_has_its_seeds() -> None:
    played = [simulate.scenario_of(seed) for seed in range(NUM_SEEDS)]
    assert {*played} == {*simulate.SCENARIOS}
    assert min(played.count(name) for name in simulate.SCENARIOS) >= NUM_SEEDS // 20


@pytest.mark.parametrize("name", simulate.SCENARIOS)
def test_a_seed_that_is_played_again_gives_the_same_log(name: str) -> None:
    play, _ = simulate.SCENARIOS[name]
    first, second, other = play(7), play(7), play(8)
    assert first.num_events > 3
    assert (first.digest, first.num_events, first.now_s) == (second.digest, second.num_events, second.now_s)
    assert first.digest != other.digest


def test_another_process_replays_a_seed_to_the_bit() -> None:
    seeds = [next(seed for seed in range(20) if simulate.scenario_of(seed) == name) for name in simulate.SCENARIOS]
    here = {seed: simulate.play(seed).digest for seed in seeds}
    program = f"import simulate; print(*(simulate.play(seed).digest for seed in {seeds}))"
    path = f"import sys; sys.path.insert(0, {str(Path(simulate.__file__).parent)!r}); "
    there = subprocess.run(
        [sys.executable, "-c", path + program], capture_output=True, text=True, check=True, timeout=300
    ).stdout.split()
    assert there == [here[seed] for seed in seeds]


def test_a_failing_seed_is_told_with_what_plays_it_again(monkeypatch, capsys) -> None:
    def fail(_seed: int) -> VirtualTime:
        raise SimulationError("planted")

    monkeypatch.setitem(simulate.SCENARIOS, "grants", (fail, 3))
    seed = next(seed for seed in range(20) if simulate.scenario_of(seed) == "grants")
    assert simulate.simulate(range(seed, seed + 1), 1) == 1
    told = capsys.readouterr().out
    assert "planted" in told
    assert f"--replay {seed}" in told
    assert simulate.replay(seed, shows_log=False) == 1


@pytest.mark.parametrize("name", simulate.MANY)
def test_many_ranks_in_one_process(name: str, capsys) -> None:
    assert simulate.play_many(name, 75) == 0
    assert f"{name} with 75 ranks in one process" in capsys.readouterr().out


def test_news_of_a_loss_reach_those_whom_the_finder_cannot_reach() -> None:
    """Rank 1 loses rank 4 and, before it can tell rank 0, that one too: ranks 2 and 3 pass on what it told them."""
    PartitionScenario(1, num_ranks=5, pairs=((1, 4), (0, 1))).run()


def test_of_two_ranks_that_lose_each_other_all_lose_the_higher_one() -> None:
    scenario = PartitionScenario(1, num_ranks=4, pairs=((1, 2),))
    scenario.run()
    assert [sorted(rank.ear.losses) for rank in scenario.job.ranks] == [[2], [2], [0, 1, 3], [2]]


@pytest.mark.parametrize("seed", [17927, 23963])
def test_seeds_that_failed_once(seed: int) -> None:
    """Each is told of in `docs/faults.md` ("What simulations have found")."""
    assert not simulate.play(seed).error
