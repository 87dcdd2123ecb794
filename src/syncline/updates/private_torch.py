"""Every name of PyTorch that is used here and is not public, in one place: why it is needed, and what would replace it.

Nothing else in this package may name one (a test sees to that), and a test tries each, so that a new PyTorch which has
changed one is found out by its name. Where a public name serves, it is used where it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import CodeType
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.autograd import Variable
from torch.utils import _pytree

Method = TypeVar("Method", bound=Callable[..., Any])
StateHookKind = Literal["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]

UNVALUED_PROPERTIES = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")
"""Properties of a tensor that say nothing of its value, so that who reads them need not wait for it.

Autograd and ``torch.nn`` read them of every parameter, in their own code; they have no public names.
"""

CHECKPOINT_INDEX_NAMES = frozenset(
    {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_StorageInfo",
        "_MEM_FORMAT_ENCODING",
        "_get_layout",
        "Size",
        "PosixPath",
        "OrderedDict",
    }
)
"""What the pickle names that is the index of ``torch.distributed.checkpoint``, beside number types.

Its reader loads whatever a pickle names; with these alone, nothing else can be run.
"""

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""The function by which ``torch.amp.GradScaler`` asks gradients for infinities, as a tensor subclass is told of it."""

DESCRIBED = ("_is_view",)
"""What ``torch.compile`` asks, beside public names, of each parameter's gradient when it describes the parameter."""

SCALED = "grad_scale"
"""What ``torch.amp.GradScaler`` sets on an optimizer that it lets step with scaled gradients, while that steps."""


def write_count(tensor: torch.Tensor) -> int:
    """Return how often autograd has seen the tensor written; what goes through ``.data`` or NumPy it does not see.

    Nothing public tells it: ``torch.autograd.graph.increment_version`` writes it alone. A copy of all values to compare
    with would take their memory again.
    """
    return int(tensor._version)


def backward_pass() -> int:
    """Return the number of the backward pass that calls this thread's hooks; -1 outside of one.

    ``torch.utils.module_tracker.ModuleTracker.is_bw`` says whether there is one, and not which: checkpoints run passes
    within passes, and only the outer one ends a step's gradients.
    """
    return torch._C._current_graph_task_id()


def is_in_node() -> bool:
    """Whether a node of the backward pass that is under way calls this thread's hooks, and not the end of the pass.

    What is called :func:`at_end_of_backward` may call hooks too: DDP does in the first pass of a static graph.
    """
    return torch._C._current_autograd_node() is not None


def is_backward_compiled() -> bool:
    """Whether compiled autograd runs the backward pass that calls this thread's hooks.

    It calls nobody :func:`at_end_of_backward`. ``torch.compiler.is_compiling()`` says no while its code runs.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")  # it is there once it has been used
    return module is not None and bool(module.in_compiled_autograd_region)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward pass that is under way ends, on the thread that began it.

    DistributedDataParallel and FSDP do the same. ``torch.autograd.graph.register_multi_grad_hook`` needs to know
    before the pass which gradients will come; parameters without one are what the end is needed for.
    """
    Variable._execution_engine.queue_callback(function)


def tree_leaves(values: Any) -> list[Any]:
    """Return what nested lists, tuples, dictionaries, and classes that users have registered with PyTorch, hold.

    Registered classes (the outputs of Transformers) are known there alone, and no public function walks them.
    """
    return _pytree.tree_leaves(values)


def tree_map(function: Callable[[Any], Any], values: Any) -> Any:
    """Return the same nesting with what ``function`` makes of each of :func:`tree_leaves`.

    Registered classes are known there alone, and no public function builds one again from its leaves.
    """
    return _pytree.tree_map(function, values)


def uncompiled(method: Method) -> Method:
    """Let ``torch.compile`` leave ``method``, and what it calls, alone when compiled code comes to call it.

    DDP's reducer calls Python process groups from C++, within the compiled forward pass, and the compiler follows; so
    it does into hooks, where the code that is compiled runs a backward pass. What it compiles ends before a call.
    ``torch.compiler.disable`` does the same; but it imports the compiler, for two seconds, in each job that has none.
    """
    skip = eval_frame._FrameAction.SKIP
    code: CodeType = method.__code__
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    return method


is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler records what this thread does; ``torch.profiler`` has no function that says so."""


def recorded_range(name: str, inputs: list[Any]) -> AbstractContextManager[None]:
    """Return a range that profilers show as an operator with these inputs: tensors by their shape, others by none.

    ``torch.profiler.record_function`` takes no tensors, so nothing would say how large a call is.
    """
    range_: AbstractContextManager[None] = torch._C._profiler._RecordFunctionFast(name, inputs, {})
    return range_


@contextmanager
def taken_comm_name() -> Iterator[str]:
    """Take the name that ``torch.distributed.record_comm()`` gives to calls of this thread; there is one from 2.13 on.

    Meanwhile no work shows it: works of Python know no tensors, so they would show it without shapes.
    """
    c10d: Any = torch._C._distributed_c10d
    if not hasattr(c10d, "_get_comm_profiling_name"):
        yield ""
        return
    name = c10d._get_comm_profiling_name()
    c10d._set_comm_profiling_name("")
    try:
        yield name
    finally:
        c10d._set_comm_profiling_name(name)


def tensor_without_memory(kind: type[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the class ``kind`` with the shape, strides, type and device of ``like``, and no memory.

    PyTorch's guide to tensor subclasses names this function; there is none beside it.
    """
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )


def num_storage_users(tensor: torch.Tensor) -> int:
    """Return how many tensors, also those behind NumPy arrays, lie in the memory of ``tensor``, itself included.

    There is no public name for it. What was exported (DLPack) and imported again counts in a storage of its own.
    """
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # which ``storage`` is


def storage_number(tensor: torch.Tensor) -> int:
    """Return a number that tells the storage of ``tensor`` from all others that there are now.

    ``data_ptr()`` does so of memory, which several storages may share.
    """
    return int(tensor.untyped_storage()._cdata)


_READ_KEY = "TESTING_ONLY_GenericMode"
"""A dispatch key before all others, of which PyTorch makes no use outside of tests of its own."""


class _Unarrived(torch.Tensor):
    """A tensor without memory; never called, as parameters take its data and not its class."""

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def _read_keys() -> Any:
    """Return the set of ``_READ_KEY`` alone.

    Keys can be named in ``torch.library``, and given to tensors only here.
    """
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_READ_KEY))


def unarrived_data(like: torch.Tensor) -> torch.Tensor:
    """Return what a parameter may have for its ``.data`` (:func:`replace_data`) before its value is there.

    It has no memory, and whatever operation is dispatched with it, be it from C++, calls :func:`on_unarrived_read`'s
    function first. ``__torch_function__`` is told of Python's calls alone, modes of those in their thread.
    """
    return torch.Tensor._make_wrapper_subclass(
        _Unarrived,
        like.shape,
        strides=like.stride(),
        dtype=like.dtype,
        device=like.device,
        _extra_dispatch_keys=_read_keys(),
    )


def is_unarrived(tensor: torch.Tensor) -> bool:
    """Whether it has :func:`unarrived_data`, or is an alias of what has.

    Nothing public says which keys a tensor has.
    """
    return torch._C._dispatch_keys(tensor).has(torch._C._dispatch_key_parse(_READ_KEY))


def on_unarrived_read(function: Callable[..., Any]) -> None:
    """Let ``function(operation, *args, **kwargs)`` take the place of operations on what has not arrived, for good.

    The public ``Library`` registers it; the key is one that is not documented.
    """
    library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(function, _READ_KEY)
    _libraries.append(library)


_libraries: list[torch.library.Library] = []
"""They take back what they registered when they are freed."""


def replace_data(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Assign the second of each to the first's ``.data``, unheard of by ``__torch_function__``.

    :func:`on_unarrived_read`'s function does not hear of it either. Call it on a thread of its own where functorch or a
    mode may be at work: those begin to dispatch anew.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch._C._ExcludeDispatchKeyGuard(_read_keys()):
        for tensor, data in pairs:
            tensor.data = data


def before_compiling(function: Callable[[Any], None]) -> None:
    """Call ``function``, once however often it is given, before ``torch.compile`` compiles or looks at values.

    ``torch.compiler`` has nothing like it. The optimizers of PyTorch have imported this module already;
    ``torch.compiler.reset()`` forgets the function.
    """
    from torch._dynamo.callback import callback_handler

    if function not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(function)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made ``module``, or ``module.compile()`` was called.

    ``torch.compiler`` says whether something is compiled right now, and not whether a module will be.
    """
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let LR schedulers that were made with ``optimizer`` know that it has stepped: they look for it when they step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def call_with_step_hooks(optimizer: torch.optim.Optimizer, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call ``step`` between the hooks that ``register_step_pre_hook`` and its like were given for ``optimizer``.

    ``Optimizer.profile_hook_step`` calls those of all optimizers too, a second time where one optimizer holds another.
    """
    kwargs: dict[str, Any] = {}
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    result = step(*args, **kwargs)
    for hook in list(optimizer._optimizer_step_post_hooks.values()):
        hook(optimizer, args, kwargs)
    return result


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether users have registered hooks before steps, of ``optimizer`` or of all, beside this library's own.

    Hooks can be registered and called by public functions, and not looked for.
    """
    from torch.optim import optimizer as home

    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *home._global_optimizer_pre_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("syncline.") for hook in hooks)


def is_of_scheduler(step: object) -> bool:
    """Whether an LR scheduler put ``step`` on its optimizer, to see that it is called.

    Such a step changes nothing, and PyTorch has no public mark for it.
    """
    return hasattr(step, "_wrapped_by_lr_sched")


def let_scalers_step(optimizer: torch.optim.Optimizer) -> None:
    """Let ``torch.amp.GradScaler`` call ``step()`` whatever gradients there are, with ``SCALED`` set meanwhile.

    So do optimizers that unscale by themselves. Without it a scaler that finds no gradient fails an assertion of its
    own before it calls anything.
    """
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def call_state_hooks(optimizer: torch.optim.Optimizer, kind: StateHookKind, *state: dict[str, Any]) -> dict[str, Any]:
    """Call what ``register_state_dict_pre_hook`` and its three like were given, in order; return the changed ``state``.

    Whoever writes a ``state_dict()`` of their own has to call these, and PyTorch has no function that does.
    """
    for hook in list(getattr(optimizer, f"_optimizer_{kind}_hooks").values()):
        changed = hook(optimizer, *state)
        if state and changed is not None:
            state = (changed,)
    return state[0] if state else {}


def default_store() -> Any:
    """Return the ``torch.distributed.Store`` of the default process group, which must exist.

    ``torch.distributed.group.WORLD.get_group_store()`` says the same of a group in C++, and None of one in Python.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def checkpoint_place(file: str, *, start: int, length: int) -> Any:
    """Say where in a folder a part of a tensor lies (bytes), as the reader of ``torch.distributed.checkpoint`` is told.

    The reader takes this from an index that is pickled; ours comes from JSON, so that loading unpickles nothing.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # loads much, and only checkpoints need it

    return _StorageInfo(file, start, length)


def failing_backend(rank: int, size: int) -> Any:
    """Return a backend of ``torch.distributed`` without sockets, on which every collective raises RuntimeError.

    A device mesh wants a group to have a backend for its device, and none can be written in Python before PyTorch 2.14;
    ``torch.testing`` uses this one, which would else say that all went well.
    """
    c10d: Any = torch._C._distributed_c10d
    options = c10d.FakeProcessGroup.Options()
    options.error_on_collective = True
    return c10d.FakeProcessGroup._create_internal(rank, size, options)


def nccl_group(store: Any, rank: int, size: int, *, timeout_s: float) -> Any:
    """Return NCCL's backend of ``size`` ranks that meet in ``store``, outside of every group of ``torch.distributed``.

    ``new_group()`` is the public way; it wants all ranks of the world at once, in one order. NCCL's own watchdog, which
    ends the process, does so a minute after ``timeout_s``.
    """
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s + 60.0)
    return ProcessGroupNCCL(store, rank, size, options)


def copy_each(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each value to its target.

    ``copy_()`` in a loop takes twice as long where they are small; one call for all has no public name.
    """
    torch._foreach_copy_(targets, values)


def reduce_into(backend: Any, output: torch.Tensor, source: torch.Tensor, op: Any) -> Any:
    """Begin a reduce-scatter of flat tensors on a backend that is no group; return its work.

    ``reduce_scatter_tensor()`` takes groups of ``torch.distributed`` alone.
    """
    options: Any = torch._C._distributed_c10d.ReduceScatterOptions()
    options.reduceOp = op
    return backend._reduce_scatter_base(output, source, options)


def gather_into(backend: Any, output: torch.Tensor, source: torch.Tensor) -> Any:
    """Begin an all-gather of flat tensors on a backend that is no group; return its work.

    ``all_gather_into_tensor()`` takes groups of ``torch.distributed`` alone.
    """
    return backend._allgather_base(output, source)


def backend_class() -> type | None:
    """Return the class that backends of ``torch.distributed`` inherit from; None where that cannot be done in Python.

    From PyTorch 2.14 on it has a constructor, and calls of C++ find the methods of subclasses; it has no public name.
    """
    base: Any = torch._C._distributed_c10d.Backend
    try:
        type("Probe", (base,), {})(0, 1)
    except TypeError:
        return None
    return cast("type", base)


def has_other_backends(distributed: Any) -> bool:
    """Whether a group that is being made is to have other backends than the one whose creator is told so.

    From PyTorch 2.14 on creators are shown the group, which knows the kind of its default backend, and the devices that
    have their backend already. A later one that is written in Python is not seen, nor is the CPU's after a GPU's.
    """
    group: Any = getattr(distributed, "process_group", None)
    return group is not None and (group.name() != "custom" or bool(group._device_types))
