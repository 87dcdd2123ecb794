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


@pytest.mark.parametrize(("quorum", "num_states"), [(3, 2685), (2, 60141)])
def test_three_workers_four_iterations(quorum: int, num_states: int) -> None:
    """Pushes arrive in every order, and every worker uses any newest pull, or none, in each step."""

    def check(fleet: Fleet) -> None:
        check_finished(fleet)
        if quorum == 3:
            assert [worker.clock.num_steps for worker in fleet.workers] == [4, 4, 4]
            assert sorted(fleet.closings) == [1, 2, 3, 4]

    start = Fleet(num_workers=3, num_iterations=4, quorum=quorum, is_prompt=True)
    assert explore(start, check) == num_states


@pytest.mark.parametrize("quorum", [3, 2])
@pytest.mark.parametrize("window", [1, 2])
def test_three_workers_that_hold_back_what_would_not_return(quorum: int, window: int) -> None:
    """No push is missed by a round that others wait for, whatever each worker has learnt of how long pushes take."""

    def check(fleet: Fleet) -> None:
        check_finished(fleet)
        assert sorted(fleet.closings) == list(range(1, len(fleet.closings) + 1))

    start = Fleet(
        num_workers=3,
        num_iterations=3,
        quorum=quorum,
        window=window,
        is_prompt=True,
        holds_back=True,
    )
    assert explore(start, check) > 50


@pytest.mark.parametrize(
    ("window", "quorum", "num_iterations", "max_staleness"),
    [
        *((window, 3, 3, None) for window in (1, 2)),
        *((window, 3, 3, 1) for window in (1, 2)),
        *((window, 3, 4, 0) for window in (1, 2)),
        *((window, 2, 2, None) for window in (1, 2)),
        *((window, 2, 3, 0) for window in (1, 2)),
        *((window, 1, 2, None) for window in (1, 2)),
    ],
)
def test_three_workers_on_a_slow_network(
    window: int, quorum: int, num_iterations: int, max_staleness: int | None
) -> None:
    """One push at a time on its way, so runs grow; sends, pushes, pulls and acknowledgements in every order."""

    def check(fleet: Fleet) -> None:
        check_finished(fleet)
        assert fleet.most_held <= 2, "the server's memory is bounded"
        if max_staleness == 0 and quorum == 3:
            assert {worker.fed for worker in fleet.workers} == {fleet.cumulative}, "this is synchronous training"

    start = Fleet(
        num_workers=3,
        num_iterations=num_iterations,
        quorum=quorum,
        max_staleness=max_staleness,
        window=window,
    )
    assert explore(start, check) > 50
