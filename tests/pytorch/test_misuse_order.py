"""Calls at the wrong time: before init(), after close(), twice, out of a step's order, and on one rank alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline
from misuse_calls import DATASET, plain
from syncline.errors import SynclineError, SynclineWarning
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Clustered, Overlapped, Sharded, UpdateRule
from thread_fleets import run_fleets

BATCH = torch.ones(2, 4)
NO_FLEET = r"There is no fleet; call syncline\.init\(\) first"
NOT_GIVEN = r"This Linear was not given to distribute\(\), or its fleet was closed"
BEFORE: dict[str, tuple[Callable[[], object], str]] = {
    "current_fleet": (syncline.current_fleet, NO_FLEET),
    "distribute": (lambda: syncline.distribute(*plain()), NO_FLEET),
    "sampler": (lambda: syncline.data.sampler(DATASET), NO_FLEET),
    "ElasticSampler": (lambda: syncline.data.ElasticSampler(DATASET, 2), NO_FLEET),
    "phase": (lambda: syncline.phase([nn.Linear(1, 1)], torch.optim.Adam, loss=nn.MSELoss()), NO_FLEET),
    "commit": (syncline.commit, r"a default group that syncline\.reconfigure\(\) has made"),
    "batch_size": (lambda: syncline.batch_size(3), r"batch_size\(3\) counts for a model in training; call distribute"),
    "no_sync": (lambda: syncline.no_sync(nn.Linear(1, 1)).__enter__(), NOT_GIVEN),
    "join": (lambda: syncline.join(nn.Linear(1, 1)).__enter__(), NOT_GIVEN),
    "clip_grad_norm_": (lambda: syncline.clip_grad_norm_(nn.Linear(1, 1), 1.0), NOT_GIVEN),
    "synchronize": (lambda: syncline.synchronize(nn.Linear(1, 1)), NOT_GIVEN),
}
CLOSED = r"stopped, as its fleet or process group was closed; call syncline\.init\(\) or init_process_group\(\) again"
CLOSED_FLEET: dict[str, Callable[[Fleet], object]] = {
    "all_reduce": lambda fleet: fleet.all_reduce(torch.ones(1)),
    "async": lambda fleet: fleet.all_reduce(torch.ones(1), async_op=True),
    "gather": lambda fleet: fleet.gather(torch.ones(1)),
    "broadcast_object": lambda fleet: fleet.broadcast_object(1),
    "barrier": Fleet.barrier,
    "distribute": lambda fleet: syncline.distribute(*plain(), fleet=fleet),
}
UNHEARD = r"on_close\(<.*>\) came after the fleet was closed, .*; register it before close\(\), or call it here"
RULES: dict[str, UpdateRule] = {
    "all_reduce": AllReduce(),
    "sharded": Sharded(),
    "overlapped": Overlapped(),
    "clustered": Clustered(),
}
CLOSED_MODEL = r"The fleet of this model was closed; call syncline\.init\(\) and distribute\(\) again"


class Trained:
    """A model in training on a fleet of one rank."""

    def __init__(self, fleet: Fleet, rule: UpdateRule) -> None:
        self.fleet = fleet
        self.plain = plain()
        self.model, self.optimizer = syncline.distribute(*self.plain, rule, fleet=fleet)

    def backward(self) -> None:
        self.model(BATCH).sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def alone(rule: UpdateRule, act: Callable[[Trained], object]) -> None:
    run_fleets(1, lambda fleet: act(Trained(fleet, rule)), accept=SynclineError)


@pytest.mark.parametrize("name", BEFORE)
def test_before_there_is_a_fleet(name: str) -> None:
    call, text = BEFORE[name]
    with pytest.raises(SynclineError, match=text):
        call()


@pytest.mark.parametrize("name", CLOSED_FLEET)
def test_a_closed_fleet_says_so(name: str) -> None:
    def body(fleet: Fleet) -> None:
        fleet.close()
        with pytest.raises(SynclineError, match=CLOSED):
            CLOSED_FLEET[name](fleet)
        with pytest.raises(SynclineError, match=UNHEARD):
            fleet.on_close(print)
        fleet.close()

    run_fleets(1, body)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_closed_model_steps_no_more_and_keeps_what_it_has(rule: UpdateRule) -> None:
    def act(trained: Trained) -> None:
        trained.step()
        trained.fleet.close()
        with pytest.raises(SynclineError, match=CLOSED_MODEL):
            trained.optimizer.step()
        if isinstance(rule, Sharded):
            for call in (trained.optimizer.state_dict, lambda: trained.optimizer.load_state_dict({})):
                with pytest.raises(SynclineError, match=CLOSED_MODEL):
                    call()
        else:
            assert trained.optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
        trained.backward()
        assert trained.model.weight.grad is not None, "it is a plain model"

    alone(rule, act)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_model_and_an_optimizer_are_distributed_once(rule: UpdateRule) -> None:
    def act(trained: Trained) -> None:
        model, optimizer = trained.plain
        with pytest.raises(SynclineError, match=r"\(first: 'weight'\) were given to distribute\(\) before"):
            syncline.distribute(model, optimizer, rule, fleet=trained.fleet)
        with pytest.raises(SynclineError, match="This optimizer was distributed already"):
            syncline.distribute(model, trained.optimizer, rule, fleet=trained.fleet)
        trained.step()

    alone(rule, act)


def test_a_process_has_one_fleet_at_a_time() -> None:
    with syncline.init() as fleet:
        with pytest.raises(SynclineError, match=r"init\(\) was called twice; .*use it, or close\(\) it"):
            syncline.init()
        fleet.barrier()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_number_of_samples_that_comes_after_the_gradients_is_refused_in_the_step(rule: UpdateRule) -> None:
    def act(trained: Trained) -> None:
        trained.backward()
        trained.optimizer.batch_size(3)
        with pytest.raises(SynclineError, match=r"batch_size\(3\) came after backward\(\).* of 1; call it before"):
            trained.optimizer.step()
        trained.optimizer.zero_grad()
        trained.optimizer.batch_size(3)
        trained.step()

    alone(rule, act)


SYNCHRONOUS: dict[str, UpdateRule] = {
    "all_reduce": AllReduce(),
    "sharded": Sharded(),
    "sharded, overlap": Sharded(overlap_forward=True),
    "sharded, in backward": Sharded(step_in_backward=True),
}


@pytest.mark.parametrize("rule", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_a_step_without_a_backward_pass_on_any_rank_changes_nothing_and_says_so(rule: UpdateRule) -> None:
    """As with plain PyTorch: whoever goes on has the parameters of one who made no such step."""

    def train(*, is_idle: bool) -> torch.Tensor:
        (weight,) = run_fleets(1, lambda fleet: loop(Trained(fleet, rule), is_idle=is_idle))
        return weight

    def loop(trained: Trained, *, is_idle: bool) -> torch.Tensor:
        torch.nn.init.ones_(trained.model.weight)
        trained.step()
        if is_idle:
            with pytest.warns(SynclineWarning, match="Step 2 changed nothing, .* no gradient reached a parameter"):
                idle_step(trained)
        trained.step()
        trained.optimizer.synchronize()
        return trained.model.weight.detach().clone()

    def idle_step(trained: Trained) -> None:
        trained.optimizer.step()
        trained.backward()  # where a step does not wait for its report, the next pass does
        trained.optimizer.zero_grad()

    assert torch.equal(train(is_idle=True), train(is_idle=False))


@pytest.mark.parametrize("rule", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_who_called_step_once_more_without_a_backward_pass_is_told(rule: UpdateRule) -> None:
    def body(fleet: Fleet) -> None:
        trained = Trained(fleet, rule)
        for number in range(4):
            trained.step()
            if (fleet.rank, number) == (1, 1):
                trained.optimizer.step()
                assert trained.model.weight.grad is None, "the next backward pass would add to it"

    _, error = run_fleets(2, body, accept=SynclineError)
    assert str(error).startswith(
        "rank 1 (host memory) called step() once without a backward pass, which took part in the others' next step; "
        "rank 0 (host memory) left after 4 steps, and rank 1 (host memory) is in its 5th"
    )
    assert str(error).endswith("it still makes a step of all")
    assert error.ranks_at_fault == (1,)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_another_thread_may_step(rule: UpdateRule) -> None:
    def act(trained: Trained) -> None:
        before = trained.model.weight.detach().clone()
        thread = threading.Thread(target=trained.step)
        thread.start()
        thread.join()
        trained.optimizer.synchronize()
        assert not torch.equal(before, trained.model.weight)

    alone(rule, act)


def test_a_period_that_one_rank_ends_alone_names_the_other() -> None:
    have_failed = threading.Event()

    def body(fleet: Fleet) -> str:
        trained = Trained(fleet, Overlapped())
        trained.step()
        if fleet.rank:
            have_failed.wait(60)
            return ""
        with pytest.raises(SynclineError, match=r"rank 1 \(host memory\) sent nothing .*end of a period") as caught:
            trained.optimizer.end_period()
        have_failed.set()
        return str(caught.value)

    first, *_ = run_fleets(2, body, timeout_s=2.0, accept=SynclineError)
    assert isinstance(first, str | SynclineError)


WRONG_BATCHES = {"text": "x", "number": 3, "nothing": [], "object": object(), "no rows": torch.ones(0, 2)}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_a_batch_that_a_phased_model_cannot_take_is_refused_on_both_ranks(name: str, tmp_path: Path) -> None:
    def body(fleet: Fleet) -> Any:
        stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
        trainer = syncline.phase(stages, torch.optim.Adam, loss=nn.MSELoss(), micro_batches=2, fleet=fleet)
        return trainer.step(WRONG_BATCHES[name], torch.ones(2, 2))

    first, second = run_fleets(2, body, accept=Exception, timeout_s=20.0)
    assert isinstance(first, SynclineError), repr(first)
    assert isinstance(second, SynclineError), repr(second)
