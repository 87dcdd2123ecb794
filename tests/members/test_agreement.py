"""Who goes on after losses: one side at most, all of it in one epoch, whatever comes in which order."""

import random

import pytest
from agreement_world import World

from syncline.errors import FabricError
from syncline.members import Epoch, QuorumLostError
from syncline.members.agreement import Agreement, Go, Interrupt, Loss, Report, Stop, Tell
from syncline.runtime.regroup import decode_report, encode_report


def check(world: World) -> None:
    """Whoever goes on is in one epoch with all others who do."""
    for rank in world.going_on:
        assert not world.machines[rank].is_resting, f"rank {rank} waits for ever"
    epochs = {world.epochs[rank] for rank in world.going_on}
    assert len(epochs) <= 1, f"two sides go on: {epochs}"
    for epoch in epochs:
        assert list(epoch.members) == world.going_on


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_deaths_and_cuts_at_any_time_leave_one_side(first):
    for seed in range(first, first + 250):
        play(seed)


def play(seed):
    draw = random.Random(seed)
    num_ranks = draw.randint(2, 9)
    world = World(num_ranks, seed)
    for _ in range(draw.randint(1, 3)):
        for _ in range(draw.randint(0, 20)):
            world.step()
        kind = draw.random()
        if kind < 0.6:
            world.kill(draw.randrange(num_ranks))
        elif kind < 0.8:
            world.cut(draw.randrange(num_ranks), draw.randrange(num_ranks))
        else:
            side = draw.sample(range(num_ranks), draw.randint(1, num_ranks - 1))
            for one in side:
                for other in set(range(num_ranks)) - set(side):
                    world.cut(one, other)
    world.settle()
    check(world)


@pytest.mark.parametrize("num_dead", [1, 3])
def test_a_majority_goes_on_after_deaths(num_dead):
    for seed in range(100):
        world = World(8, seed)
        dead = random.Random(seed).sample(range(8), num_dead)
        for rank in dead:
            world.kill(rank)
            for _ in range(seed % 7):
                world.step()
        world.settle()
        check(world)
        assert world.going_on == [rank for rank in range(8) if rank not in dead], f"seed {seed}"


@pytest.mark.parametrize(("side", "goes_on"), [((0, 1), True), ((2, 3), False), ((0, 3), True)])
def test_of_two_halves_that_with_the_lowest_rank_goes_on(side, goes_on):
    world = World(4, 1)
    others = [rank for rank in range(4) if rank not in side]
    for one in side:
        for other in others:
            world.cut(one, other)
    world.settle()
    assert world.going_on == (list(side) if goes_on else others)
    for rank in set(range(4)) - set(world.going_on):
        assert isinstance(world.stopped[rank], QuorumLostError)


def test_a_cut_between_two_ranks_costs_the_higher_one_alone():
    world = World(3, 2)
    world.cut(0, 1)
    world.settle()
    assert world.going_on == [0, 2]
    assert isinstance(world.stopped[1], QuorumLostError)


def outcast_report():
    """Of rank 1, which has lost rank 0, and takes rank 3 for lost, which gave it up because of that."""
    return Report(
        base=Epoch(number=0, members=(0, 1, 2, 3, 4)), losses={0: Loss(accuser=1), 3: Loss(accuser=1)}, first_free=1
    )


def test_who_has_lost_a_lower_rank_that_lives_is_not_believed_until_that_is_lost_too():
    machine = Agreement(rank=2, epoch=Epoch(number=0, members=(0, 1, 2, 3, 4)))
    machine.rest(first_free=1)
    machine.hear(1, outcast_report())
    assert machine.living == (0, 1, 2, 3, 4)
    machine.lose(0)
    assert machine.living == (1, 2, 4)


def test_who_is_accused_by_one_that_is_lost_itself_goes_on():
    machine = Agreement(rank=3, epoch=Epoch(number=0, members=(0, 1, 2, 3, 4)))
    machine.rest(first_free=1)
    assert not any(isinstance(effect, Stop) for effect in machine.hear(1, outcast_report()))
    assert machine.living == (0, 2, 3, 4)


def test_who_is_given_up_by_hearsay_accuses_nobody_and_stops():
    machine = Agreement(rank=1, epoch=Epoch(number=0, members=(0, 1, 2, 3, 4)))
    [effect] = machine.be_given_up(3)
    assert isinstance(effect, Stop)
    assert "rank 1 was left behind: rank 3 tells that others" in str(effect.error)
    assert machine.lose(3) == machine.be_given_up(2) == []


def test_fewer_than_the_user_wants_stop():
    world = World(4, 3, min_ranks=3)
    world.kill(1)
    world.settle()
    assert world.going_on == [0, 2, 3]
    world.kill(2)
    world.settle()
    assert not world.going_on
    assert "needs 3" in str(world.stopped[0])


def test_who_says_nothing_in_time_is_left_behind():
    epoch = Epoch(number=0, members=(0, 1, 2))
    first, second = (Agreement(rank=rank, epoch=epoch) for rank in (0, 1))
    [told] = first.rest(first_free=1)
    second.hear(0, told.report)
    [answer] = second.rest(first_free=1)
    assert first.hear(1, answer.report) == []
    effects = first.expire()
    assert effects[0].report.losses == {2: Loss(accuser=0)}
    assert first.expire() != []


def test_a_rank_that_comes_back_is_told():
    epoch = Epoch(number=0, members=(0, 1, 2))
    late = Agreement(rank=2, epoch=epoch)
    report = Report(base=Epoch(number=1, members=(0, 1)), losses={2: Loss(accuser=0)}, first_free=4)
    [stop] = late.hear(0, report)
    assert isinstance(stop, Stop)
    assert "the others have gone on without it" in str(stop.error)
    assert late.rest(first_free=4) == [], "it says nothing more"


def test_new_streams_are_free_on_all():
    first, second = (Agreement(rank=rank, epoch=Epoch(number=0, members=(0, 1, 2))) for rank in (0, 1))
    first.lose(2)
    second.lose(2)
    [told] = first.rest(first_free=30)
    second.hear(0, told.report)
    answer, _, go = second.rest(first_free=12)
    assert go.first_stream == 30
    _, same = first.hear(1, answer.report)
    assert same == go


def test_who_is_left_out_is_told_before_the_others_may_have_gone():
    """A late rank whose peers have come to their end meanwhile would else find only that they are gone."""
    epoch = Epoch(number=0, members=(0, 1, 2))
    first, second = (Agreement(rank=rank, epoch=epoch) for rank in (0, 2))
    for machine in (first, second):
        machine.lose(1)
    [told] = first.rest(first_free=1)
    second.hear(0, told.report)
    _, news, go = second.rest(first_free=1)
    assert isinstance(go, Go)
    assert news.peers == (1,)
    late = Agreement(rank=1, epoch=epoch)
    [stop] = late.hear(2, news.report)
    assert late.lose(0) == late.lose(2) == late.rest(first_free=1) == []
    assert stop.error.ranks_at_fault == (1,)
    assert "rank 1 was left behind: rank 2 tells that the others have gone on without it" in str(stop.error)


def test_who_has_left_by_itself_is_told_nothing():
    machine = Agreement(rank=0, epoch=Epoch(number=0, members=(0, 1)))
    machine.expect_leave(1)
    machine.lose(1)
    [go] = machine.rest(first_free=1)
    assert isinstance(go, Go)


def test_reports_travel():
    losses = {2: Loss(accuser=0), 999: Loss(accuser=3)}
    report = Report(base=Epoch(number=7, members=(0, 1, 500)), losses=losses, first_free=65535)
    assert decode_report(encode_report(report)) == report
    for cut in range(len(encode_report(report))):
        with pytest.raises(FabricError):
            decode_report(encode_report(report)[:cut])


class Members(tuple):
    """Members of which is counted how often all are looked through."""

    num_scans = 0

    def __iter__(self):
        Members.num_scans += 1
        return super().__iter__()


def play_one_loss(num_ranks, monkeypatch, *, reverse):
    """Let one rank of many hear of a loss, work, rest, and hear all others, those who know of the loss too late first.

    Return how many comparisons of reports, and looks at all members, that took.
    """
    num_compared = Members.num_scans = 0
    epoch = Epoch(number=0, members=Members(range(num_ranks)))
    machine = Agreement(rank=0, epoch=epoch)
    says_the_same = Agreement._says_the_same

    def count(self, rank):
        nonlocal num_compared
        num_compared += 1
        return says_the_same(self, rank)

    monkeypatch.setattr(Agreement, "_says_the_same", count)
    peers = sorted(range(1, num_ranks - 1), reverse=reverse)
    lost = {num_ranks - 1: Loss(accuser=0)}
    for peer in peers:
        assert machine.hear(peer, Report(base=epoch, losses=lost, first_free=1)) == [Interrupt(lost=num_ranks - 1)]
    machine.heard.clear()
    machine.rest(first_free=1)
    for losses in ({}, lost):
        for peer in peers:
            effects = machine.hear(peer, Report(base=epoch, losses=losses, first_free=1))
    assert [type(effect) for effect in effects] == [Tell, Go]
    monkeypatch.setattr(Agreement, "_says_the_same", says_the_same)
    return num_compared, Members.num_scans


@pytest.mark.parametrize("reverse", [False, True])
def test_a_report_costs_as_much_among_twice_as_many_ranks(monkeypatch, reverse):
    """A rank hears as many reports as there are ranks, so looking at all of them for each would cost their square."""
    num_compared, num_scans = play_one_loss(200, monkeypatch, reverse=reverse)
    assert num_compared < 4 * 200
    assert num_scans < 10
    twice_compared, twice_scans = play_one_loss(400, monkeypatch, reverse=reverse)
    assert twice_compared <= 2 * num_compared + 10
    assert twice_scans == num_scans


def test_reports_of_one_base_are_decoded_with_one_list_of_members():
    """Each of a thousand ranks keeps a thousand reports."""
    base = Epoch(number=3, members=tuple(range(1000)))
    reports = [Report(base=base, losses={1000: Loss(accuser=rank)}, first_free=rank) for rank in (1, 2)]
    first, second = [decode_report(encode_report(report)) for report in reports]
    assert first == reports[0]
    assert first.base is second.base


def test_who_dies_without_a_word_after_it_has_reported_is_waited_for_once_more():
    """A loss was learnt late, so that the time is over before the silence of the next one that dies."""
    machine = Agreement(rank=0, epoch=Epoch(number=0, members=tuple(range(8))))
    machine.rest(first_free=1)
    for peer in (1, 2, 3, 4, 5):
        machine.hear(peer, Report(base=machine.base, losses={7: Loss(accuser=0)}, first_free=1))
    machine.lose(6)
    for peer in (1, 2, 3, 4):
        assert not machine.hear(peer, Report(base=machine.base, losses=dict(machine.losses), first_free=1))
    assert not machine.expire()
    for peer in (1, 2, 3, 4):
        machine.hear(peer, Report(base=machine.base, losses=machine.losses | {5: Loss(accuser=1)}, first_free=1))
    machine.lose(5)
    assert machine.epoch.members == (0, 1, 2, 3, 4)


def test_who_has_nothing_new_to_tell_and_differs_still_ends_the_agreement():
    machine = Agreement(rank=0, epoch=Epoch(number=0, members=(0, 1, 2, 3)))
    machine.lose(3)
    machine.rest(first_free=1)
    for peer in (1, 2):
        machine.hear(peer, Report(base=machine.base, losses={}, first_free=1))
    [effect] = machine.expire()
    assert "did not agree in time" in str(effect.error)


def test_who_lacks_ranks_that_hold_it_for_lost_names_itself():
    """It believes neither, as their numbers are higher, and holds them for lost in turn."""
    epoch = Epoch(number=0, members=(0, 1, 2, 3, 4))
    machine = Agreement(rank=1, epoch=epoch)
    machine.rest(first_free=1)
    effects = []
    for peer in (2, 3, 4):
        effects += machine.hear(peer, Report(base=epoch, losses={1: Loss(accuser=peer)}, first_free=1))
    error = effects[-1].error
    assert isinstance(error, QuorumLostError)
    assert error.ranks_at_fault == (1,)
    assert "rank 1 was left behind: rank 2 tells that" in str(error)
