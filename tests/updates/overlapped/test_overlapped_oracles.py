"""The oracles of the overlapped update on the in-memory fabric, each on a model of 84 elements."""

from functools import partial

import pytest
import torch
from overlapped_recording import record
from overlapped_replay import Replica, replay
from overlapped_training import one_step, size_of, start, train_alone

from small_regression import batch, loss_of, make_adam, make_model, make_sgd, parameters_of
from syncline.pytorch.flatten import flatten, plan_model, trained_parameters
from syncline.updates import Overlapped
from thread_fleets import run_fleets


@pytest.mark.parametrize("kind", ["swap", "rebase"])
@pytest.mark.parametrize("make", [make_sgd, make_adam])
@pytest.mark.parametrize("servers", ["shared", "dedicated:1"])
@pytest.mark.parametrize("seed", [None, 1])
def test_without_staleness_it_equals_synchronous_training(make, servers: str, seed: int | None, kind: str) -> None:
    """Uneven samples, periods that end in between, several buckets, messages in any order: one process on the union."""
    num_workers = 3
    rule = Overlapped(period=4, max_staleness=0, servers=servers, bucket_bytes=256, rule=kind)

    def body(fleet):
        model, optimizer = start(fleet, rule, make)
        if optimizer.is_server:
            return optimizer.serve()
        for step in range(10):
            one_step(model, optimizer, fleet.rank, step)
        assert optimizer.statistics().max_staleness == 0
        assert optimizer.statistics().share_with_global == 1.0
        return parameters_of(model)

    num_ranks = num_workers + (servers != "shared")
    results = run_fleets(num_ranks, body, seed=seed)
    expected = train_alone(num_workers, range(10), make)
    for result in results[:num_workers]:
        assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)


def make_replica(rank: int, bucket_bytes: int, dtype: torch.dtype) -> Replica:
    model = make_model(dtype)
    optimizer = make_adam(model.parameters())
    named = trained_parameters(model, optimizer)
    buckets = flatten(named, plan_model(named, bucket_bytes=bucket_bytes))

    def backward(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, *batch(rank, step, size_of(rank, step), dtype)).backward()
        for bucket in buckets:
            for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True):
                bucket.gradient(slot).copy_(tensor.grad)
                tensor.grad = bucket.gradient(slot)

    with torch.no_grad():
        return Replica(rank=rank, buckets=buckets, optimizer=optimizer, backward=backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make_rule",
    [
        Overlapped,
        partial(Overlapped, rule="swap"),
        partial(Overlapped, rule="swap", quorum=2),
        partial(Overlapped, rule="rebase", quorum=2),
        partial(Overlapped.literal, quorum=2),
    ],
    ids=["default", "swap", "swap of 2", "rebase of 2", "literal of 2"],
)
def test_a_recorded_run_gives_the_same_bits_in_one_process(make_rule, dtype: torch.dtype) -> None:
    """Whatever the threads and the network did."""
    num_iterations = 25
    rule = make_rule(period=7, max_staleness=3, bucket_bytes=128)

    def body(fleet):
        model, optimizer = start(fleet, rule, make_adam, dtype)
        recorder = record(optimizer.training.updater)
        fleet.barrier()  # before anybody's push may be part of a sum
        step = 0
        while optimizer.iteration < num_iterations:
            one_step(model, optimizer, fleet.rank, step, dtype)
            step += 1
        optimizer.end_period()
        return model, recorder

    results = run_fleets(3, body, seed=5)
    recorders = [recorder for _, recorder in results]
    replicas = [make_replica(rank, 128, dtype) for rank in range(3)]
    replay(recorders, replicas, rule)
    final = [torch.cat([bucket.parameters for bucket in replica.buckets]) for replica in replicas]
    for (model, _), mine in zip(results, final, strict=True):
        assert torch.equal(parameters_of(model), mine)
        assert torch.equal(mine, final[0])


def test_the_literal_rule_adds_the_global_gradient_to_the_own_one() -> None:
    """Without staleness each worker steps on the sum of both, so workers differ until the period's average."""

    def body(fleet):
        model, optimizer = start(fleet, Overlapped.literal(period=5, max_staleness=0, bucket_bytes=128))
        for step in range(10):
            one_step(model, optimizer, fleet.rank, step)
        return parameters_of(model)

    models = [make_model() for _ in range(2)]
    optimizers = [make_sgd(model.parameters()) for model in models]
    for step in range(10):
        sizes = [size_of(rank, step) for rank in range(2)]
        own = []
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, *batch(rank, step, sizes[rank])).backward()
            own.append([parameter.grad for parameter in model.parameters()])
        mean = [sum(n * g for n, g in zip(sizes, pair, strict=True)) / sum(sizes) for pair in zip(*own, strict=True)]
        for model, optimizer, gradients in zip(models, optimizers, own, strict=True):
            for parameter, gradient, of_all in zip(model.parameters(), gradients, mean, strict=True):
                parameter.grad = gradient + of_all
            optimizer.step()
        if (step + 1) % 5 == 0:
            samples = [sum(size_of(rank, s) for s in range(step - 4, step + 1)) for rank in range(2)]
            average = sum(n * parameters_of(m) for n, m in zip(samples, models, strict=True)) / sum(samples)
            for model in models:
                torch.nn.utils.vector_to_parameters(average.clone(), model.parameters())
    for found in run_fleets(2, body):
        assert torch.allclose(found, parameters_of(models[0]), rtol=1e-9, atol=1e-9)


def test_rebase_stays_with_synchronous_training() -> None:
    """With Adam and a staleness of up to two iterations, as the threads would have it."""

    def body(fleet):
        rule = Overlapped(period=16, max_staleness=2, rule="rebase")
        model, optimizer = start(fleet, rule, make_adam)
        for step in range(160):
            one_step(model, optimizer, fleet.rank, step)
        return mean_loss(model)

    model = make_model()
    train_alone(3, range(160), make_adam, model)
    expected = mean_loss(model)
    for loss in run_fleets(3, body, seed=3):
        assert loss == pytest.approx(expected, rel=0.2)


def mean_loss(model: torch.nn.Module) -> float:
    """On what all ranks see."""
    with torch.no_grad():
        return sum(loss_of(model, *batch(rank, 10**6, 200)).item() for rank in range(3)) / 3
