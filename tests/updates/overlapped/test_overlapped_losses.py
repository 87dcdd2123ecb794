"""Workers, and the server shards on them, that die: the rest go on, or say who is missing."""

import pytest
import torch
from overlapped_training import one_step, start

from small_regression import make_adam, make_model, parameters_of
from syncline.fabric.slice_executor import CALL_TAGS, SLICE_TAGS
from syncline.members import QuorumLostError
from syncline.pytorch.checkpoint import load_checkpoint
from syncline.updates import Overlapped
from syncline.updates.overlapped.link import DOWN
from thread_fleets import run_fleets


class DeathError(Exception):
    """This rank dies here."""


def train(fleet, rule, *, deaths: dict[int, int], num_iterations: int = 40, make=make_adam, **options):
    """Train until the fleet has done ``num_iterations``; rank r dies in its own step ``deaths[r]``."""
    model, optimizer = start(fleet, rule, make, **options)
    step = 0
    while optimizer.iteration < num_iterations:
        if deaths.get(fleet.rank) == step:
            raise DeathError
        one_step(model, optimizer, fleet.rank, step)
        step += 1
    optimizer.end_period()
    return parameters_of(model), optimizer.statistics()


@pytest.mark.parametrize("kind", ["swap", "rebase"])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("deaths", [{1: 9}, {0: 9, 3: 17}, {2: 8, 1: 8}])
def test_the_rest_go_on_after_losses(deaths: dict[int, int], seed: int | None, kind: str) -> None:
    """Each rank hosts shards, so their successors take over; step 8 is the first of the second period."""
    rule = Overlapped(period=8, quorum=2, max_staleness=4, bucket_bytes=128, rule=kind)
    results = run_fleets(4, lambda fleet: train(fleet, rule, deaths=deaths), accept=DeathError, seed=seed)
    survivors = [result for rank, result in enumerate(results) if rank not in deaths]
    for parameters, statistics in survivors:
        assert torch.equal(parameters, survivors[0][0])
        assert set(statistics.lost) <= set(range(4))
        assert set(deaths) <= set(statistics.lost)
        assert statistics.num_periods == 5


def test_fewer_than_the_quorum_is_told_on_every_rank_by_name() -> None:
    rule = Overlapped(period=8, quorum=3, bucket_bytes=128)
    results = run_fleets(
        4, lambda fleet: train(fleet, rule, deaths={1: 9, 2: 11}), accept=(DeathError, QuorumLostError)
    )
    for rank in (0, 3):
        error = results[rank]
        assert isinstance(error, QuorumLostError)
        assert error.missing == (1, 2)
        assert "needs 3 of 4 workers, but 2 are left: rank 1 (host memory) and rank 2 (host memory)" in str(error)


def test_the_lowest_living_worker_saves_what_it_has(tmp_path) -> None:
    """Its checkpoint loads in one process alone, and all who are left say where it is."""
    rule, path = Overlapped(period=8, quorum=4), tmp_path / "saved"
    results = run_fleets(
        4,
        lambda fleet: train(fleet, rule, deaths={0: 11}, save_on_failure=path),
        accept=(DeathError, QuorumLostError),
    )
    assert [type(result) for result in results] == [DeathError, *[QuorumLostError] * 3]
    said = "rank 1 has written a checkpoint of what it had, after step "
    assert all(said in str(result.__notes__) for result in results[1:])
    model = make_model()
    optimizer = make_adam(model.parameters())
    extra = load_checkpoint(path, model, optimizer)
    assert 8 <= extra["iteration"] < 40
    assert not torch.equal(parameters_of(model), parameters_of(make_model()))
    assert optimizer.state


def test_who_leaves_first_leaves_the_last_average_to_the_others() -> None:
    """To rank 2 the average of one server comes after ranks 0 and 1, which have theirs, are seen to leave."""
    rule = Overlapped(period=4, quorum=3, servers="dedicated:2", bucket_bytes=128)

    def body(fleet):
        model, optimizer = start(fleet, rule, make_adam)
        if optimizer.is_server:
            return optimizer.serve()
        if fleet.rank == 2:
            hold_last_average(optimizer.training.updater.client, servers={3}, until_lost={0, 1}, num_periods=2)
        for step in range(8):
            one_step(model, optimizer, fleet.rank, step)
        if fleet.rank == 2:
            with pytest.raises(QuorumLostError, match="needs 3 of 3 workers, but 1 are left"):
                one_step(model, optimizer, fleet.rank, 8)
        return parameters_of(model)

    results = run_fleets(5, body, accept=QuorumLostError)
    assert torch.equal(results[2], results[0])


def test_the_last_average_of_a_server_that_has_left_counts() -> None:
    """Its last bytes and its end came in one reading: rank 0 has the average, and hears first that who sent it left."""
    rule = Overlapped(period=4, quorum=2, bucket_bytes=128)

    def body(fleet):
        model, optimizer = start(fleet, rule, make_adam)
        if fleet.rank == 0:
            hold_last_average(optimizer.training.updater.client, servers={1, 2}, until_lost={1, 2}, num_periods=2)
        step = 0
        while optimizer.iteration < 8:
            one_step(model, optimizer, fleet.rank, step)
            step += 1
        return parameters_of(model), optimizer.iteration

    results = run_fleets(3, body)
    for parameters, iteration in results:
        assert torch.equal(parameters, results[0][0])
        assert iteration == 8


def hold_last_average(client, *, servers: set[int], until_lost: set[int], num_periods: int) -> None:
    """Deliver what ``servers`` send at the end of the last period when those ranks are lost."""
    port, held = client._port, []
    receive = port.receive

    def is_last() -> bool:
        return client.counts.num_periods == num_periods - 1 and client.links[0]._has_ended

    def receive_late(peer, tag, destination, *, on_received, **settings) -> None:
        def received() -> None:
            is_reply = tag % CALL_TAGS // SLICE_TAGS == DOWN
            if is_reply and peer in servers and is_last() and not until_lost <= set(client.lost):
                held.append(on_received)
            else:
                on_received()

        receive(peer, tag, destination, on_received=received, **settings)

    def release(peer: int, error: Exception) -> None:
        if until_lost <= set(client.lost):
            while held:
                held.pop(0)()

    port.receive = receive_late
    port._relay.handlers.append(release)


def test_a_dedicated_server_is_replaced() -> None:
    """The last two ranks serve; one of them dies in the middle, all workers live."""
    rule = Overlapped(period=8, servers="dedicated:2", max_staleness=4, bucket_bytes=128)

    def body(fleet):
        model, optimizer = start(fleet, rule, make_adam)
        if optimizer.is_server:
            return optimizer.serve()
        for step in range(24):
            one_step(model, optimizer, fleet.rank, step)
            if fleet.rank == 0 and step == 12:
                victim.communicator.abort()
        return parameters_of(model), optimizer.statistics()

    def remember(fleet):
        nonlocal victim
        if fleet.rank == 4:
            victim = fleet
        return body(fleet)

    victim = None
    results = run_fleets(5, remember, accept=BaseException)
    for parameters, statistics in results[:3]:
        assert torch.equal(parameters, results[0][0])
        assert 4 in statistics.lost
        assert statistics.num_periods == 3


def test_the_last_dedicated_server_is_missed(tmp_path) -> None:
    """It is a loss: a worker saves what it has."""
    rule = Overlapped(period=8, servers="dedicated:1", max_staleness=4)
    victims = []

    def body(fleet):
        if fleet.rank == 2:
            victims.append(fleet)
        model, optimizer = start(fleet, rule, make_adam, save_on_failure=tmp_path / "saved")
        if optimizer.is_server:
            optimizer.serve()
            return
        for step in range(24):
            one_step(model, optimizer, fleet.rank, step)
            if fleet.rank == 0 and step == 12:
                victims[0].communicator.abort()

    results = run_fleets(3, body, accept=BaseException)
    assert all("All servers are lost to this rank: rank 2;" in str(error) for error in results[:2])
    assert all("rank 0 has written a checkpoint" in str(error.__notes__) for error in results[:2])
    assert load_checkpoint(tmp_path / "saved", make_model())["iteration"] > 8
