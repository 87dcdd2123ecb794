"""Clusters whose means are made by collectives: the same training as with a temporary server, with state in parts."""

import collections
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from clustered_training import batch, train, train_by_the_book

from rank_scripts import run_python
from small_regression import batch as batch_of, loss_of, make_adam, make_model, make_sgd, parameters_of
from syncline.errors import ConfigurationError, UpdateError
from syncline.observe import Trace
from syncline.pytorch.distribute import distribute
from syncline.updates import AllReduce, Clustered, Sharded
from thread_fleets import run_fleets

CLUSTERS = ((0, 1, 2), (3, 4))
WITHIN = {"all-reduce": AllReduce(bucket_bytes=160), "sharded": Sharded(bucket_bytes=160)}
"""Of the small regression they make five buckets."""
PAIRS = ((0, 1), (2, 3), (4,))

RULES = {
    "averages": partial(Clustered, period=3, reelect_every=2, clusters=CLUSTERS),
    "no averages": partial(Clustered, period=3, reelect_every=2, clusters=CLUSTERS, averages=False),
    "every batch": partial(Clustered, period=1, reelect_every=2, clusters=((0, 4), (1, 3), (2,))),
    "forecast": partial(Clustered, period=3, clusters=CLUSTERS, forecast=1.0),
    "part of a forecast": partial(Clustered, period=2, reelect_every=2, clusters=PAIRS, forecast=0.5, averages=False),
    "one cluster": partial(Clustered, period=3, clusters=((0, 1, 2, 3, 4),)),
    "literal": partial(Clustered.literal, period=2, reelect_every=2, clusters=PAIRS),
}


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_training_is_as_the_formulas_say(within: str, rule: str, make) -> None:
    chosen = RULES[rule](within=WITHIN[within])
    book = train_by_the_book(chosen, chosen.clusters, 13, make)
    trained = run_fleets(5, lambda fleet: train(fleet, chosen, 13, make))
    for ranks, expected in zip(chosen.clusters, book, strict=True):
        for rank in ranks:
            assert all(torch.equal(a, b) for a, b in zip(trained[rank][0], trained[ranks[0]][0], strict=True))
            for found, right in zip(trained[rank][0], expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


def train_alike(fleet, rule, make, *, ends=()):
    """Train on batches of one size, end some periods, and return the parameters after each step, and bytes of state."""
    model = make_model()
    model, optimizer = distribute(model, make(model.parameters()), rule, samples="batch", fleet=fleet)
    values = []
    for step in range(11):
        loss_of(model, *batch_of(fleet.rank, step, 4)).backward()
        optimizer.step()
        if step not in ends or ends[step]:
            optimizer.zero_grad()
        if step in ends:
            optimizer.end_period()
            optimizer.zero_grad()
        values.append(parameters_of(model))
    return values, optimizer.num_state_bytes


@pytest.mark.parametrize("clusters", [((0, 1), (2, 3)), ((0, 1), (2,)), ((0, 3), (2,), (1,)), ((0, 1),), CLUSTERS])
@pytest.mark.parametrize("options", [{}, {"forecast": 0.5}, {"averages": False}], ids=str)
@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_parameters_are_those_of_a_temporary_server(clusters, options, make) -> None:
    """To the bit with SGD, where a mean has no other order than that of two; with three, as sums round.

    Also where periods end early, once with gradients and once without any.
    """
    rule = partial(Clustered, period=4, reelect_every=2, clusters=clusters, **options)
    number, ends = sum(map(len, clusters)), {5: True, 8: False}
    served = run_fleets(number, lambda fleet: train_alike(fleet, rule(), make, ends=ends))
    for within in WITHIN.values():
        trained = run_fleets(number, lambda fleet, each=within: train_alike(fleet, rule(within=each), make, ends=ends))
        for (expected, _), (values, _) in zip(served, trained, strict=True):
            for one, other in zip(expected, values, strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-12)
                assert make is make_adam or clusters is CLUSTERS or torch.equal(one, other)
    assert torch.equal(trained[0][0][5], trained[-1][0][5]) or "averages" in options


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_ranks_of_a_cluster_divide_the_state(make) -> None:
    """All that a cluster's ranks keep is what one of them kept before, but for Adam's number of steps of each part."""
    rule = partial(Clustered, period=4, clusters=CLUSTERS)
    whole, divided = (
        [
            num_bytes
            for _, num_bytes in run_fleets(5, lambda fleet, each=each: train_alike(fleet, rule(within=each), make))
        ]
        for each in WITHIN.values()
    )
    most = 8 * 40 if make is make_adam else 0
    for ranks in CLUSTERS:
        assert sum(divided[rank] for rank in ranks) == pytest.approx(whole[0], abs=most)
        assert max(divided[rank] for rank in ranks) < 1.5 * whole[0] / len(ranks)
    assert len(set(whole)) == 1


@pytest.mark.parametrize("within", WITHIN)
def test_servers_of_outer_rounds_are_drawn_anew_in_each_term(within: str, tmp_path) -> None:
    """Whoever serves has what its cluster brings, of which it keeps a part itself; nobody sends a mean in a batch."""
    trace = Trace(rank=0, path=tmp_path / "trace.json")
    rule = Clustered(period=2, reelect_every=1, clusters=CLUSTERS, within=WITHIN[within])
    trained = run_fleets(5, lambda fleet: train(fleet, rule, 12), trace=trace)
    trace.close()
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] != "M"]
    named = collections.Counter(event["name"] for event in events)
    assert [named[f"exchange of period {period}"] for period in range(6)] == [5] * 6
    assert not any(name.startswith("star") for name in named)
    servers = {tuple(event["args"]["servers"]) for event in events if event["name"] == "election"}
    assert len({server for server, _ in servers}) > 1
    assert len({server for _, server in servers}) > 1
    first, last = (trained[rank][1] for rank in (0, 4))
    assert first.weights == last.weights
    assert first.term == last.term == 6


@pytest.mark.filterwarnings("ignore:Step . changed nothing")
@pytest.mark.parametrize("within", WITHIN)
def test_ranks_and_clusters_without_data_take_part_with_no_weight(within: str) -> None:
    """A rank skips its pass in each batch, a cluster in some, and once all of them do."""

    def body(fleet, rule):
        model = make_model()
        model, optimizer = distribute(model, make_adam(model.parameters()), rule, samples="batch", fleet=fleet)
        for step in range(9):
            if fleet.rank != 1 and step != 4 and (fleet.rank < 3 or step % 3 != 2):
                loss_of(model, *batch(fleet.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.end_period()
        return parameters_of(model)

    rule = partial(Clustered, period=3, clusters=CLUSTERS, forecast=1.0)
    served, trained = (
        run_fleets(5, lambda fleet, each=each: body(fleet, each)) for each in (rule(), rule(within=WITHIN[within]))
    )
    for expected, found in zip(served, trained, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        assert torch.equal(found, trained[0])


def test_a_rank_that_is_alone_in_its_cluster_steps_the_optimizer_of_the_user() -> None:
    def body(fleet):
        model = make_model()
        rule = Clustered(period=2, clusters=((0,), (1,)), within=WITHIN["sharded"])
        _, optimizer = distribute(model, make_sgd(model.parameters()), rule, fleet=fleet)
        loss_of(model, *batch(fleet.rank, 0)).backward()
        assert next(model.parameters()).grad.sum() != 0
        optimizer.step()
        return len(optimizer.inner.state)

    assert run_fleets(2, body) == [4, 4]


def test_clusters_are_not_made_anew_and_nobody_comes_in() -> None:
    with pytest.raises(
        ConfigurationError, match=r"recluster_every moves ranks.* within=AllReduce\(\).* leave out within"
    ):
        Clustered(recluster_every=1, within=AllReduce())

    def body(fleet):
        model = make_model()
        with pytest.raises(
            UpdateError, match=r"elastic=True does not go with Clustered\(\), .* leave out within, or elastic="
        ):
            distribute(model, make_sgd(model.parameters()), Clustered(within=AllReduce()), fleet=fleet, elastic=True)

    run_fleets(1, body)


JOB = """
import hashlib
import sys
import torch
import syncline

torch.set_num_threads(1)
with syncline.init(topology=sys.argv[1]) as fleet:
    for within in ({}, {"within": syncline.Sharded()}):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 32)
        rule = syncline.Clustered(period=4, **within)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = syncline.distribute(model, optimizer, update=rule)
        for step in range(10):
            generator = torch.Generator().manual_seed(10 * step + fleet.rank)
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.end_period()
        values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        digest = hashlib.sha256(values).hexdigest()
        print(f"{optimizer.statistics().clusters} {digest} {optimizer.num_state_bytes}", flush=True)
"""
SITES = """
switch: wide-area
children:
  - {switch: a, uplink: 20 Mbit/s, children: [{host: a0, uplink: 1 Gbit/s}, {host: a1, uplink: 1 Gbit/s}]}
  - {switch: b, uplink: 20 Mbit/s, children: [{host: b0, uplink: 1 Gbit/s}, {host: b1, uplink: 1 Gbit/s}]}
"""


def test_a_job_of_two_sites_ends_with_the_same_parameters_and_half_the_state_on_each_rank(tmp_path: Path) -> None:
    (tmp_path / "net.yaml").write_text(SITES)
    (tmp_path / "job.py").write_text(JOB)
    done = run_python("-m", "syncline", "run", "--ranks", "4", tmp_path / "job.py", tmp_path / "net.yaml")
    assert done.returncode == 0, done.stdout
    lines = [line.partition("] ")[2].rsplit(" ", 2) for line in done.stdout.splitlines() if "((" in line]
    assert {clusters for clusters, _, _ in lines} == {"((0, 1), (2, 3))"}
    assert len({digest for _, digest, _ in lines}) == 1
    num_bytes = 4 * (64 * 32 + 32)
    assert sorted(int(kept) for _, _, kept in lines) == [num_bytes // 2] * 4 + [num_bytes] * 4
