"""Clusters that are made anew while a training runs."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from clustered_training import KilledError, batch, train

from small_regression import loss_of, make_adam, make_model, make_sgd, parameters_of
from syncline.errors import ConfigurationError
from syncline.machines.clustering import Inventory
from syncline.pytorch.distribute import distribute
from syncline.topology import Topology
from syncline.updates.clustered.grouping import Start, regroup
from syncline.updates.clustered.rule import Clustered
from thread_fleets import run_fleets

HOSTS = Topology.flat(4, rate=1e8)
ALL = range(4)
FAST_AND_SLOW = {rank: (("batch_s", 0.1 if rank % 2 else 0.5),) for rank in range(4)}


def regrouped(clusters, measurements, topology=HOSTS, living=ALL, num_clusters=None):
    inventory = Inventory(topology=topology, use=("batch_s",))
    return regroup(inventory, clusters, measurements, living=living, num_clusters=num_clusters)


def test_what_machines_measured_divides_them_anew() -> None:
    found = regrouped(((0, 1), (2, 3)), FAST_AND_SLOW)
    assert found == ((0, 2), (1, 3))


def test_clusters_that_are_as_good_stay() -> None:
    assert regrouped(((0, 2), (1, 3)), FAST_AND_SLOW) == ()
    alike = dict.fromkeys(range(4), (("batch_s", 0.1),))
    assert regrouped(((0, 1), (2, 3)), alike) == ()
    assert regrouped(((0, 1), (2, 3)), {}) == ()


def test_a_cluster_of_ranks_from_several_begins_without_state() -> None:
    """Of newcomers, the last ranks, nobody asks which they were of."""
    start = Start(inventory=Inventory(topology=Topology.flat(6)), clusters=((0, 1, 4), (2, 3), (5,)))
    assert [start.after([0, 0, 1, 2], rank).keeps_state for rank in range(6)] == [True, True, False, False, True, True]


def test_a_cluster_that_lost_a_host_keeps_its_number() -> None:
    measurements = {rank: (("batch_s", 0.5 if rank == 3 else 0.1),) for rank in range(4)}
    assert regrouped(((2, 3), (0, 1)), measurements) == ((3,), (0, 1, 2))


def test_machines_that_cannot_be_divided_so_stay_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    assert regrouped(((0, 1), (2, 3)), FAST_AND_SLOW, num_clusters=5) == ()
    assert "clusters stay as they are: 4 hosts cannot form 5 clusters" in caplog.text


def test_dead_hosts_are_not_compared() -> None:
    """Rank 4 was the only other kind of machine; without it the others are alike, and stay together."""
    five = Topology.flat(5, rate=1e8)
    measurements = {rank: (("batch_s", 9.0 if rank == 4 else 0.1),) for rank in range(5)}
    together = ((0, 1, 2, 3, 4),)
    assert regrouped(together, measurements, five, living=range(5)) == ((0, 1, 2, 3), (4,))
    assert regrouped(together, measurements, five, living=range(4)) == ()


@pytest.mark.parametrize(("dead", "expected"), [(1, ((0, 2), (1, 3, 4))), (4, ((0, 2), (1, 3, 4)))])
def test_the_dead_stay_in_some_cluster_and_their_latencies_do_not_count(dead: int, expected) -> None:
    """Both dead ranks were in cluster 1; a host far away that is dead divides nobody."""
    places = ", ".join(
        f"{{host: h{host}, uplink: {{rate: 1 Gbit/s, latency: {200 if host == dead else 2} ms}}}}" for host in range(5)
    )
    topology = Topology.parse(f"switch: core\nchildren: [{places}]")
    inventory = Inventory(topology=topology, use=("batch_s", "latency_s"))
    measurements = {rank: (("batch_s", 0.1 if rank % 2 or rank == 4 else 0.5),) for rank in range(5)}
    living = [rank for rank in range(5) if rank != dead]
    measurements[dead] = (("batch_s", 50.0),)
    assert regroup(inventory, ((0, 3), (1, 2, 4)), measurements, living=living, num_clusters=None) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recluster_every": -1}, "recluster_every must be a whole number from 0 up"),
        ({"recluster_every": 1, "clusters": ((0,), (1,))}, "not written down"),
        ({"recluster_every": 1, "averages": False}, "averages=True"),
        ({"recluster_every": 1, "period": 1}, "averages=True"),
        ({"recluster_every": 1, "features": ("site",)}, "what machines measure while they train"),
    ],
)
def test_what_cannot_be_made_anew_is_refused(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Clustered(**arguments)


DIVISIONS = (((0, 1, 2, 3, 4),), ((0, 2), (1, 3, 4)), ((0, 4), (1,), (2, 3)), ((0, 4), (1, 2, 3)))
"""After each term, in turn."""


@pytest.fixture
def _in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Propose one division after the other, whatever was measured."""

    def propose(inventory, clusters, measurements, **settings):
        number = DIVISIONS.index(clusters) + 1 if clusters in DIVISIONS else 1
        return DIVISIONS[number % len(DIVISIONS)]

    monkeypatch.setattr("syncline.updates.clustered.rule.regroup", propose)


RULE = Clustered(period=2, reelect_every=1, clusters=1, recluster_every=1, features=("batch_s",), forecast=0)
NUM_STEPS = 11


@pytest.mark.usefixtures("_in_turn")
@pytest.mark.parametrize("make", [make_sgd, make_adam])
@pytest.mark.parametrize("kind", [Clustered, Clustered.literal], ids=["all", "literal"])
def test_members_of_new_clusters_are_equal_to_the_bit_and_as_the_formulas_say(make, kind) -> None:
    rule = kind(**vars_of(RULE))
    trained = run_fleets(5, lambda fleet: train(fleet, rule, NUM_STEPS, make), seed=2)
    for step in range(NUM_STEPS):
        # What is seen after the last step of a term is the average.
        for ranks in DIVISIONS[step // 2 % 4] if (step + 1) % 2 else (tuple(range(5)),):
            for rank in ranks:
                assert torch.equal(trained[rank][0][step], trained[ranks[0]][0][step]), (step, rank)
    assert trained[0][1].clusters == DIVISIONS[1]
    assert len({statistics.servers for _, statistics in trained}) == 1
    if kind is Clustered:
        for found, expected in zip(trained[0][0], by_the_book(make), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def vars_of(rule: Clustered) -> dict:
    return {field.name: getattr(rule, field.name) for field in fields(rule) if field.init}


def by_the_book(make) -> list[torch.Tensor]:
    """Return rank 0's parameters: five models whose gradients and parameters are averaged in turn.

    The optimizers of a cluster that was not there before begin anew.
    """
    models = [make_model() for _ in range(5)]
    optimizers = [make(model.parameters()) for model in models]
    trajectory, first_means = [], {}
    for step in range(NUM_STEPS):
        division = DIVISIONS[step // 2 % 4]
        sizes = np.array([len(batch(rank, step)[0]) for rank in range(5)])
        means = {}
        for ranks in division:
            if step % 2 == 0 and step and ranks not in DIVISIONS[(step // 2 - 1) % 4]:
                for rank in ranks:
                    optimizers[rank].state.clear()
            means[ranks] = sum(gradient_of(models[rank], rank, step) * int(sizes[rank]) for rank in ranks)
            means[ranks] = means[ranks] / int(sizes[list(ranks)].sum())
        if step % 2 == 1:
            amounts = {
                ranks: sum(len(batch(rank, s)[0]) for rank in ranks for s in (step - 1, step)) for ranks in division
            }
            brought = {ranks: first_means[ranks] + means[ranks] for ranks in division}
            total = sum(brought[ranks] * amounts[ranks] for ranks in division) / sum(amounts.values())
            step_on = {ranks: means[ranks] + total - brought[ranks] for ranks in division}
        else:
            first_means, step_on = means, means
        for ranks in division:
            for rank in ranks:
                give(models[rank], step_on[ranks])
                optimizers[rank].step()
        if step % 2 == 1:
            mean = sum(parameters_of(models[ranks[0]]) * amounts[ranks] for ranks in division) / sum(amounts.values())
            for model in models:
                torch.nn.utils.vector_to_parameters(mean.clone(), model.parameters())
        trajectory.append(parameters_of(models[0]))
    return trajectory


def gradient_of(model, rank: int, step: int) -> torch.Tensor:
    model.zero_grad()
    loss_of(model, *batch(rank, step)).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def give(model, gradient: torch.Tensor) -> None:
    for parameter, piece in zip(
        model.parameters(), gradient.split([p.numel() for p in model.parameters()]), strict=True
    ):
        parameter.grad = piece.view_as(parameter).clone()


@pytest.mark.usefixtures("_in_turn")
def test_members_of_new_clusters_forecast_alike() -> None:
    rule = Clustered(**{**vars_of(RULE), "reelect_every": 2, "forecast": 1.0})
    trained = run_fleets(5, lambda fleet: train(fleet, rule, 15, make_sgd), seed=2)
    for step in range(15):
        for ranks in DIVISIONS[step // 4 % 4] if (step + 1) % 4 else (tuple(range(5)),):
            for rank in ranks:
                assert torch.equal(trained[rank][0][step], trained[ranks[0]][0][step]), (step, rank)


@pytest.mark.usefixtures("_in_turn")
@pytest.mark.parametrize("victim", range(5))
@pytest.mark.parametrize("death", [1, 2, 3, 4])
def test_a_rank_dies_while_clusters_change(victim: int, death: int) -> None:
    def die(rank: int, step: int, _) -> None:
        if (rank, step) == (victim, death):
            raise KilledError

    trained = run_fleets(5, lambda fleet: train(fleet, RULE, 9, make_adam, die), accept=KilledError, seed=victim)
    survivors = [rank for rank in range(5) if rank != victim]
    assert len({trained[rank][1].clusters for rank in survivors}) == 1
    for ranks in trained[survivors[0]][1].clusters:
        live = [rank for rank in ranks if rank != victim]
        for rank in live:
            assert len(trained[rank][0]) == 9
            assert torch.equal(trained[rank][0][-1], trained[live[0]][0][-1])
            assert trained[rank][1].dead == (victim,)


@pytest.mark.usefixtures("_in_turn")
def test_ranks_without_data_become_equal_with_the_first_batch_that_has_some() -> None:
    def body(fleet):
        model = make_model()
        model, optimizer = distribute(model, make_adam(model.parameters()), RULE, samples="batch", fleet=fleet)
        for step in range(9):
            if step not in (4, 5, 6):
                loss_of(model, *batch(fleet.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model), optimizer.statistics().clusters

    trained = run_fleets(5, body)
    for ranks in trained[0][1]:
        assert all(torch.equal(trained[rank][0], trained[ranks[0]][0]) for rank in ranks)


def test_machines_that_go_on_as_they_are_stay_together() -> None:
    rule = Clustered(period=2, recluster_every=1, clusters=2, features=("batch_s",))
    trained = run_fleets(4, lambda fleet: train(fleet, rule, 8))
    assert len({statistics.clusters for _, statistics in trained}) == 1
    assert all(statistics.features["batch_s"] > 0 for _, statistics in trained)
