"""A worker's decisions for one bucket, call by call, and its iteration numbers."""

import pytest

from syncline.updates.overlapped.server import Push, Reply
from syncline.updates.overlapped.worker import BucketWorker, Keep, PeriodClock, Send, Use


def make() -> BucketWorker:
    return BucketWorker(rank=0, num_rounds=20)


def send(place: int, round_number: int, *, iteration: int | None = None, weight: float = 8.0, period: int = 0) -> Send:
    when = round_number if iteration is None else iteration
    push = Push(worker=0, period=period, round_number=round_number, iteration=when, weight=weight)
    return Send(place=place, push=push)


def reply(closed: int, accepted: int = 0, *, clock: int | None = None, period: int = 0) -> Reply:
    when = closed if clock is None else clock
    return Reply(worker=0, period=period, closed=closed, clock=when, accepted=accepted)


def test_an_iteration_on_a_fast_network() -> None:
    worker = make()
    assert worker.step(iteration=1, weight=8.0) == [Keep(place=0, add=False), send(0, 1)]
    assert worker.use() is None
    worker.sent()
    assert worker.step(iteration=2, weight=8.0) == [Keep(place=1, add=False)]
    assert worker.arrived(reply(1, 1))
    assert worker.use() == Use(closed=1, subtract=0, replaces=False, run_length=1, num_own=1)
    assert worker.use() is None
    assert worker.staleness == 1
    assert worker.step(iteration=3, weight=8.0) == [Keep(place=1, add=True), send(1, 2, iteration=3)]


def test_the_global_gradient_of_this_very_step_replaces_the_own_one() -> None:
    worker = make()
    worker.step(iteration=1, weight=8.0)
    worker.arrived(reply(1, 1))
    assert worker.use() == Use(closed=1, subtract=None, replaces=True, run_length=1, num_own=1)
    assert worker.staleness == 0


def test_gradients_join_while_a_push_is_out() -> None:
    worker = make()
    worker.step(iteration=1, weight=8.0)
    assert worker.step(iteration=2, weight=8.0) == [Keep(place=1, add=False)]
    worker.sent()
    assert worker.step(iteration=3, weight=4.0) == [Keep(place=1, add=True)]
    worker.arrived(reply(1, 1))
    worker.use()
    assert worker.step(iteration=4, weight=8.0) == [Keep(place=1, add=True), send(1, 2, iteration=4, weight=20 / 3)]
    assert worker.staleness == 3
    worker.arrived(reply(2, 2, clock=4))
    assert worker.use() == Use(closed=2, subtract=1, replaces=False, run_length=3, num_steps=3, num_own=3), (
        "the run holds more than this gradient"
    )


def test_what_was_late_is_settled_but_not_subtracted() -> None:
    worker = make()
    worker.step(iteration=1, weight=8.0)
    worker.sent()
    worker.arrived(reply(1))
    assert worker.use() == Use(closed=1, subtract=None, replaces=False, run_length=1)
    assert worker.staleness == 0


def test_a_worker_that_is_behind_pushes_for_the_first_round_that_may_be_open() -> None:
    worker, clock = make(), PeriodClock(20)
    worker.step(iteration=clock.tick(fleet=worker.clock, weight=1.0), weight=1.0)
    worker.sent()
    worker.arrived(reply(7, clock=7))
    worker.use()
    iteration = clock.tick(fleet=worker.clock, weight=1.0)
    assert iteration == 8
    assert worker.step(iteration=iteration, weight=1.0)[1] == send(0, 8, weight=1.0)


def test_a_place_is_not_used_again_before_its_push_has_left() -> None:
    worker = make()
    worker.step(iteration=1, weight=8.0)
    worker.arrived(reply(1))  # closed by others while our push is on its way
    worker.use()
    assert [worker.step(iteration=number, weight=8.0)[0] for number in (2, 3)] == [
        Keep(place=1, add=False),
        Keep(place=1, add=True),
    ]
    worker.end_period()
    assert worker.step(iteration=1, weight=8.0) == [Keep(place=1, add=False)]
    worker.sent()
    assert worker.hurry(iteration=1) == [send(1, 1, period=1)]


def test_replies_of_an_older_period_and_older_replies_change_nothing() -> None:
    worker = make()
    worker.step(iteration=1, weight=8.0)
    worker.arrived(reply(3, 1))
    assert not worker.arrived(reply(2, 1))
    assert not worker.arrived(reply(3, 1))
    worker.end_period()
    assert not worker.arrived(reply(5, 1))
    assert worker.use() is None


def test_after_the_loss_of_the_server_nothing_is_out() -> None:
    worker = make()
    worker.step(iteration=1, weight=8.0)
    worker.arrived(reply(1, 1))
    assert worker.restart() == 1
    assert worker.use() is None
    assert worker.staleness == 0
    worker.sent()
    assert worker.step(iteration=2, weight=8.0)[1] == send(0, 1, iteration=2)


def test_the_clock_ends_with_the_fleet() -> None:
    clock = PeriodClock(10)
    assert [clock.tick(fleet=0, weight=4.0) for _ in range(2)] == [1, 2]
    assert clock.tick(fleet=5, weight=4.0) == 6
    clock.catch_up(reached=8)
    assert (clock.iteration, clock.is_last) == (8, False)
    assert clock.tick(fleet=10, weight=4.0) == 10
    assert clock.is_last
    assert (clock.num_steps, clock.num_samples) == (4, 16.0)


@pytest.mark.parametrize(("iteration", "is_pushed"), [(17, True), (18, False)])
def test_what_would_not_come_back_before_the_period_ends_is_held_back(iteration: int, is_pushed: bool) -> None:
    """A push took three iterations to come back, so the last one leaves three before the end, at 20."""
    worker = make()
    for earlier in (1, 2, 3, 4):
        worker.step(iteration=earlier, weight=8.0)
        worker.sent()
    worker.arrived(reply(1, 1))
    worker.use()
    late = send(1, 2, iteration=iteration)
    assert worker.step(iteration=iteration, weight=8.0)[1:] == [late] * is_pushed
    assert worker.hurry(iteration=iteration) == [late] * (not is_pushed), "it is waited for"
    worker.sent()
    worker.end_period()
    assert worker.step(iteration=1, weight=8.0)[1:] == [send(0, 1, period=1)]
