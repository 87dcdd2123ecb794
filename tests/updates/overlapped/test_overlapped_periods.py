"""What happens at a period's end, and with workers of different speed."""

import copy
import hashlib
import threading

import pytest
import torch
from overlapped_training import one_step, size_of, start, train_alone, wait_for_silent

from small_regression import make_adam, make_sgd, parameters_of
from syncline.errors import ConfigurationError
from syncline.updates import AllReduce, Overlapped
from thread_fleets import run_fleets


def digest(values: torch.Tensor) -> str:
    return hashlib.blake2b(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_a_period_ends_with_the_exact_weighted_mean_and_the_same_hash() -> None:
    """Every rank steps by itself for 3, 4, ... iterations; ``end_period`` averages by samples."""

    def body(fleet):
        model, optimizer = start(fleet, Overlapped(period=100, max_staleness=None, bucket_bytes=128))
        for step in range(3 + fleet.rank):
            one_step(model, optimizer, fleet.rank, step)
        before = parameters_of(model)
        optimizer.end_period()
        return before, parameters_of(model)

    results = run_fleets(3, body)
    weights = [float(sum(size_of(rank, step) for step in range(3 + rank))) for rank in range(3)]
    mean = sum(before * weight for (before, _), weight in zip(results, weights, strict=True)) / sum(weights)
    assert len({digest(after) for _, after in results}) == 1
    assert torch.allclose(results[0][1], mean, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(("num_ranks", "options"), [(3, {}), (3, {"quorum": 2}), (4, {"servers": "dedicated:1"})])
def test_a_period_that_is_ended_early_counts_the_steps_that_were_made(num_ranks: int, options: dict) -> None:
    """All make 10 steps, then 3 of another period, rank 1 one more: the fleet is where the furthest has come."""

    def body(fleet):
        model, optimizer = start(fleet, Overlapped(period=64, max_staleness=None, bucket_bytes=128, **options))
        if optimizer.is_server:
            return optimizer.serve()
        counts = []
        for num_steps in (10, 3 + (fleet.rank == 1)):
            for step in range(num_steps):
                one_step(model, optimizer, fleet.rank, step)
            optimizer.end_period()
            counts.append(optimizer.iteration)
        one_step(model, optimizer, fleet.rank, 0)
        return [*counts, optimizer.iteration]

    results = run_fleets(num_ranks, body)[:3]
    first, second, third = results[0]
    assert all(result == results[0] for result in results if "quorum" not in options)
    assert all(result[:2] == [first, second] for result in results)
    if "quorum" not in options:
        assert [first, second, third] == [10, 14, 15]
    assert 10 <= first <= 30  # with M < N a worker that is behind leaves numbers out
    assert first + 4 <= second <= first + 10


class Pace:
    """Lets a slow rank make one step for each ``factor`` of the others'; nobody sleeps."""

    def __init__(self, slow: int, factor: int) -> None:
        self._slow, self._factor = slow, factor
        self._changed = threading.Condition()
        self._num_fast = self._num_slow = 0
        self.is_over = False
        self.num_slow_at_end = 0

    def wait(self, rank: int) -> None:
        with self._changed:
            if rank != self._slow:
                self._num_fast += 1
            else:
                self._num_slow += 1
                wanted = self._factor * self._num_slow * 3
                assert self._changed.wait_for(lambda: self.is_over or self._num_fast >= wanted, 60)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.num_slow_at_end = self.num_slow_at_end or self._num_slow
            self.is_over = True
            self._changed.notify_all()


def test_a_slow_worker_does_not_hold_up_the_others() -> None:
    """Rank 3 makes a quarter of the steps; with M = N - 1 nobody waits for it but at a period's end."""
    pace = Pace(slow=3, factor=4)

    def body(fleet):
        model, optimizer = start(fleet, Overlapped(period=200, quorum=3, max_staleness=8), make_adam)
        step = 0
        while optimizer.iteration < 200:
            if fleet.rank == 3 or optimizer.iteration < 199:
                pace.wait(fleet.rank)
            else:
                pace.end()
            one_step(model, optimizer, fleet.rank, step)
            step += 1
        return parameters_of(model), step, optimizer.statistics()

    results = run_fleets(4, body)
    steps = [step for _, step, _ in results]
    assert max(steps) <= 200
    assert 3 * pace.num_slow_at_end <= min(steps[:3])
    assert len({digest(parameters) for parameters, _, _ in results}) == 1
    for _, _, statistics in results:
        assert statistics.num_periods == 1
        assert statistics.max_staleness <= 8
        assert statistics.share_with_global > 0
        assert len(statistics.dropped) == 4
    assert "dropped" in str(results[0][2])


@pytest.mark.parametrize("kind", ["swap", "rebase"])
@pytest.mark.parametrize("num_first", [2, 3])
def test_training_goes_on_at_a_periods_end(num_first: int, kind: str) -> None:
    """Two or three workers for two periods, then two for two more: as one process with those batches."""

    def first(fleet):
        rule = Overlapped(period=3, max_staleness=0, bucket_bytes=256, rule=kind)
        model, optimizer = start(fleet, rule, make_adam)
        for step in range(6):
            one_step(model, optimizer, fleet.rank, step)
        return {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()

    saved_model, saved_optimizer = run_fleets(num_first, first)[0]

    def second(fleet):
        rule = Overlapped(period=3, max_staleness=0, bucket_bytes=128, rule=kind)
        model, optimizer = start(fleet, rule, make_adam)
        model.load_state_dict(saved_model)
        optimizer.load_state_dict(copy.deepcopy(saved_optimizer))
        fleet.barrier()
        for step in range(6, 12):
            one_step(model, optimizer, fleet.rank, step)
        return parameters_of(model)

    results = run_fleets(2, second)
    assert torch.equal(results[0], results[1])
    assert torch.allclose(results[0], alone_with_two_groups(num_first), rtol=1e-11, atol=1e-12)


def alone_with_two_groups(num_first: int) -> torch.Tensor:
    from small_regression import make_model

    model = make_model()
    optimizer = make_adam(model.parameters())
    train_alone(num_first, range(6), lambda _: optimizer, model)
    return train_alone(2, range(6, 12), lambda _: optimizer, model)


def test_closing_ends_the_period_that_is_under_way() -> None:
    models = [None, None]

    def body(fleet):
        model, optimizer = start(fleet, Overlapped(period=50, max_staleness=None), make_adam)
        for step in range(5):
            one_step(model, optimizer, fleet.rank, step)
        models[fleet.rank] = model

    run_fleets(2, body)
    assert torch.equal(parameters_of(models[0]), parameters_of(models[1]))


def test_a_wait_ends_at_its_deadline_and_names_whom_it_waited_for() -> None:
    told = wait_for_silent(2, 1)
    assert "waited 1.5 s for newer global gradients at iteration 3 of period 0" in told
    assert "rank 1 (host memory) did not deliver" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "both"}, 'rule must be "swap" or "rebase"'),
        ({"period": 0}, "period must be a whole number from 1 up"),
        ({"quorum": 0}, "quorum must be a whole number from 1 up"),
        ({"servers": "elsewhere"}, "servers must be"),
    ],
)
def test_a_rule_is_checked_when_it_is_made(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Overlapped(**options)


def test_the_rule_follows_the_optimizer_unless_the_user_says_one() -> None:
    model = torch.nn.Linear(2, 2)
    assert Overlapped().kind(torch.optim.SGD(model.parameters())) == "swap"
    assert Overlapped().kind(make_sgd(model.parameters())) == "rebase"  # it has momentum
    assert Overlapped().kind(make_adam(model.parameters())) == "rebase"
    assert Overlapped(max_staleness=None).kind(make_adam(model.parameters())) == "swap"
    assert Overlapped(max_staleness=9).kind(make_adam(model.parameters())) == "swap"
    assert Overlapped(rule="rebase", max_staleness=None).kind(make_adam(model.parameters())) == "rebase"
    assert Overlapped(rule="swap").kind(make_adam(model.parameters())) == "swap"


def test_terms_must_fit_the_number_of_ranks() -> None:
    with pytest.raises(ConfigurationError, match="quorum 5 is more than the 4 workers"):
        Overlapped(quorum=5).layout(4)
    with pytest.raises(ConfigurationError, match="dedicated"):
        Overlapped(servers="dedicated:4").layout(4)
    assert Overlapped(servers="dedicated:2").layout(5).workers == (0, 1, 2)


def test_with_a_rule_without_periods_there_is_nothing_to_end() -> None:
    """So a script may choose its rule and end periods before it saves, whatever it chose."""

    def body(fleet):
        model, optimizer = start(fleet, AllReduce())
        one_step(model, optimizer, fleet.rank, 0)
        before = parameters_of(model)
        optimizer.end_period()
        assert torch.equal(parameters_of(model), before)

    run_fleets(2, body)
