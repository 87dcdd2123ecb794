"""Each private name of PyTorch does what it is used for; one that a new PyTorch lacks fails here, by its own name."""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist, nn

from rank_scripts import run_python
from syncline.updates import private_torch


def test_writes_are_counted_but_for_those_through_data() -> None:
    value = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        value[0] = 2.0
    value.data.mul_(2)
    assert private_torch.write_count(value) == 1


UNARRIVED = """
import torch
from syncline.updates import private_torch

parameter = torch.nn.Parameter(torch.zeros(2))
private_torch.replace_data([(parameter, private_torch.unarrived_data(parameter))])
assert private_torch.is_unarrived(parameter)
assert (parameter.shape, parameter.data_ptr()) == ((2,), 0)

def arrive(operation, *args):
    private_torch.replace_data([(parameter, torch.ones(2))])
    return operation(*args)

private_torch.on_unarrived_read(arrive)
with torch._C.DisableTorchFunctionSubclass():
    assert torch.equal(parameter + 1, torch.full((2,), 2.0))
assert not private_torch.is_unarrived(parameter)
"""


def test_operations_on_what_has_not_arrived_are_heard_of() -> None:
    done = run_python("-c", UNARRIVED)  # it is heard for good
    assert done.returncode == 0, done.stdout


def test_who_compiles_is_heard_of_once() -> None:
    heard: list[Any] = []
    for _ in range(2):
        private_torch.before_compiling(heard.append)
    torch.compile(lambda one: one + 1, backend="eager")(torch.ones(2))
    torch._dynamo.reset()
    torch.compile(lambda one: one + 2, backend="eager")(torch.ones(2))
    assert len(heard) == 1


def test_backward_pass_is_numbered_within_a_pass_alone() -> None:
    seen: list[int] = []
    value = torch.ones(2, requires_grad=True)
    for _ in range(2):
        doubled = value * 2
        doubled.register_hook(lambda _: seen.append(private_torch.backward_pass()))
        doubled.sum().backward()
    assert private_torch.backward_pass() == -1
    assert -1 not in seen
    assert seen[0] != seen[1]


def test_at_end_of_backward_comes_after_the_last_gradient() -> None:
    order: list[str] = []
    value = torch.ones(2, requires_grad=True)
    value.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    doubled = value * 2
    doubled.register_hook(lambda _: private_torch.at_end_of_backward(lambda: order.append("end")))
    doubled.sum().backward()
    assert order == ["gradient", "end"]


def test_a_node_runs_until_the_end_of_backward() -> None:
    seen: list[bool] = []
    value = torch.ones(2, requires_grad=True)
    doubled = value * 2
    doubled.register_hook(lambda _: seen.append(private_torch.is_in_node()))
    doubled.register_hook(lambda _: private_torch.at_end_of_backward(lambda: seen.append(private_torch.is_in_node())))
    doubled.sum().backward()
    assert (seen, private_torch.is_in_node()) == ([True, False], False)


def test_what_comes_at_the_end_of_backward_can_ask_for_more_and_raise() -> None:
    order: list[str] = []

    def fail() -> None:
        raise KeyError("as itself")

    def end() -> None:
        order.append("end")
        private_torch.at_end_of_backward(fail)

    value = torch.ones(2, requires_grad=True)
    doubled = value * 2
    doubled.register_hook(lambda _: private_torch.at_end_of_backward(end))
    doubled.register_hook(lambda _: private_torch.at_end_of_backward(lambda: order.append("next")))
    with pytest.raises(KeyError, match="as itself"):
        doubled.sum().backward()
    assert order == ["end", "next"]


def test_default_store_is_that_of_the_group(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        private_torch.default_store().set("key", "value")
        assert private_torch.default_store().get("key") == b"value"
    finally:
        torch.distributed.destroy_process_group()


def test_tree_leaves_finds_what_users_have_registered() -> None:
    nested = {"a": [1, (2, None)], "b": OrderedDict(c=3)}
    assert private_torch.tree_leaves(nested) == [1, 2, None, 3]
    assert private_torch.tree_map(str, nested) == {"a": ["1", ("2", "None")], "b": OrderedDict(c="3")}


def test_tensor_without_memory_has_a_shape() -> None:
    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    like = torch.ones(3, 2, dtype=torch.float16).t()
    made = private_torch.tensor_without_memory(Empty, like)
    assert isinstance(made, Empty)
    assert (made.shape, made.stride(), made.dtype, made.device) == (like.shape, (1, 2), like.dtype, like.device)


def test_is_compiled_knows_both_ways() -> None:
    plain, method = nn.Linear(1, 1), nn.Linear(1, 1)
    assert not private_torch.is_compiled(plain)
    assert private_torch.is_compiled(torch.compile(plain, backend="eager"))  # type: ignore[arg-type]
    method.compile(backend="eager")
    assert private_torch.is_compiled(method)


def test_note_step_satisfies_a_scheduler() -> None:
    """It warns, which is an error here, if it has not seen its optimizer step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    private_torch.note_step(optimizer)
    scheduler.step()
    untold = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 0.9)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        untold.step()


def test_a_scaler_steps_an_optimizer_without_gradients_and_says_so() -> None:
    optimizer, scaler = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), torch.amp.GradScaler("cpu")
    private_torch.let_scalers_step(optimizer)

    def refuse(stepped: torch.optim.Optimizer, *_: Any) -> None:
        if hasattr(stepped, private_torch.SCALED):
            raise ValueError("scaled")

    optimizer.register_step_pre_hook(refuse)
    optimizer.step()
    scaler.scale(torch.ones(1))
    with pytest.raises(ValueError, match="scaled"):
        scaler.step(optimizer)


@pytest.mark.parametrize("kind", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_state_hooks_are_called_that_were_registered_and_may_change_the_state(
    kind: private_torch.StateHookKind,
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    seen: list[tuple[object, ...]] = []
    register = getattr(optimizer, f"register_{kind}_hook")
    register(lambda *given: seen.append(given))
    register(lambda *given: {"changed": True})
    register(lambda *given: seen.append(given))
    given = () if kind in {"state_dict_pre", "load_state_dict_post"} else ({"state": 1},)
    changed = private_torch.call_state_hooks(optimizer, kind, *given)
    assert seen == [(optimizer, *given), (optimizer, *([{"changed": True}] if given else []))]
    assert changed == ({"changed": True} if given else {})


def test_properties_without_a_value_are_those_of_tensors() -> None:
    names = (*private_torch.UNVALUED_PROPERTIES, *private_torch.DESCRIBED)
    assert all(hasattr(torch.Tensor, name) for name in names)


def test_a_scaler_asks_a_subclass_by_the_name_that_is_known() -> None:
    asked: list[str] = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2).as_subclass(Asked)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)
    assert private_torch.UNSCALE in asked


def test_an_index_of_dcp_names_what_is_known_and_number_types(tmp_path: Path) -> None:
    import pickletools

    import torch.distributed.checkpoint as dcp

    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"tensor": torch.ones(2, dtype=torch.bfloat16), "value": 3}, checkpoint_id=tmp_path, no_dist=True)
    texts: list[str] = []
    named = set()
    for operation, argument, _ in pickletools.genops((tmp_path / ".metadata").read_bytes()):
        if isinstance(argument, str):
            texts.append(argument)
        if operation.name == "STACK_GLOBAL":
            named.add(texts[-1])
    assert named - {"bfloat16", "getattr"} <= private_torch.CHECKPOINT_INDEX_NAMES
    assert "Metadata" in named


def test_checkpoint_place_has_what_the_reader_asks_for() -> None:
    place = private_torch.checkpoint_place("part", start=3, length=4)
    assert (place.relative_path, place.offset, place.length) == ("part", 3, 4)


def test_failing_backend_does_no_collective() -> None:
    backend = private_torch.failing_backend(1, 3)
    assert (backend.rank(), backend.size()) == (1, 3)
    for call in (backend.allreduce, backend.broadcast):
        with pytest.raises(RuntimeError, match="error_on_collective"):
            call([torch.ones(1)])


def test_nccl_is_asked_for_a_group_that_outlives_our_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in, where PyTorch is built without it."""

    class Nccl:
        class Options:
            pass

        def __init__(self, *given: Any) -> None:
            self.given = given

    monkeypatch.setattr("torch.distributed.distributed_c10d.ProcessGroupNCCL", Nccl, raising=False)
    store, rank, size, options = private_torch.nccl_group("store", 1, 2, timeout_s=30.0).given
    assert (store, rank, size, options._timeout) == ("store", 1, 2, timedelta(seconds=90))


def test_a_backend_that_is_no_group_reduces_and_gathers() -> None:
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    source, output = torch.arange(3.0), torch.zeros(3)
    private_torch.reduce_into(backend, output, source, dist.ReduceOp.MAX).wait()
    assert torch.equal(output, source)
    private_torch.gather_into(backend, output, 2 * source).wait()
    assert torch.equal(output, 2 * source)


def test_backend_class_can_be_inherited_from_if_there_is_one() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert (private_torch.backend_class() is None) == (version < (2, 14))


def test_a_group_that_is_being_made_tells_of_other_backends() -> None:
    assert not private_torch.has_other_backends(SimpleNamespace())
    store, kinds = dist.HashStore(), dist.ProcessGroup.BackendType
    for kind, is_shared in ((kinds.CUSTOM, False), (kinds.GLOO, True)):
        group = dist.ProcessGroup(store, 0, 1)
        group._set_default_backend(kind)
        assert private_torch.has_other_backends(SimpleNamespace(process_group=group)) == is_shared
    group._register_backend(torch.device("cpu"), kinds.CUSTOM, private_torch.failing_backend(0, 1))
    group._set_default_backend(kinds.CUSTOM)
    assert private_torch.has_other_backends(SimpleNamespace(process_group=group))


def test_a_name_of_calls_is_taken_and_given_back() -> None:
    if not hasattr(dist, "record_comm"):  # before PyTorch 2.13
        with private_torch.taken_comm_name() as name:
            assert name == ""
        return
    with dist.record_comm("of the caller"):
        for _ in range(2):
            with private_torch.taken_comm_name() as name, private_torch.taken_comm_name() as other:
                assert (name, other) == ("of the caller", "")


def test_users_of_a_storage_are_counted_and_an_import_is_one_of_its_own() -> None:
    tensor = torch.zeros(4)
    assert private_torch.num_storage_users(tensor) == 1
    view, array = tensor[1:], tensor.numpy()
    assert private_torch.num_storage_users(tensor) == 3
    again = torch.from_dlpack(tensor)
    assert private_torch.num_storage_users(again) == 1
    assert again.data_ptr() == tensor.data_ptr()
    assert private_torch.storage_number(view) == private_torch.storage_number(tensor)
    assert private_torch.storage_number(again) != private_torch.storage_number(tensor)
    assert len(array) == 4


def test_a_range_is_shown_with_the_shapes_of_its_tensors_while_a_profiler_looks_on() -> None:
    inputs = [torch.ones(3, 2), None, [torch.ones(1)]]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        assert private_torch.is_profiled()
        with private_torch.recorded_range("of ours", inputs):
            pass
    assert not private_torch.is_profiled()
    shown = [event.input_shapes for event in profiler.events() if event.name == "of ours"]  # type: ignore[no-untyped-call]
    assert shown == [[[3, 2], [], []]]
