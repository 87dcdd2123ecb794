import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
from cluster_world import JOB, World, accuse
from clustered_killers import AskedKiller, ServerKiller, kill_one_who_hands_out
from random_worlds import Proposer, random_world

from syncline.updates.clustered.messages import (
    Agreed,
    Contribution,
    Farewell,
    Join,
    Kind,
    RecordSchedule,
    Supply,
    decode,
    encode,
)
from syncline.updates.clustered.server import ServerState
from syncline.updates.clustered.view import draw_order, draw_server
from syncline.updates.flat import VectorShape

CLUSTERS = ((0, 1, 2), (3, 4), (5,))
AGENDA = RecordSchedule(period=2, reelect_every=2, averages=True)
SHAPE = VectorShape(parts=())


def test_without_faults_every_rank_holds_every_record() -> None:
    world = World(CLUSTERS, AGENDA, num_records=30)
    world.settle()
    world.check_finished()
    kinds = [record.kind for record, _ in world.players[0].applied]
    period = [Kind.MEAN, Kind.MEAN, Kind.RESULT]
    assert kinds == [*period, *period, Kind.AVERAGE] * 4 + kinds[28:]


def test_without_faults_a_batch_costs_one_message_up_and_one_down_for_each_member() -> None:
    world = World(((0, 1, 2, 3),), RecordSchedule(period=1, reelect_every=100, has_outer_rounds=False), num_records=10)
    world.settle()
    assert world.num_messages == {"Join": 3, "Contribution": 30, "Agreed": 30}


def test_without_faults_an_outer_round_costs_one_message_between_each_two_servers() -> None:
    world = World(CLUSTERS, RecordSchedule(period=2, reelect_every=100), num_records=3)
    world.settle()
    assert world.num_messages["Ready"] == 3 * 2
    assert world.num_messages["Supply"] == 0


def test_each_term_has_its_servers() -> None:
    world = World((tuple(range(8)),), RecordSchedule(period=1, reelect_every=1, has_outer_rounds=False), num_records=40)
    served: list[int] = []
    world.on_state = lambda rank, state: served.append(rank) if state is ServerState.COLLECTING else None
    world.settle()
    assert len(set(served)) == 8, "in 40 terms each of 8 ranks serves"


@pytest.mark.parametrize("seed", range(60))
def test_any_order_and_any_deaths(seed: int) -> None:
    print("seed", seed)
    choose = random.Random(seed)
    world = random_world(choose)
    rate = choose.choice([0, 0.01, 0.03, 0.1])

    def perhaps_kill() -> None:
        live = world.live()
        if len(live) > 1 and choose.random() < rate:
            servers = [rank for rank in live if world.players[rank].node.servers]
            world.kill(choose.choice(servers if servers and choose.random() < 0.7 else live), choose)

    world.settle(choose, before_each=perhaps_kill)
    world.check_finished()


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_live_but_are_taken_for_dead_stop_and_the_others_agree(seed: int) -> None:
    print("seed", seed)
    choose = random.Random(seed)
    world = random_world(choose)

    def perhaps_accuse() -> None:
        live = world.live()
        if len(live) > 2 and choose.random() < 0.03:
            accuse(world, *choose.sample(live, 2))

    world.settle(choose, before_each=perhaps_accuse)
    world.check_agreement()
    assert all(len(world.players[rank].applied) == world.num_records for rank in world.sound()), world.describe()
    if world.sound():
        assert all(world.players[rank].stop is not None for rank in world.players if rank not in world.sound())


@pytest.mark.parametrize("state", ServerState)
def test_the_server_dies_in_each_state(state: ServerState) -> None:
    """20 deaths in each state; LEVELLING and FETCHING exist only after another server died, so that makes two."""
    num_deaths = 0
    for seed in range(1000):
        print("seed", seed)
        choose = random.Random(seed)
        world = World(CLUSTERS, AGENDA, num_records=14)
        for _ in range(choose.randint(5, 120)):
            if choices := world.choices():
                world.happen(choose.choice(choices))
        if state in {ServerState.LEVELLING, ServerState.FETCHING}:
            kill_one_who_hands_out(world, choose)
        kill_once = ServerKiller(world, state, choose)
        world.settle(choose, before_each=kill_once)
        world.check_finished()
        num_deaths += len(kill_once.victims)
        if num_deaths == 20:
            return
    raise AssertionError(f"only {num_deaths} servers died {state.value}")


def test_the_one_who_was_asked_for_a_record_dies_too() -> None:
    """As long as others live, each who is asked dies with the question unread; in 20 worlds where one is asked."""
    schedule = RecordSchedule(period=1, reelect_every=2, has_outer_rounds=False)
    num_worlds = 0
    for seed in range(1000):
        print("seed", seed)
        choose = random.Random(seed)
        world = World((tuple(range(5)),), schedule, num_records=8)
        kill_one_who_hands_out(world, choose)
        kill_asked = AskedKiller(world, choose)
        world.settle(choose, before_each=kill_asked)
        world.check_finished()
        num_worlds += bool(kill_asked.victims)
        if num_worlds == 20:
            return
    raise AssertionError(f"only in {num_worlds} worlds was a rank asked for a record")


@pytest.mark.parametrize("seed", range(20))
def test_a_whole_cluster_dies_and_the_weights_tell_it(seed: int) -> None:
    choose = random.Random(seed)
    world = World(CLUSTERS, RecordSchedule(period=1, reelect_every=2), num_records=12)
    for _ in range(choose.randint(0, 40)):
        world.happen(choose.choice(world.choices()))
    for rank in (0, 1, 2):
        world.kill(rank, choose)
    world.settle(choose)
    world.check_finished()
    _, last = world.players[5].applied[-1]
    assert last.samples == (0.0, 1.0, 1.0)


def test_one_cluster_alone_goes_on_with_its_own_means() -> None:
    world = World(((0, 1), (2, 3)), RecordSchedule(period=1, reelect_every=1), num_records=6)
    for rank in (2, 3):
        world.kill(rank)
    world.settle()
    world.check_finished()
    assert [agreed.payload for record, agreed in world.players[0].applied if record.is_outer_round] == [None] * 3


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("num_deaths", [0, 1, 3])
def test_clusters_are_made_anew_and_nobody_is_left_between_them(seed: int, num_deaths: int) -> None:
    choose = random.Random(f"{seed}/{num_deaths}")
    record_schedule = RecordSchedule(period=choose.randint(1, 2), reelect_every=choose.randint(1, 2), averages=True)
    world = World(
        CLUSTERS,
        record_schedule,
        num_records=4 * record_schedule.records_of_term,
        propose=Proposer(seed, CLUSTERS),
    )
    for _ in range(num_deaths):
        for _ in range(choose.randint(0, 150)):
            if choices := world.choices():
                world.happen(choose.choice(choices))
        world.kill(choose.choice(world.live()), choose)
    world.settle(choose)
    world.check_finished()
    assert len(world.live()) == 6 - num_deaths
    if num_deaths == 0:
        (first, *_), terms = world.players[0].applied, world.players[0].clusters
        assert first[0].term == 0
        assert sorted(terms) == [0, 1, 2, 3, 4]
        for term in range(4):  # the first cluster's server proposed it, or to go on as before
            proposer = draw_server(JOB, term, terms[term][0], set())
            assert terms[term + 1] == (world.propose(proposer, term) or terms[term])


def test_who_proposes_has_heard_from_everyone() -> None:
    record_schedule = RecordSchedule(period=1, reelect_every=1, averages=True)
    world = World(CLUSTERS, record_schedule, num_records=3, propose=lambda rank, term: ())
    world.settle()
    proposer = draw_server(JOB, 0, CLUSTERS[0], set())
    assert world.players[proposer].node.measurements == {rank: (("of", rank),) for rank in range(6)}


def test_a_rank_that_is_cut_off_stops() -> None:
    world = World(CLUSTERS, AGENDA, num_records=20, quorum=0.5)
    for other in (1, 2, 3, 4, 5):
        accuse(world, 0, other)
        world.players[other].node.lose(0)
    assert world.players[0].stop is not None
    assert "2 of 6 ranks are in reach: rank 1, rank 2, rank 3 and rank 4 lost" in world.players[0].stop


@pytest.mark.parametrize("seed", range(20))
def test_of_two_halves_that_lose_sight_of_each_other_one_goes_on(seed: int) -> None:
    choose = random.Random(seed)
    world = World(((0, 1), (2, 3, 4), (5,)), AGENDA, num_records=20, quorum=0.5)
    for _ in range(choose.randint(0, 60)):
        world.happen(choose.choice(world.choices()))
    low = (0, *choose.sample(range(1, 6), 2))
    high = tuple(rank for rank in range(6) if rank not in low)
    world.cut(itertools.product(low, high))
    world.settle(choose)
    assert world.live() == sorted(low)
    for rank in low:
        assert len(world.players[rank].applied) == 20
    reasons = [world.players[rank].stop for rank in high]
    assert all("ranks are in reach" in reason for reason in reasons)
    assert any("3 of 6 ranks are in reach: rank 0, " in reason for reason in reasons)


@pytest.mark.parametrize("seed", range(20))
def test_newcomers_do_not_make_up_for_elders_that_may_have_gone_back(seed: int) -> None:
    """Until an outer round has shown who of them is here; three of six, with the lowest, would else go on."""
    choose, elders = random.Random(seed), (0, 1, 2, 3)
    world = World(((0, 4), (1, 2), (3, 5)), AGENDA, num_records=20, quorum=0.5, elders=elders)
    early, rounds = seed % 2 == 0, [record for record in range(20) if AGENDA.record(record).is_outer_round]
    while not early and any(len(player.applied) <= rounds[0] for player in world.players.values()):
        world.happen(choose.choice(world.choices()))
    for rank in choose.sample(elders[1:], 3):
        world.kill(rank, choose)
    world.settle(choose)
    assert world.live() == ([] if early else [0, 4, 5])
    assert early or all(len(world.players[rank].applied) == 20 for rank in (0, 4, 5))


def test_with_a_smaller_quorum_both_halves_may_go_on() -> None:
    world = World(CLUSTERS, AGENDA, num_records=20, quorum=0.3)
    for other in (0, 1, 2):
        world.players[5].node.lose(other)
    assert world.players[5].node.stopped is None


@pytest.mark.parametrize("seed", range(20))
def test_without_means_clusters_agree_on_outer_rounds_alone(seed: int) -> None:
    record_schedule = RecordSchedule(period=3, reelect_every=1 + seed % 2, has_means=False, averages=seed % 3 > 0)
    world = World(CLUSTERS, record_schedule, num_records=12, quorum=None)
    world.settle(random.Random(seed))
    assert world.live() == list(range(6))


@pytest.mark.parametrize("victim", range(6))
def test_without_a_quorum_all_stop_where_a_rank_is_lost_that_has_not_left(victim: int) -> None:
    record_schedule = RecordSchedule(period=2, reelect_every=1, has_means=False)
    world = World(CLUSTERS, record_schedule, num_records=8, quorum=None)
    for _ in range(20):
        world.happen(world.choices()[0])
    world.kill(victim)
    world.settle()
    assert world.live() == []
    reasons = [player.stop for rank, player in world.players.items() if rank != victim]
    assert all("is lost, and has taken a part of what its cluster does together with it" in one for one in reasons)
    assert any(one.startswith(f"rank {victim} ") for one in reasons)  # others may find one first that has stopped
    world = World(CLUSTERS, record_schedule, num_records=8, quorum=None)
    world.settle()
    world.perform(victim, world.players[victim].node.depart())
    world.settle()
    world.kill(victim)
    world.settle()
    assert world.live() == [rank for rank in range(6) if rank != victim]


def test_who_left_by_himself_is_not_waited_for_in_another_half() -> None:
    world = World(((0,), (1,)), AGENDA, num_records=8, quorum=0.5)
    world.settle()
    world.perform(0, world.players[0].node.depart())
    world.settle()
    world.kill(0)
    world.settle()
    assert world.live() == [1]


def test_messages_of_old_terms_are_refused() -> None:
    world = World(((0, 1, 2), (3, 4)), RecordSchedule(period=1, reelect_every=1), num_records=12)
    world.keeps_delivered = True
    world.settle()
    before = world.key()
    repeated = [
        (sender, receiver, message)
        for sender, receiver, (message, _) in world.delivered
        if message.term < 4 and not isinstance(message, Supply)
    ]
    assert repeated
    for sender, receiver, message in repeated:
        assert world.players[receiver].node.receive(sender, message) == []
    assert world.key() == before


@pytest.mark.parametrize("seed", range(30))
def test_what_comes_twice_changes_nothing(seed: int) -> None:
    choose = random.Random(seed)
    world = World(CLUSTERS, AGENDA, num_records=14)
    world.keeps_delivered = True

    def repeat() -> None:
        if world.delivered and choose.random() < 0.3:
            sender, receiver, told = choose.choice(world.delivered)
            world.perform(receiver, world.players[receiver].node.receive(sender, *told))

    world.settle(choose, before_each=repeat)
    world.check_finished()


def test_strangers_and_terms_far_away_are_refused() -> None:
    world = World(CLUSTERS, AGENDA, num_records=3)
    node = world.players[0].node
    for sender, message in (
        (99, Join(term=0, index=-1)),
        (1, Join(term=50, index=-1)),
        (3, Join(term=0, index=-1)),
        (3, Supply(term=0, index=0)),
    ):
        before = world.key()
        assert node.receive(sender, message) == []
        assert world.key() == before


def one_died_and_one_knows() -> tuple[World, int, int, int]:
    """Return a world, who died there, who is drawn in its place and has mail of the third, and the third."""
    first, successor, other = draw_order(JOB, 0, (0, 1, 2))
    world = World(((0, 1, 2),), RecordSchedule(period=1, reelect_every=9, has_outer_rounds=False), num_records=1)
    world.kill(first)
    world.notice(other, first)
    while world.mail.get((other, successor)):
        world.happen(("deliver", other, successor))
    return world, first, successor, other


def test_who_is_drawn_by_others_hears_them_once_it_knows_of_the_death_itself() -> None:
    world, first, successor, _ = one_died_and_one_knows()
    node = world.players[successor].node
    assert dict(node.servers) == {}
    world.notice(successor, first)
    assert world.players[successor].applied
    world.settle()
    world.check_finished()


def test_of_who_dies_before_that_nothing_is_heard() -> None:
    world, _, successor, other = one_died_and_one_knows()
    world.kill(other)
    world.notice(successor, other)
    assert world.players[successor].node._unheard == []
    world.settle()
    world.check_finished()


def test_who_loses_a_rank_below_it_is_not_heard_until_one_of_the_two_is_lost_here() -> None:
    """It is the one that is lost, if the other lives: what it has handed out as a server, nobody may take."""
    world = World(CLUSTERS, AGENDA, num_records=3)
    node = world.players[0].node
    for peer, dead in ((5, {4}), (5, {4}), (2, {1})):
        assert node.receive(peer, Farewell(term=0), frozenset(dead)) == []
    assert node.departed == set()
    node.lose(4)
    assert node.departed == {5}
    node.lose(2)
    assert (set(node.view.dead), node.departed) == ({4, 2}, {5})


@pytest.mark.parametrize("seed", range(40))
def test_of_two_ranks_that_lose_each_other_the_lower_goes_on_with_all_others(seed: int) -> None:
    """Also where two ranks lose the same lower one, and so confirm each other."""
    choose = random.Random(seed)
    world = World(((0, 1), (2, 3, 4), (5,)), AGENDA, num_records=20, quorum=0.5)
    for _ in range(choose.randint(0, 60)):
        world.happen(choose.choice(world.choices()))
    lower, *higher = sorted(choose.sample(range(6), choose.choice((2, 3))))
    world.cut(itertools.product([lower], higher))
    world.settle(choose)
    assert world.live() == [rank for rank in range(6) if rank not in higher]
    world.check_finished()


def test_whom_others_have_given_up_stops() -> None:
    world = World(CLUSTERS, AGENDA, num_records=3)
    world.perform(2, world.players[2].node.end(3))
    assert world.players[2].stop is not None
    assert world.players[2].stop.startswith("rank 3 takes this rank for dead")


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: b"[1,2,3]", lambda data: b"\xff", lambda data: b""]
)
def test_what_is_no_message_is_refused(change: Callable[[bytes], bytes]) -> None:
    data, _ = encode(Join(term=1, index=4), {3}, SHAPE)
    assert decode(data, SHAPE)[0] == (Join(term=1, index=4), {3})
    with pytest.raises(ValueError, match="no message"):
        decode(change(data), SHAPE)


def test_messages_survive_the_wire() -> None:
    world = World(CLUSTERS, AGENDA, num_records=9)
    world.keeps_delivered = True
    world.kill(1)
    world.settle()
    assert {type(message) for _, _, (message, _) in world.delivered} > {Join, Contribution, Agreed}
    for _, _, (message, dead) in world.delivered:
        fields = {"payload": None} if hasattr(message, "payload") else {}
        bare = dataclasses.replace(message, **fields)
        assert decode(encode(bare, dead, SHAPE)[0], SHAPE)[0] == (bare, dead)
