"""Every order in which steps, pushes and pulls can happen, for small fleets: each gradient enters once.

``Fleet.check`` runs after every step of every worker in every reachable state; it compares what was fed to the
optimizer with a plain reference made from the list of who was in which round.
"""

import gc
from collections.abc import Callable, Iterator

import pytest
from overlapped_fleet import Fleet


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """Nothing here is cyclic for long, and looking for cycles among a million small objects takes most of the time."""
    gc.disable()
    yield
    gc.enable()


def explore(start: Fleet, check_finished: Callable[[Fleet], None]) -> int:
    """Visit every state (workers' names apart), check those in which nothing can happen any more; return how many."""
    seen, stack = {hash(start.key())}, [start]
    while stack:
        fleet = stack.pop()
        choices = fleet.choices()
        if not choices:
            check_finished(fleet)
        for choice in choices:
            successor = fleet.after(*choice)
            key = hash(successor.key())
            if key not in seen:
                seen.add(key)
                stack.append(successor)
    return len(seen)


def check_finished(fleet: Fleet) -> None:
    assert all(worker.has_ended for worker in fleet.workers), "a worker waits for ever"
    assert all(worker.clock.num_steps <= fleet.num_iterations for worker in fleet.workers)


@pytest.mark.parametrize(("quorum", "num_iterations", "num_states"), [(3, 6, 5521), (2, 5, 11891)])
def test_three_workers(quorum: int, num_iterations: int, num_states: int) -> None:
    """Pushes arrive in every order, and every worker uses any newest pull, or none, in each step.

    No push is missed by a round that others wait for, whatever each worker has learnt of how long pushes take.
    """

    def check(fleet: Fleet) -> None:
        check_finished(fleet)
        assert sorted(fleet.closings) == list(range(1, len(fleet.closings) + 1))
        if quorum == 3:
            assert [worker.clock.num_steps for worker in fleet.workers] == [num_iterations] * 3

    start = Fleet(num_workers=3, num_iterations=num_iterations, quorum=quorum, is_prompt=True)
    assert explore(start, check) == num_states


@pytest.mark.parametrize(
    ("quorum", "num_iterations", "max_staleness"),
    [(3, 4, None), (3, 4, 1), (3, 4, 0), (2, 2, None), (2, 3, None), (2, 3, 0), (1, 2, None)],
)
def test_three_workers_on_a_slow_network(quorum: int, num_iterations: int, max_staleness: int | None) -> None:
    """One push at a time on its way, so runs grow; sends, pushes, pulls and acknowledgements in every order."""

    def check(fleet: Fleet) -> None:
        check_finished(fleet)
        assert fleet.most_held <= 1, "the server's memory is bounded"
        if max_staleness == 0 and quorum == 3:
            assert {worker.fed for worker in fleet.workers} == {fleet.cumulative}, "this is synchronous training"

    start = Fleet(
        num_workers=3,
        num_iterations=num_iterations,
        quorum=quorum,
        max_staleness=max_staleness,
    )
    assert explore(start, check) > 50
