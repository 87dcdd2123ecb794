"""Five hundred seeds of each commit: jobs, partitions, engines, agreements, elections and grants on virtual time."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simulate
from cluster_world import World
from scenario_clusters import ClusterScenario
from scenario_job import FAULTS, JobScenario, RestingJobScenario
from scenario_overlapped import PRIME, OverlappedScenario
from scenario_partition import PartitionScenario
from virtual_time import Host, SimulationError, VirtualTime

from syncline.fabric import acceptor, mesh
from syncline.fabric.acceptor import Acceptor
from syncline.fabric.peer_transport import TransportSet
from syncline.runtime.engine import Engine

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


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_where_each_rank_has_two_neighbours(fault: str, in_a_ring: None) -> None:
    scenarios = [JobScenario(seed, fault, max_ranks=9, most_connected=1) for seed in range(6)]
    for scenario in scenarios:
        scenario.run()
    assert sum(scenario.topology.num_ranks > 4 for scenario in scenarios) > 1


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_where_connections_rest(fault: str, in_a_ring: None) -> None:
    scenarios = [RestingJobScenario(seed, fault) for seed in range(6)]
    for scenario in scenarios:
        scenario.run()
    is_over_at_once = fault == "other call"  # all fail in the first, before anybody rests
    assert is_over_at_once or sum(scenario.num_woken for scenario in scenarios) > 30


@pytest.mark.parametrize(
    ("seed", "fault"),
    [(28, "stranger"), (39, "short cut"), (38, "held"), (69, "held"), (5004, "cut"), (25, "kill"), (3074, "storm")],
)
def test_jobs_that_failed_once_where_connections_rest(seed: int, fault: str, in_a_ring: None) -> None:
    RestingJobScenario(seed, fault).run()


@pytest.mark.parametrize(("seed", "fault"), [(81, "storm"), (10, "held"), (80, "cut"), (126, "cut")])
def test_jobs_that_failed_once_where_each_rank_has_two_neighbours(seed: int, fault: str, in_a_ring: None) -> None:
    JobScenario(seed, fault, max_ranks=9, most_connected=1).run()


@pytest.mark.parametrize("seed", [127, 181])
def test_cuts_that_failed_once_where_each_rank_has_two_neighbours(seed: int, in_a_ring: None) -> None:
    PartitionScenario(seed, num_ranks=5 + seed % 4, settled_s=60.0, most_connected=1).run()


@pytest.mark.parametrize("first", range(0, 20, 5))
def test_sides_of_a_cut_where_ranks_are_not_all_connected(first: int) -> None:
    for seed in range(first, first + 5):
        PartitionScenario(seed, num_ranks=9 + seed % 9, settled_s=60.0, most_connected=1).run()


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_sides_of_a_cut_where_each_rank_has_two_neighbours(first: int, in_a_ring: None) -> None:
    for seed in range(first, first + 20):
        PartitionScenario(seed, num_ranks=5 + seed % 4, settled_s=60.0, most_connected=1).run()


@pytest.mark.parametrize("seed", [0, 9, 17, 101])
def test_resets_while_ranks_connect_cost_no_rank(seed: int) -> None:
    scenario = JobScenario(seed, "reset")
    for delays in range(1, 8):
        scenario.time.at(0.005 + delays * scenario.network.delay_s, scenario._strike)
    scenario.run()


@pytest.mark.parametrize("seed", [1, 14, 15, 20])
def test_who_loses_its_place_in_a_handshake_comes_again(seed: int, monkeypatch) -> None:
    """One place for all, for hardly a round trip: many hold themselves for connected, and are not."""
    scenario, refused = JobScenario(seed, "none"), []

    def one_place(*args: Any, num_expected: int, **settings: Any) -> Acceptor:
        refused.append(Acceptor(*args, num_expected=1 - acceptor.MAX_UNAUTHENTICATED, **settings))
        return refused[-1]

    monkeypatch.setattr(mesh, "Acceptor", one_place)
    monkeypatch.setattr(acceptor, "PATIENCE_S", 2.5 * scenario.network.delay_s)
    scenario.run()
    assert sum(each.num_refused for each in refused) > 0


def test_jobs_are_played_on_the_compiled_transport_and_executor() -> None:
    scenario = JobScenario(2, "none")
    assert not scenario.job.options.authenticate_frames
    scenario.run()
    for rank in scenario.job.ranks:
        assert rank.fabric is not None
        assert isinstance(rank.engine, Engine)
        assert isinstance(rank.fabric._transport_set, TransportSet)
        assert "CompiledSliceExecutor" in repr(rank.engine._executor)


def test_what_a_task_fails_with_is_told_where_nobody_waits_for_it() -> None:
    time = VirtualTime(0)
    host = Host(time, 1)

    async def fail() -> None:
        raise ValueError("planted")

    task = host.start(fail())
    time.run(lambda: False, limit_s=1.0)
    assert "planted" in str(host.errors)
    assert task.exception() is not None
    assert not host.errors
    time.close()


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


def test_a_start_of_many_ranks_replays_exactly() -> None:
    """More than 16, so that not all are connected, and some call others by a third."""
    first, second = (simulate.MANY["start"](40) for _ in range(2))
    assert first.digest == second.digest


def test_what_goes_to_all_waits_as_one_and_comes_as_if_each_had_been_asked_for() -> None:
    due = [(float(place % 7), f"to {place}") for place in range(100)]
    logs = []
    for sends_at_once in (False, True):
        time = VirtualTime(0)
        if sends_at_once:
            time.at_each(due, time.note)
        else:
            for when_s, target in due:
                time.at(when_s, time.note, target)
        time.at(3.0, time.note, "after all that is due then")
        assert len(time._events) == (2 if sends_at_once else 101)
        time.run(lambda: False, limit_s=10.0)
        logs.append(list(time.last_lines))
    assert logs[0] == logs[1]
    assert len(logs[0]) == 101


def test_clusters_of_many_ranks_are_looked_through_when_servers_change_and_not_at_each_event(monkeypatch) -> None:
    """To ask at each event what may happen to anybody made the time grow with the cube of the ranks."""
    num_checks = 0
    check_servers = World.check_servers

    def count(self: World) -> None:
        nonlocal num_checks
        num_checks += 1
        check_servers(self)

    monkeypatch.setattr(World, "check_servers", count)
    monkeypatch.setattr(World, "choices", lambda _: pytest.fail("all choices were asked for"))
    played = ClusterScenario(simulate.MANY_SEED, num_ranks=150).run()
    assert num_checks < played.num_events / 5


def test_numbers_do_not_grow_with_the_workers() -> None:
    fleet = OverlappedScenario(simulate.MANY_SEED, num_ranks=150).fleet
    gradients = [fleet.gradient(worker, number) for worker in (0, 149) for number in (1, 2)]
    assert len(set(gradients)) == 4
    assert max(gradients).bit_length() <= 127
    assert fleet.divide(sum(gradients) * 4, 4) == sum(gradients) % PRIME


def test_news_of_a_loss_reach_those_whom_the_finder_cannot_reach() -> None:
    """Rank 1 loses rank 4 and, before it can tell rank 0, that one too: ranks 2 and 3 pass on what it told them."""
    PartitionScenario(1, num_ranks=5, pairs=((1, 4), (0, 1))).run()


def test_of_two_ranks_that_lose_each_other_all_lose_the_higher_one() -> None:
    scenario = PartitionScenario(1, num_ranks=4, pairs=((1, 2),))
    scenario.run()
    assert [sorted(rank.ear.losses) for rank in scenario.job.ranks] == [[2], [2], [0, 1, 3], [2]]


@pytest.mark.parametrize("num_ranks", [4, 6])
def test_who_was_believed_before_it_was_lost_itself_is_believed_by_all(num_ranks: int) -> None:
    """Rank 1 accuses rank 2 to all but rank 0, which it cannot reach, and is then lost to rank 0."""
    scenario = PartitionScenario(1, num_ranks=num_ranks, pairs=((1, 2), (0, 1)))
    scenario.run()
    rest = [scenario.job.ranks[0], *scenario.job.ranks[3:]]
    assert [{*rank.ear.losses} for rank in rest] == [{1, 2}] * (num_ranks - 2)


@pytest.mark.parametrize("seed", [17927, 23963, 51983, 53283, 85423, 86623, 89323])
def test_seeds_that_failed_once(seed: int) -> None:
    """Each is told of in `docs/faults.md` ("What simulations have found")."""
    assert not simulate.play(seed).error
