"""The server shard's decisions, event by event: instruction lists are compared whole."""

from dataclasses import replace

from syncline.updates.overlapped.server import Average, Clear, End, Fold, Hello, Push, Reply, ReplyAverage, ServerShard


def push(worker: int, round_number: int, *, period: int = 0, weight: float = 8.0, iteration: int | None = None) -> Push:
    when = round_number if iteration is None else iteration
    return Push(worker=worker, period=period, round_number=round_number, iteration=when, weight=weight)


def end(worker: int, *, period: int = 0, weight: float = 8.0) -> End:
    return End(worker=worker, period=period, weight=weight)


def test_the_first_m_make_the_gradient_in_rank_order_and_all_are_told() -> None:
    shard = ServerShard(workers=range(3), quorum=2)
    second, first = push(2, 1, weight=3.0), push(0, 1, iteration=5)
    assert shard.hear(second) == []
    assert shard.hear(first) == [
        Fold(round_number=1, contributions=(first, second)),
        Reply(worker=0, period=0, closed=1, clock=1, accepted=1),
        Reply(worker=1, period=0, closed=1, clock=1, accepted=0),
        Reply(worker=2, period=0, closed=1, clock=1, accepted=1),
    ]


def test_late_repeated_and_outdated_pushes_change_nothing() -> None:
    shard = ServerShard(workers=range(3), quorum=2)
    shard.hear(push(0, 1))
    shard.hear(push(1, 1))
    for event in (push(2, 1), push(2, 1), push(0, 1), push(2, 2, period=-1), push(2, 2, period=1)):
        assert shard.hear(event) == []
    assert (shard.closed, shard.dropped) == (1, {0: 1, 2: 4})


def test_a_reply_waits_until_the_last_one_has_left_and_then_tells_the_newest() -> None:
    shard = ServerShard(workers=range(2), quorum=1)
    shard.hear(push(0, 1))
    for round_number in (2, 3, 4):
        instructions = shard.hear(push(0, round_number))
        assert not any(isinstance(one, Reply) for one in instructions)
    assert shard.replied(0) == [Reply(worker=0, period=0, closed=4, clock=4, accepted=4)]
    assert shard.replied(1) == [Reply(worker=1, period=0, closed=4, clock=4, accepted=0)]
    assert shard.replied(1) == []


def test_a_round_does_not_wait_for_a_worker_that_waits_and_has_nothing_to_push() -> None:
    """It may wait, in another bucket, for the very one whose push lies here."""
    shard = ServerShard(workers=range(3), quorum=2)
    shard.hear(push(2, 1))
    assert shard.wait(0) == []  # worker 1 may come
    assert shard.hear(end(1)) == told(shard, 1)
    assert shard.dropped == {2: 1}
    shard.wait(2)
    assert shard.hear(push(2, 2)) == []
    assert shard.closed == 2
    shard.hear(push(0, 3))
    assert shard.hear(push(2, 3))[0] == Fold(round_number=3, contributions=(push(0, 3), push(2, 3)))


def told(shard: ServerShard, closed: int) -> list[Reply]:
    return [Reply(worker=rank, period=0, closed=closed, clock=0, accepted=0) for rank in shard.alive if rank != 1]


def test_where_all_workers_are_needed_a_round_waits_for_each() -> None:
    shard = ServerShard(workers=range(2), quorum=2)
    shard.hear(push(0, 1))
    assert shard.wait(1) == []
    assert shard.hear(push(1, 1))[0] == Fold(round_number=1, contributions=(push(0, 1), push(1, 1)))


def test_the_end_of_a_period_averages_all_that_live() -> None:
    shard = ServerShard(workers=range(3), quorum=2)
    leftover = push(1, 1)
    shard.hear(leftover)
    shard.lose(2)
    ends = [end(1, weight=2.0), end(0)]
    # Worker 1 ends: round 1 can still get worker 0.
    assert shard.hear(ends[0]) == []
    assert shard.missing() == (0,)
    assert shard.hear(ends[1]) == [
        Average(period=0, contributions=(ends[1], ends[0])),
        Clear(period=1),
        ReplyAverage(worker=0, period=0),
        ReplyAverage(worker=1, period=0),
    ]
    assert shard.dropped == {1: 1}
    assert shard.period == 1


def test_what_the_lowest_worker_tells_of_members_counts_also_for_who_missed_the_average() -> None:
    shard = ServerShard(workers=range(4), quorum=3, lost=[0], shrinks=True)
    for worker, told in ((3, (3, 0, 0)), (1, (1, 5, 5, 0)), (2, (2, 0, 0, 0))):
        instructions = shard.hear(replace(end(worker), told=told))
    assert ReplyAverage(worker=3, period=0, told=(1, 5, 5, 0)) in instructions
    successor = ServerShard(workers=range(4), quorum=3, lost=[0, 1], succeeds=True)
    successor.hear(hello(2, 0))
    assert ReplyAverage(worker=2, period=0, told=(1, 5, 5, 0)) in successor.hear(
        replace(hello(3, 1), told=(1, 5, 5, 0))
    )


def test_an_end_that_is_said_again_counts_for_nothing() -> None:
    shard = ServerShard(workers=range(2), quorum=2)
    shard.hear(end(0))
    assert shard.hear(end(0)) == []
    assert shard.missing() == (1,)


def test_a_loss_may_complete_the_period() -> None:
    shard = ServerShard(workers=range(3), quorum=2)
    shard.hear(end(0))
    shard.hear(end(1))
    assert any(isinstance(one, Average) for one in shard.lose(2))


def test_a_round_that_cannot_find_its_workers_is_abandoned() -> None:
    shard = ServerShard(workers=range(2), quorum=2)
    shard.hear(end(0))
    assert shard.hear(push(1, 1)) == [
        Reply(worker=1, period=0, closed=1, clock=0, accepted=0),
    ]
    assert shard.dropped == {1: 1}


def hello(worker: int, period: int) -> Hello:
    return Hello(worker=worker, period=period)


def test_a_successor_learns_the_period_from_all_and_keeps_what_came_before() -> None:
    shard = ServerShard(workers=range(3), quorum=1, lost=[0], succeeds=True)
    early = push(1, 1, period=4)
    assert shard.hear(hello(1, 4)) == []
    assert shard.hear(early) == []
    assert shard.missing() == (2,)
    assert shard.hear(hello(2, 4)) == [
        Clear(period=4),
        Fold(round_number=1, contributions=(early,)),
        Reply(worker=1, period=4, closed=1, clock=1, accepted=1),
        Reply(worker=2, period=4, closed=1, clock=1, accepted=0),
    ]
    assert shard.hear(hello(2, 4)) == []


def test_a_successor_brings_a_worker_that_missed_the_average_up_to_date() -> None:
    shard = ServerShard(workers=range(3), quorum=1, lost=[0], succeeds=True)
    shard.hear(hello(1, 3))
    assert shard.hear(end(1, period=3)) == []
    assert shard.hear(hello(2, 4)) == [
        Average(period=3, contributions=(hello(2, 4),)),
        Clear(period=4),
        ReplyAverage(worker=1, period=3),
    ]


def test_a_successor_does_not_wait_for_the_dead() -> None:
    shard = ServerShard(workers=range(4), quorum=1, lost=[0], succeeds=True)
    for worker, period in ((1, 3), (2, 4)):
        assert shard.hear(hello(worker, period)) == []
    instructions = shard.lose(3)
    assert Clear(period=4) in instructions
    assert ReplyAverage(worker=1, period=3) in instructions


def test_a_worker_that_stops_leaves_rounds_to_abandon_but_what_it_has_pushed_counts() -> None:
    """Its note may overtake its last push."""
    shard = ServerShard(workers=range(2), quorum=2, ends_elsewhere=True)
    first, second = push(0, 1), push(1, 1)
    shard.hear(first)
    assert shard.stop(1, period=0, last_round=1) == []
    assert shard.hear(second) == [
        Fold(round_number=1, contributions=(first, second)),
        Reply(worker=0, period=0, closed=1, clock=1, accepted=1),
    ]
    assert shard.replied(0) == []
    assert shard.hear(push(0, 2)) == [Reply(worker=0, period=0, closed=2, clock=1, accepted=1)]
    assert shard.dropped == {0: 1}


def test_the_first_message_of_a_new_period_begins_it_where_periods_end_elsewhere() -> None:
    for begin in (
        lambda shard: shard.hear(push(1, 1, period=1)),
        lambda shard: shard.stop(1, period=1, last_round=0),
    ):
        shard = ServerShard(workers=range(2), quorum=2, ends_elsewhere=True)
        shard.hear(push(0, 1))
        assert begin(shard) == [Clear(period=1)]
        assert (shard.period, shard.dropped) == (1, {0: 1})
        late = push(0, 2)
        assert shard.hear(late) == []
        assert shard.stop(0, period=0, last_round=2) == []
        assert shard.dropped == {0: 2}
