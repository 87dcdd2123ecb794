import collections
import json
import logging
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from clustered_training import KilledError, batch, train, train_by_the_book

from small_regression import loss_of, make_adam, make_model, make_sgd, parameters_of
from syncline.errors import ConfigurationError, UpdateError
from syncline.observe import Trace
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.topology import Topology
from syncline.updates import AllReduce, TemporaryServer
from syncline.updates.clustered.means import mixing_weights
from syncline.updates.clustered.rule import Clustered
from thread_fleets import run_fleets

CLUSTERS = ((0, 1, 2), (3, 4))


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "clusters", [((0, 1, 2, 3, 4),), CLUSTERS, ((0,), (1,), (2,), (3,), (4,)), ((0, 4), (1, 3), (2,))]
)
@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_period_1_with_uniform_weights_equals_all_reduce(clusters, make) -> None:
    synchronous = run_fleets(5, lambda fleet: train(fleet, AllReduce(), 6, make))
    clustered = run_fleets(
        5, lambda fleet: train(fleet, Clustered(period=1, reelect_every=2, clusters=clusters), 6, make)
    )
    for rank in range(5):
        for found, expected in zip(clustered[rank][0], synchronous[0][0], strict=True):
            assert_close(found, expected)


RULES = [
    Clustered(period=3, reelect_every=2, clusters=CLUSTERS),
    Clustered(period=3, reelect_every=2, clusters=CLUSTERS, averages=False, forecast=0),
    Clustered(period=2, reelect_every=2, clusters=((0, 1), (2,), (3, 4))),
    Clustered.literal(period=1, reelect_every=3, clusters=CLUSTERS),
    Clustered.literal(period=2, reelect_every=2, clusters=((0, 1), (2,), (3, 4))),
    Clustered.literal(period=3, reelect_every=1, clusters=((0, 4), (1, 3), (2,)), averages=False),
    Clustered(period=3, reelect_every=2, clusters=CLUSTERS, forecast=1.0),
    Clustered(period=2, reelect_every=2, clusters=((0, 1), (2,), (3, 4)), forecast=0.5, averages=False),
]


@pytest.mark.parametrize(
    "rule", RULES, ids=lambda rule: f"{'literal-' * rule.is_literal}{len(rule.clusters)}-{rule.period}-{rule.forecast}"
)
@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_training_is_as_the_formulas_say(rule: Clustered, make) -> None:
    book = train_by_the_book(rule, rule.clusters, 13, make)
    trained = run_fleets(5, lambda fleet: train(fleet, rule, 13, make), seed=3)
    for ranks, expected in zip(rule.clusters, book, strict=True):
        for rank in ranks:
            for found, right in zip(trained[rank][0], expected, strict=True):
                assert_close(found, right, 1e-9)


def test_members_of_a_cluster_are_equal_to_the_bit() -> None:
    trained = run_fleets(5, lambda fleet: train(fleet, RULES[0], 7, make_adam), seed=1)
    for ranks in CLUSTERS:
        for rank in ranks:
            assert all(torch.equal(a, b) for a, b in zip(trained[rank][0], trained[ranks[0]][0], strict=True))


@pytest.mark.parametrize("forecast", [0.0, 0.7, 1.0, "auto"])
def test_with_sgd_clusters_meet_at_the_end_of_each_period(forecast: float | str) -> None:
    rule = Clustered(period=4, reelect_every=100, clusters=CLUSTERS, averages=False, forecast=forecast)
    trained = run_fleets(
        5, lambda fleet: train(fleet, rule, 8, lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    )
    for step in (3, 7):
        assert_close(trained[0][0][step], trained[3][0][step])
    assert not torch.equal(trained[0][0][5], trained[3][0][5])


def test_all_ranks_have_the_same_parameters_after_a_close() -> None:
    rule = Clustered(period=4, reelect_every=3, clusters=CLUSTERS)
    models = {}

    def body(fleet):
        result = train(fleet, rule, 6, make_adam, lambda rank, step, optimizer: models.update({rank: optimizer}))
        return result[0]

    run_fleets(5, body)
    ends = [parameters_of(models[rank].training.model) for rank in range(5)]
    for end in ends[1:]:
        assert_close(end, ends[0], 1e-12)


def test_statistics_tell_clusters_servers_and_bytes() -> None:
    rule = Clustered.literal(period=4, reelect_every=1, clusters=CLUSTERS, averages=False, features=("batch_s",))
    trained = run_fleets(5, lambda fleet: train(fleet, rule, 8))
    first = trained[0][1]
    assert first.clusters == CLUSTERS
    assert first.term == 2
    assert all(server in ranks for server, ranks in zip(first.servers, CLUSTERS, strict=True))
    assert [len(row) for row in first.contributions] == [2, 2]
    assert first.contributions[0][1] > 0
    assert first.samples_of_clusters[0] > first.samples_of_clusters[1] > 0
    assert {statistics.servers for _, statistics in trained} == {first.servers}
    assert [period["available_memory_bytes"] > 0 for period in first.history] == [True, True]
    assert [("batch_s" in period) for period in first.history] == [False, True]
    assert first.features["batch_s"] == first.history[1]["batch_s"]


def test_of_two_sites_the_one_whose_data_is_noise_counts_little() -> None:
    """For each the other is worth a tenth; with data of the same kind they count alike."""

    def body(fleet, *, is_noise: bool):
        model = make_model()
        rule = Clustered.literal(period=2, reelect_every=2, clusters=((0, 1), (2, 3)))
        model, optimizer = distribute(model, make_sgd(model.parameters()), rule, samples="batch", fleet=fleet)
        for step in range(12):
            inputs, targets = batch(0, step)
            if is_noise and fleet.rank > 1:
                targets = 9.0 * torch.randn(targets.shape, generator=torch.Generator().manual_seed(step)).to(targets)
            loss_of(model, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return np.array(optimizer.statistics().contributions)

    apart = run_fleets(4, partial(body, is_noise=True))[0]
    alike = run_fleets(4, partial(body, is_noise=False))[0]
    assert max(mixing_weights(apart, 0, [0, 1])[1], mixing_weights(apart, 1, [0, 1])[0]) < 0.2
    assert mixing_weights(alike, 0, [0, 1])[1] == pytest.approx(1.0)


def test_a_line_of_progress_and_the_fleet_tell_the_same_during_a_run_and_after_it() -> None:
    rule = Clustered(period=2, clusters=CLUSTERS)

    def body(fleet):
        model = make_model()
        _, optimizer = distribute(model, make_sgd(model.parameters()), rule, samples="batch", fleet=fleet)
        for step in range(4):
            loss_of(model, *batch(fleet.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        (during,) = fleet.statistics().updates
        return optimizer, during, optimizer.progress()

    for optimizer, during, progress in run_fleets(5, body):
        after = optimizer.statistics()
        assert progress == str(during)
        assert progress.startswith("term 2  servers ")
        assert "of 2 clusters" in progress
        assert sum(during.weights) == pytest.approx(1.0)
        assert (after.clusters, after.term, after.dead) == (during.clusters, during.term, ())


def test_the_trace_shows_stars_exchanges_averages_and_elections(tmp_path) -> None:
    trace = Trace(rank=0, path=tmp_path / "trace.json")  # of all ranks, which are threads here
    rule = Clustered(period=2, reelect_every=2, clusters=CLUSTERS)
    trained = run_fleets(5, lambda fleet: train(fleet, rule, 8), trace=trace)
    trace.close()
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] != "M"]
    named = collections.Counter(event["name"] for event in events)
    assert [named[f"star of batch {batch}"] for batch in range(8)] == [5] * 8
    assert [named[f"exchange of period {period}"] for period in range(4)] == [5] * 4
    assert [named[f"average of term {term}"] for term in range(2)] == [5] * 2
    assert named["result among 2 servers"] == 4 * 2
    assert named["average among 2 servers"] == 2 * 2
    sent = sum(event["args"]["sent_bytes"] for event in events if event["name"].endswith("among 2 servers"))
    assert 0 < sent <= sum(statistics.sent_bytes_between for _, statistics in trained)
    elections = [event["args"] for event in events if event["name"] == "election"]
    assert {election["term"] for election in elections} == {0, 1, 2}
    of_term = {election["term"]: tuple(election["servers"]) for election in elections}
    assert len({(election["term"], tuple(election["servers"])) for election in elections}) == 3
    assert of_term[2] == trained[0][1].servers


def sent_between(trained) -> int:
    return sum(statistics.sent_bytes_between for _, statistics in trained)


def test_between_clusters_goes_one_gradient_for_each_period_and_cluster() -> None:
    """All-reduce among C servers: each sends 2 (C-1)/C of a vector once a period; the rest is heads of 1 KiB."""
    num_bytes = 40_000 * 8

    def body(fleet):
        model = torch.nn.Linear(200, 200, bias=False).to(torch.float64)
        model, optimizer = distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), rule, samples="batch", fleet=fleet
        )
        for _ in range(12):
            model(torch.ones(2, 200, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return None, optimizer.statistics()

    for clusters in (((0, 1, 2), (3, 4)), ((0, 1), (2, 3), (4,)), ((0,), (1,), (2,), (3,), (4,))):
        rule = Clustered(period=4, reelect_every=100, clusters=clusters, averages=False)
        trained = run_fleets(5, body)
        size = len(clusters)
        expected = 3 * size * 2 * (size - 1) / size * num_bytes
        assert expected <= sent_between(trained) <= expected * 1.05 + 40 * 1024
        inside = sum(statistics.sent_bytes_inside for _, statistics in trained)
        num_members = 5 - size
        assert inside == pytest.approx((12 * 2 + 3) * num_members * num_bytes, rel=0.05)


@pytest.mark.parametrize("victim", range(5))
@pytest.mark.parametrize("death", [2, 3, 4, 5])
def test_a_rank_dies_and_the_others_go_on(victim: int, death: int) -> None:
    rule = Clustered(period=2, reelect_every=2, clusters=CLUSTERS)

    def die(rank: int, step: int, _) -> None:
        if (rank, step) == (victim, death):
            raise KilledError

    trained = run_fleets(5, lambda fleet: train(fleet, rule, 8, make_sgd, die), accept=KilledError, seed=victim)
    assert isinstance(trained[victim], KilledError)
    for ranks in CLUSTERS:
        live = [rank for rank in ranks if rank != victim]
        for rank in live:
            assert len(trained[rank][0]) == 8
            assert all(torch.equal(a, b) for a, b in zip(trained[rank][0], trained[live[0]][0], strict=True))
            assert trained[rank][1].dead == (victim,)


def test_a_whole_cluster_dies_and_the_weights_tell_it() -> None:
    rule = Clustered(period=2, reelect_every=2, clusters=((0, 1), (2, 3), (4,)))

    def die(rank: int, step: int, _) -> None:
        if rank in (2, 3) and step == 3:
            raise KilledError

    trained = run_fleets(5, lambda fleet: train(fleet, rule, 8, make_sgd, die), accept=KilledError)
    for rank in (0, 1, 4):
        statistics = trained[rank][1]
        assert len(trained[rank][0]) == 8
        assert statistics.samples_of_clusters[1] == 0
        assert statistics.samples_of_clusters[0] > 0
        assert statistics.servers[1] is None


@pytest.mark.parametrize("victim", [0, 4])
def test_a_checkpoint_is_saved_after_a_death_and_loads_alone(victim: int, tmp_path: Path) -> None:
    rule = Clustered(period=2, reelect_every=2, clusters=CLUSTERS)

    def body(fleet: Fleet) -> torch.Tensor:
        model = make_model()
        model, optimizer = distribute(model, make_adam(model.parameters()), rule, samples="batch", fleet=fleet)
        for step in range(6):
            if (fleet.rank, step) == (victim, 3):
                raise KilledError
            loss_of(model, *batch(fleet.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.end_period()
        save_checkpoint(tmp_path / "checkpoint", model, optimizer, extra={"step": 6})
        return parameters_of(model)

    trained = run_fleets(5, body, accept=KilledError)
    model = make_model()
    optimizer = make_adam(model.parameters())
    assert load_checkpoint(tmp_path / "checkpoint", model, optimizer) == {"step": 6}
    for rank in range(5):
        if rank != victim:
            assert torch.equal(parameters_of(model), trained[rank])
    assert all(optimizer.state[tensor]["step"] > 0 for tensor in model.parameters())


def test_a_rank_without_enough_others_stops_with_an_error_that_says_so() -> None:
    rule = Clustered(period=2, reelect_every=2, clusters=((0, 1), (2, 3)), within=TemporaryServer(quorum=0.75))

    def die(rank: int, step: int, _) -> None:
        if rank in (2, 3) and step == 3:
            raise KilledError

    with pytest.raises(Exception, match=r"fewer than the quorum of 0\.75"):
        run_fleets(4, lambda fleet: train(fleet, rule, 8, make_sgd, die), accept=KilledError)


def test_a_rank_without_data_takes_part_with_no_weight() -> None:
    rule = Clustered(period=2, reelect_every=2, clusters=CLUSTERS)

    def body(fleet, *, skips: bool):
        model = make_model()
        model, optimizer = distribute(model, make_adam(model.parameters()), rule, samples="batch", fleet=fleet)
        for step in range(4):
            if not skips or fleet.rank != 1:
                if fleet.rank == 1:
                    optimizer.batch_size(0)
                loss_of(model, *batch(fleet.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    skipped = run_fleets(5, lambda fleet: body(fleet, skips=True))
    weightless = run_fleets(5, lambda fleet: body(fleet, skips=False))
    for rank in range(5):
        assert_close(skipped[rank], weightless[rank])


def test_clusters_follow_the_topology_and_rank_0_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def clusters_of(fleet):
        return train(fleet, Clustered(period=2), 1)[1].clusters

    with caplog.at_level(logging.INFO, logger="syncline.updates.clustered"):
        found = run_fleets(Topology.load("two-sites"), clusters_of)
    assert set(found) == {((0, 1, 2, 3), (4, 5, 6, 7))}
    (said,) = [record.getMessage() for record in caplog.records if "clusters of hosts" in record.getMessage()]
    assert "h0, h1, h2, h3; h4, h5, h6, h7 (k = 2 has the highest silhouette (1.000); by site, uplink" in said


def hosts_of(site: str, *numbers: int) -> str:
    """Return hosts of a site that differ in memory alone."""
    return "".join(
        f"  - {{host: {site}{k}, uplink: 1 Gbit/s, features: {{memory_bytes: {8 << k} GiB}}}}\n" for k in numbers
    )


def test_hosts_that_differ_in_memory_alone_stay_with_their_site(caplog: pytest.LogCaptureFixture) -> None:
    sites = "".join(
        f"- switch: {site}\n  uplink: 100 Mbit/s\n  children:\n{hosts_of(site, 0, 1, 2)}" for site in ("a", "b")
    )
    topology = Topology.parse(f"switch: wan\nchildren:\n{sites}")
    rule = partial(Clustered, period=2)
    by_site = run_fleets(topology, lambda fleet: train(fleet, rule(), 1)[1])
    assert {found.clusters for found in by_site} == {((0, 1, 2), (3, 4, 5))}
    assert not any(found.features for found in by_site)  # no machine was looked at
    by_memory = run_fleets(topology, lambda fleet: train(fleet, rule(features=["memory_bytes"], clusters=3), 1)[1])
    assert {found.clusters for found in by_memory} == {((0, 3), (1, 4), (2, 5))}
    assert not caplog.records


def test_one_cluster_that_nobody_asked_for_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rule = partial(Clustered, period=2)
    run_fleets(Topology.flat(3, rate=1e8), lambda fleet: train(fleet, rule(), 1))
    (told,) = [record.getMessage() for record in caplog.records]
    assert "all 3 hosts are one cluster (k = 1, since all hosts are alike; by uplink_bytes_per_s)" in told
    assert "say clusters= or features=, or take Sharded()" in told
    caplog.clear()
    run_fleets(Topology.flat(3, rate=1e8), lambda fleet: train(fleet, rule(clusters=1), 1))
    assert not caplog.records


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"period": 0}, "period must be a whole number from 1 up"),
        ({"clusters": "some"}, "clusters must be"),
        ({"forecast": 1.5}, "forecast must be a number from 0 to 1"),
        ({"forecast": 1.0, "period": 1}, "forecast needs"),
    ],
)
def test_a_wrong_rule_is_refused_when_it_is_made(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Clustered(**arguments)


def test_a_wrong_quorum_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="quorum must be a number from 0 to 1"):
        TemporaryServer(quorum=1.5)


def test_a_forecast_is_refused_where_last_batches_are_exchanged() -> None:
    with pytest.raises(ConfigurationError, match=r"forecast must be left out, not 0\.5"):
        Clustered.literal(forecast=0.5)


def test_clusters_must_name_each_rank_once() -> None:
    with pytest.raises(ConfigurationError, match="each of the ranks 0 to 1 once"):
        run_fleets(2, lambda fleet: train(fleet, Clustered(clusters=((0,), (0, 1))), 1))


def test_every_rank_says_what_is_wrong_with_a_choice_of_features() -> None:
    rule = Clustered(features=["moon"])
    found = run_fleets(3, lambda fleet: train(fleet, rule, 1), accept=ConfigurationError)
    assert ["no host has the feature 'moon'" in str(error) for error in found] == [True] * 3


def test_lbfgs_is_refused() -> None:
    with pytest.raises(UpdateError, match="LBFGS"):
        Clustered().check(torch.optim.LBFGS(make_model().parameters()))
