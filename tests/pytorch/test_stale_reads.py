"""Each way of reading a parameter while its new value is under way gets the new value, or an error; never the old one.

``Recorder`` of a wait doubles the parameters, which were ones. Every way reads a weight that nobody has waited for, and
must give what it gives of a plain parameter of twos. The guide's table names the same ways.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import io
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from syncline.errors import UpdateError
from syncline.pytorch import waiting
from syncline.pytorch.distribute import distribute
from syncline.pytorch.flatten import flatten, plan_model, trained_parameters
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.waiting import WaitingParameters
from syncline.updates import Sharded

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "speed.md"
BATCH = torch.arange(6.0).reshape(2, 3)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]


@dataclass
class Layer:
    """A layer whose weight is under way once :meth:`begin` was called, and a function made of it before."""

    module: nn.Linear
    begin: Callable[[], None] = lambda: None
    before_call: Callable[[], None] = lambda: None

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight


def plain(value: float) -> Layer:
    module = nn.Linear(3, 3, bias=False)
    nn.init.constant_(module.weight, value)
    return Layer(module)


def under_way() -> tuple[Layer, WaitingParameters]:
    layer = plain(1.0)
    named = trained_parameters(layer.module, torch.optim.SGD(layer.module.parameters(), lr=0.1))
    buckets = flatten(named, plan_model(named, bucket_bytes=1))
    memory = buckets[0].parameters.numpy()  # whatever mode this thread is in
    waiting = WaitingParameters(buckets, lambda _: np.multiply(memory, 2, out=memory))
    layer.begin = waiting.begin
    layer.before_call = lambda: waiting.finish(waiting.buckets_of(layer.module))
    return layer, waiting


class _Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class _Kept(torch.autograd.Function):
    """Reads its input in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradient * weight


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 3


def by_address(weight: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list((ctypes.c_float * 9).from_address(weight.data_ptr())))


def in_c(layer: Layer, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Call ATen as an extension does in C++: nothing of Python hears of it before the dispatcher."""
    with torch._C.DisableTorchFunctionSubclass():
        return read(layer.weight)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def swapped(layer: Layer) -> torch.Tensor:
    other = nn.Parameter(torch.zeros(3, 3))
    torch.utils.swap_tensors(layer.weight, other)
    return other


def in_thread(layer: Layer) -> torch.Tensor:
    found = []
    thread = threading.Thread(target=lambda: found.append(in_c(layer, torch.sum)))
    thread.start()
    thread.join()
    return torch.as_tensor(found[0])


def in_fork(layer: Layer) -> torch.Tensor:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, str(layer.module(BATCH).sum().item()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as told:
        return torch.tensor(float(told.read()))


def parametrized(layer: Layer) -> torch.Tensor:
    nn.utils.parametrize.register_parametrization(layer.module, "weight", _Doubled())
    return layer.module(BATCH)


def in_its_module(layer: Layer, batch: torch.Tensor) -> torch.Tensor:
    layer.module.register_forward_pre_hook(lambda *_: layer.before_call())
    return layer.module(batch)


def hooked(layer: Layer) -> torch.Tensor:
    found = []
    other = nn.Identity()
    other.register_forward_hook(lambda *_: found.append(in_c(layer, torch.clone)))
    other(BATCH)
    return torch.as_tensor(found[0])


def early(make: Callable[[nn.Linear], Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[Layer], torch.Tensor]:
    """Make a function of the layer before its parameters are under way, and call it then."""

    def read(layer: Layer) -> torch.Tensor:
        function = make(layer.module)
        layer.begin()
        return function(BATCH)

    return read


def compiled(function: Callable[..., Any], *, fullgraph: bool = False) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([BATCH, BATCH[:1]], layout=layout)


def with_kernel(layer: Layer) -> torch.Tensor:
    return torch.ops.aten.mm.default(BATCH, layer.weight)


WAYS: dict[str, Callable[[Layer], Any]] = {
    "a module's call": lambda layer: layer.module(BATCH),
    "`module._parameters`": lambda layer: layer.module._parameters["weight"] + 1,
    "`torch.ops`": with_kernel,
    "`torch._foreach_*`": lambda layer: torch._foreach_add([layer.weight], 1.0)[0],
    "`p.data`": lambda layer: layer.weight.data.clone(),
    "`p.detach()`": lambda layer: layer.weight.detach().clone(),
    "`p.T`, `p.view(...)`": lambda layer: layer.weight.T + layer.weight.view(-1).view(3, 3),
    "`.numpy()`": lambda layer: layer.weight.detach().numpy().copy(),
    "`__array__`": lambda layer: np.asarray(layer.weight.data).copy(),
    "`.tolist()`": lambda layer: layer.weight.tolist(),
    "`.item()`": lambda layer: layer.weight[0, 0].item(),
    "`.data_ptr()`": lambda layer: by_address(layer.weight),
    "`untyped_storage()`": lambda layer: list(layer.weight.untyped_storage()),
    "`torch.from_dlpack`": lambda layer: torch.from_dlpack(layer.weight.detach()).clone(),
    "`copy.deepcopy`": lambda layer: copy.deepcopy(layer.module).weight,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer.weight)),
    "`torch.save`": lambda layer: saved(layer.module).weight,
    "`torch.multiprocessing`": lambda layer: pickle.loads(bytes(ForkingPickler.dumps(layer.weight))),
    "`torch.utils.swap_tensors`": swapped,
    "`parameters_to_vector`": lambda layer: nn.utils.parameters_to_vector(layer.module.parameters()),
    "`torch.vmap`": lambda layer: torch.vmap(lambda row: row * 3)(layer.weight),
    "`torch.func.functional_call`": lambda layer: functional_call(
        layer.module, dict(layer.module.named_parameters()), BATCH
    ),
    "`torch.func.stack_module_state`": lambda layer: stack_module_state([layer.module])[0]["weight"],
    "`torch.func.grad`": lambda layer: torch.func.grad(lambda w: w.square().sum())(layer.weight),
    "`torch.func.vjp`": lambda layer: torch.func.vjp(torch.square, layer.weight)[1](torch.ones(3, 3))[0],
    "`torch.func.jvp`": lambda layer: torch.func.jvp(torch.square, (layer.weight,), (torch.ones(3, 3),))[1],
    "`torch.func.jacrev`": lambda layer: torch.func.jacrev(torch.square)(layer.weight),
    "`torch.func.hessian`": lambda layer: torch.func.hessian(lambda w: w.pow(3).sum())(layer.weight),
    "`torch.autograd.functional`": lambda layer: torch.autograd.functional.jacobian(torch.square, layer.weight),
    "`torch.utils.checkpoint`": lambda layer: torch.utils.checkpoint.checkpoint(
        lambda x: x @ layer.weight, BATCH, use_reentrant=False
    ),
    "`autograd.Function`": lambda layer: _Multiplied.apply(layer.weight),
    "`ctx.saved_tensors`": lambda layer: torch.autograd.grad(_Kept.apply(layer.weight), layer.weight)[0],
    "`TorchDispatchMode`": lambda layer: _in_mode(_Dispatches(), layer),
    "`TorchFunctionMode`": lambda layer: _in_mode(_Functions(), layer),
    "a C++ extension that calls ATen": lambda layer: in_c(layer, lambda w: BATCH @ w),
    "nested tensors": lambda layer: nn.functional.linear(nested(torch.strided), layer.weight).to_padded_tensor(0.0),
    "jagged tensors, in the module that has `p`": lambda layer: in_its_module(layer, nested(torch.jagged)).values(),
    "parametrizations": parametrized,
    "`weight_norm`": lambda layer: nn.utils.parametrizations.weight_norm(layer.module)(BATCH),
    "`spectral_norm`": lambda layer: (
        nn.utils.parametrizations.spectral_norm(layer.module).parametrizations.weight.original + 1
    ),
    "forward hooks": hooked,
    "another thread": in_thread,
    "a forked worker": in_fork,
    "`torch.jit.script`, made before": early(torch.jit.script),
    "`torch.jit.trace`, made before": early(lambda module: torch.jit.trace(module, BATCH)),
    "`torch.jit.trace`": lambda layer: torch.jit.trace(layer.module, BATCH, check_trace=False)(BATCH),
    "`torch.export`, made before": early(lambda module: torch.export.export(module, (BATCH,)).module()),
    "`torch.export`": lambda layer: torch.export.export(layer.module, (BATCH,)).module()(BATCH),
    "`torch.fx`": lambda layer: torch.fx.symbolic_trace(layer.module)(BATCH),
    "`torch.compile` of the module": lambda layer: compiled(layer.module)(BATCH),
    "`torch.compile`, made before": early(lambda module: _warm(compiled(module))),
    "`torch.compile` of a function around it": lambda layer: compiled(lambda x: x @ layer.module.weight)(BATCH),
    "`torch.compile`, `p` as an argument": lambda layer: compiled(torch.mm, fullgraph=True)(BATCH, layer.weight),
    "`torch.compile` with `fullgraph=True`": lambda layer: compiled(layer.module, fullgraph=True)(BATCH),
}


def _in_mode(mode: Any, layer: Layer) -> torch.Tensor:
    with mode:
        return BATCH @ layer.weight


def _warm(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    function(BATCH)
    return function


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def values(found: Any) -> Any:
    return found.detach().tolist() if isinstance(found, torch.Tensor) else np.asarray(found).tolist()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_gets_the_new_value(way: Callable[[Layer], Any]) -> None:
    torch.manual_seed(1)
    expected = values(way(plain(2.0)))
    torch.manual_seed(1)
    old = values(way(plain(1.0)))
    layer, _ = under_way()
    if not way.__qualname__.startswith("early"):
        layer.begin()
    torch.manual_seed(1)
    found = values(way(layer))
    assert expected != old
    assert found == expected


KEPT: dict[str, Callable[[nn.Parameter], Any]] = {
    "a `p.data` kept over the step": lambda p: p.data,
    "a view kept over the step": lambda p: p.view(-1),
    "a NumPy array kept over the step": lambda p: p.detach().numpy(),
    "a DLPack capsule kept over the step": lambda p: p.detach().__dlpack__(),
    "a graph kept over the step": lambda p: p.T.square(),
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_step_waits_where_memory_is_held(keep: Callable[[nn.Parameter], Any]) -> None:
    layer, waiting = under_way()
    assert not waiting.is_held
    held = keep(layer.weight)
    assert waiting.is_held
    del held
    assert not waiting.is_held


def test_what_was_compiled_around_a_parameter_is_not_compiled_again() -> None:
    layer, waiting = under_way()
    layer.begin()
    assert not waiting.is_compiled
    compiled(lambda x: x @ layer.weight)(BATCH)
    assert waiting.is_compiled


def test_jagged_tensors_with_the_weight_of_a_module_that_is_not_called_are_refused() -> None:
    layer, _ = under_way()
    layer.begin()
    with pytest.raises(RuntimeError):
        nn.functional.linear(nested(torch.jagged), layer.weight)
    assert torch.equal(layer.module(BATCH), plain(2.0).module(BATCH))


def test_functionalize_is_refused_with_a_remedy() -> None:
    layer, _ = under_way()
    layer.begin()
    with pytest.raises(UpdateError, match=r"synchronize\(\)"):
        torch.func.functionalize(torch.square)(layer.weight)


NEITHER = ("`torch.func.functionalize`", "jagged tensors, elsewhere", "an address kept over the step")


def test_the_guide_names_every_way() -> None:
    rows = re.findall(r"^\| (.+?) \| (?:waits|`step\(\)` waits|refused|not seen)", GUIDE.read_text(), re.MULTILINE)
    assert rows == [*WAYS, *KEPT, *NEITHER]


@pytest.mark.parametrize(("said", "overlaps", "checks"), [("1", True, True), ("1", False, False), ("0", True, False)])
def test_stale_parameters_are_looked_for_with_the_overlap_alone(
    said: str, overlaps: bool, checks: bool, monkeypatch: pytest.MonkeyPatch, run_fleets: Any
) -> None:
    monkeypatch.setenv("SYNCLINE_CHECK_STALE", said)

    def body(fleet: Fleet) -> list[int]:
        model = nn.Linear(4, 4, bias=False)
        rule = Sharded(overlap_forward=overlaps)
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        nan: list[int] = []
        (bucket,) = optimizer.training.updater.buckets
        poison = bucket.poison

        def count(kept: Any) -> None:
            poison(kept)
            nan.append(int(bucket.parameters.isnan().sum()))

        bucket.poison = count
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert not model.weight.isnan().any()
        return nan

    assert run_fleets(2, body) == [[8] if checks else []] * 2


def test_two_threads_hear_of_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    second_came_in = threading.Event()

    def register(function: Callable[..., Any]) -> None:
        calls.append(function)
        if len(calls) == 2:
            second_came_in.set()
        second_came_in.wait(0.2)  # where the other thread is let in, it comes within this time

    monkeypatch.setattr(waiting, "on_unarrived_read", register)
    monkeypatch.setattr(waiting, "_register", functools.cache(waiting._register.__wrapped__))
    threads = [threading.Thread(target=waiting.WaitingParameters((), print).begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_an_alias_that_no_wait_can_reach_is_refused_with_the_name_of_its_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    named = trained_parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    waiting_parameters = WaitingParameters(flatten(named, plan_model(named, bucket_bytes=32)), lambda _: None)
    waiting_parameters.begin()
    with torch._C.DisableTorchFunctionSubclass():
        alias = model[1].weight.data
    with pytest.raises(
        UpdateError, match=r"aten\.add.* reads an alias of parameter '1\.weight', taken while .*synchronize"
    ):
        alias + 1
    del waiting_parameters
    assert (model[1].weight + 1).shape == (2, 2), "the parameter itself has arrived"
