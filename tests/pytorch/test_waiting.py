"""Whoever touches a parameter waits for its new value, in any thread; who does not, does not."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncline.pytorch.distribute import distribute
from syncline.pytorch.flatten import flatten, plan_model, trained_parameters
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.waiting import WaitingParameters
from syncline.updates import Sharded


class Recorder:
    """Two layers in buckets of their own; ``waited`` lists what was waited for, and a wait doubles the values."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        for parameter in self.model.parameters():
            nn.init.ones_(parameter)
        named = trained_parameters(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.buckets = flatten(named, plan_model(named, bucket_bytes=1))
        self.waited: list[tuple[int, ...]] = []
        self.waiting = WaitingParameters(self.buckets, self._wait)
        self.waiting.begin()

    def _wait(self, buckets: tuple[int, ...]) -> None:
        self.waited.append(buckets)
        for index in buckets:
            self.buckets[index].parameters.mul_(2)


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda p: p.data.clone(),
    "detach": lambda p: p.detach().clone(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "clone": torch.clone,
    "list": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: p[0, 0].item() * torch.ones(2, 2),
    "foreach": lambda p: torch._foreach_add([p], 0.0)[0],
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "pointer": lambda p: p.data_ptr() and p.data.clone(),
    "linear": lambda p: nn.functional.linear(torch.eye(2), p),
    "stack": lambda p: torch.stack([p])[0],
    "storage": lambda p: torch.tensor(p.untyped_storage(), dtype=torch.uint8).view(torch.float32).reshape(2, 2),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_wait_for_their_bucket_alone(read: Callable[[nn.Parameter], Any]) -> None:
    recorder = Recorder()
    second = recorder.model[1].weight
    assert torch.equal(read(second), torch.full((2, 2), 2.0))
    assert recorder.waited == [(1,)]
    assert type(second) is nn.Parameter
    assert type(recorder.model[0].weight) is not nn.Parameter


def test_writes_wait_and_are_kept() -> None:
    recorder = Recorder()
    first, second = (layer.weight for layer in recorder.model)
    first.data.clamp_(-1, 1)
    nn.init.constant_(second, 5.0)
    assert recorder.waited == [(0,), (1,)]
    assert torch.equal(first, torch.ones(2, 2))
    assert torch.equal(second, torch.full((2, 2), 5.0))


def test_the_whole_model_is_saved_with_its_new_values() -> None:
    recorder = Recorder()
    file = io.BytesIO()
    torch.save(recorder.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert [type(parameter) for parameter in loaded.parameters()] == [nn.Parameter] * 2
    assert all(torch.equal(parameter, torch.full((2, 2), 2.0)) for parameter in loaded.parameters())


def test_what_has_no_value_does_not_wait() -> None:
    recorder = Recorder()
    weight = recorder.model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.numel(), weight.dtype, weight.requires_grad) == ((2, 2), 4, torch.float32, True)
    weight.grad = None
    recorder.model.zero_grad()
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert len({weight: 1}) == 1
    assert recorder.waited == []


def test_who_is_interrupted_while_parameters_are_given_back_gives_them_back_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder()
    join = threading.Thread.join

    def interrupted(thread: threading.Thread) -> None:
        join(thread)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recorder.waiting.release()
    recorder.waiting.release()
    assert [type(parameter) for parameter in recorder.model.parameters()] == [nn.Parameter] * 2
    assert all(torch.equal(parameter, torch.ones(2, 2)) for parameter in recorder.model.parameters())


def test_a_subclass_of_the_users_is_itself_again() -> None:
    class Named(nn.Parameter):
        pass

    model = nn.Module()
    model.weight = Named(torch.ones(2))  # type: ignore[assignment]
    named = trained_parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    waiting = WaitingParameters(flatten(named, plan_model(named, bucket_bytes=1)), lambda _: None)
    waiting.begin()
    waiting.begin()
    assert isinstance(model.weight, Named)
    waiting.finish()
    assert type(model.weight) is Named


def test_another_thread_waits_too(run_fleets: Any) -> None:
    """Rank 1 steps only when a thread of rank 0 has asked for a parameter, and that thread sees the new value."""
    asks, sees = threading.Event(), []

    def body(fleet: Fleet) -> None:
        model = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        rule = Sharded(overlap_forward=True)
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), rule, fleet=fleet)
        model(torch.ones(1, 4)).sum().backward()

        def read() -> None:
            asks.set()
            sees.append(model.weight.detach().clone())

        if fleet.rank == 1:
            assert asks.wait(60)
            optimizer.step()
            return
        optimizer.step()
        reader = threading.Thread(target=read)
        reader.start()
        reader.join()

    run_fleets(2, body)
    assert torch.equal(sees[0], torch.zeros(4, 4))


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_is_written_after_a_step_is_kept(overlaps: bool, run_fleets: Any) -> None:
    """Weight clipping as in a Wasserstein GAN, and a moving average, which were lost and stale."""

    def body(fleet: Fleet) -> tuple[float, torch.Tensor, torch.Tensor]:
        model = nn.Linear(8, 8)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        rule = Sharded(bucket_bytes=64, overlap_forward=overlaps)
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        average = torch.zeros(8, 8)
        for step in range(4):
            model(torch.full((2, 8), step + fleet.rank + 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.mul_(0.5).add_(model.weight.detach(), alpha=0.5)
            for parameter in model.parameters():
                parameter.data.clamp_(-0.01, 0.01)
        return (
            max(float(parameter.detach().abs().max()) for parameter in model.parameters()),
            average,
            copy.deepcopy(model).weight,
        )

    results = run_fleets(2, body)
    for largest, average, copied in results:
        assert largest == pytest.approx(0.01)
        assert torch.equal(average, results[0][1])
        assert torch.equal(copied, results[0][2])


def test_compiled_models_do_not_overlap(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> type:
        model = nn.Linear(4, 4)
        model.compile(backend="eager")
        rule = Sharded(overlap_forward=True)
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), rule, fleet=fleet)
        model.weight.sum().backward()
        optimizer.step()
        return type(model.weight)

    assert run_fleets(2, body) == [nn.Parameter] * 2


class _Stacked(nn.Module):
    """Three experts whose weights are one parameter, as the guides of ``torch.func`` write ensembles."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4, 4))


def _without_subclasses(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return inputs @ weight


OWNERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "vmap": lambda w, x: torch.vmap(lambda one: x @ one)(w),
    "grad": lambda w, x: torch.func.grad(lambda one: (x @ one).square().sum())(w),
    "jvp": lambda w, x: torch.func.jvp(lambda one: x @ one.square(), (w,), (torch.ones(3, 4, 4),))[1],
    "vjp": lambda w, x: torch.func.vjp(lambda one: x @ one.square(), w)[1](torch.ones(3, 2, 4))[0],
    "jacrev": lambda w, x: torch.func.jacrev(lambda one: (x @ one).square().sum())(w),
    "without subclasses": _without_subclasses,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of torch.func.jvp's own
@pytest.mark.parametrize("read", OWNERS.values(), ids=OWNERS)
def test_a_module_waits_for_its_own_parameters_however_it_reads_them(
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], run_fleets: Any
) -> None:
    """Rank 1 steps only when rank 0 is in its forward pass, so nothing has arrived there unless it waits."""
    begins = threading.Event()

    def body(fleet: Fleet) -> torch.Tensor | None:
        model = _Stacked()
        model.forward = lambda x: read(model.weight, x)  # type: ignore[method-assign]
        rule = Sharded(overlap_forward=True)
        _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), rule, fleet=fleet)
        model.weight.sum().backward()
        if fleet.rank == 1:
            assert begins.wait(60)
            optimizer.step()
            return None
        optimizer.step()
        begins.set()
        return model(torch.ones(2, 4)).detach().clone()

    got = run_fleets(2, body)[0]
    assert torch.equal(got, read(torch.zeros(3, 4, 4), torch.ones(2, 4)))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")  # the child only ends
def test_who_forks_waits_for_all() -> None:
    recorder = Recorder()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert recorder.waited == [(0, 1)]
