"""Finds parameters whose memory others use too: a bucket would cut them off from those, and those from it.

PyTorch counts who uses a storage, not who it is. So whoever is neither a parameter nor known to be PyTorch's own counts
as a user's.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from syncline.errors import UpdateError
from syncline.updates.private_torch import num_storage_users, storage_number

_REMEDY = (
    "distribute() moves parameters into buckets, so what shares their memory would be cut off; give the parameters "
    "memory of their own first (p.data = p.data.clone())"
)


def mark_bucket(flat: torch.Tensor) -> None:
    """Let parameters of this storage be distributed again, whatever shares it: a training's end leaves them there."""
    flat.untyped_storage().syncline_bucket = True  # type: ignore[attr-defined]


def check_storages(model: nn.Module, trained: Mapping[nn.Parameter, tuple[str, int]]) -> None:
    """Raise :class:`UpdateError` for a trained parameter whose memory others use, be it tensors or processes.

    Parameters that lie side by side in one storage are well where nothing else uses it. ``trained`` has names and
    groups.
    """
    names = {parameter: name for parameter, (name, _) in trained.items()}
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and parameter.layout is torch.strided and type(parameter.data) is torch.Tensor:
            names.setdefault(parameter, name)
    _check_apart(names)
    for parameter, name in names.items():
        if parameter in trained and _is_between_processes(parameter):
            raise UpdateError(
                f"Parameter {name!r} is in memory that processes share (share_memory(), or a model that another "
                f"process sent): {_REMEDY}, and call model.share_memory() after distribute()"
            )
    known = Counter(map(storage_number, names)) + Counter(map(storage_number, _spectral_stand_ins(model)))
    if _used_by_others(trained, known):
        gc.collect()  # tensors that nobody can reach any more
        for parameter in _used_by_others(trained, known)[:1]:
            raise UpdateError(_tell_user(model, parameter, names))


def check_no_vector(replaced: Mapping[nn.Parameter, str]) -> None:
    """Raise :class:`UpdateError` if data that parameters were given later is a part of what something else uses.

    Whole tensors are left alone: loops put back what they kept, and write it anew before they read it.
    """
    known = Counter(map(storage_number, replaced))
    parts = [one for one in replaced if one.untyped_storage().nbytes() > one.nbytes]
    if _used_by_others(parts, known):
        gc.collect()
        for parameter in _used_by_others(parts, known)[:1]:
            raise UpdateError(
                f"The data of parameter {replaced[parameter]!r} was replaced after distribute() by a part of a larger "
                "tensor that is kept, as vector_to_parameters() does, and which would not see later steps; write the "
                "values with p.data.copy_(...), or give vector_to_parameters() a clone()"
            )


def _check_apart(names: Mapping[nn.Parameter, str]) -> None:
    """Hold parameters to places that do not overlap; those in between the elements of others count as overlapping."""
    end, before, device = 0, "", None
    here = [parameter for parameter in names if not parameter.is_meta and parameter.numel()]
    for parameter in sorted(here, key=lambda one: (str(one.device), one.data_ptr())):
        if parameter.device == device and parameter.data_ptr() < end and not _is_in_bucket(parameter):
            raise UpdateError(
                f"Parameters {before!r} and {names[parameter]!r} lie in the same memory, where each has a place of its "
                "own after distribute(); tie them by assigning the parameter itself (head.weight = embedding.weight), "
                "and not its .data, or give one of them memory of its own (p.data = p.data.clone())"
            )
        device, before = parameter.device, names[parameter]
        last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        end = parameter.data_ptr() + (last + 1) * parameter.element_size()


def _is_in_bucket(parameter: nn.Parameter) -> bool:
    return hasattr(parameter.untyped_storage(), "syncline_bucket")


def _is_between_processes(parameter: nn.Parameter) -> bool:
    """Whether other processes can have the memory; a device's memory always says so of itself."""
    is_shared = parameter.device.type == "cpu" and parameter.is_shared()  # type: ignore[no-untyped-call]
    return bool(is_shared) and not _is_in_bucket(parameter)


def _used_by_others(trained: Iterable[nn.Parameter], known: Mapping[int, int]) -> list[nn.Parameter]:
    return [
        parameter
        for parameter in trained
        if num_storage_users(parameter) > known[storage_number(parameter)] and not _is_in_bucket(parameter)
    ]


def _spectral_stand_ins(model: nn.Module) -> list[torch.Tensor]:
    """Return what ``torch.nn.utils.spectral_norm`` puts in a weight's place until the first forward pass: its data."""
    return [
        stand_in
        for module in model.modules()
        for name, _ in module.named_parameters(recurse=False)
        if name.endswith("_orig") and isinstance(stand_in := vars(module).get(name.removesuffix("_orig")), torch.Tensor)
    ]


def _tell_user(model: nn.Module, parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    name, number = names[parameter], storage_number(parameter)
    in_it = [other for other in names if storage_number(other) == number]
    buffers = [key for key, buffer in model.named_buffers() if _is_dense(buffer) and storage_number(buffer) == number]
    num_bytes, own_bytes = parameter.untyped_storage().nbytes(), parameter.nbytes
    if buffers:
        what = f"shares its memory with the buffer {buffers[0]!r}"
    elif num_bytes > own_bytes:
        what = f"is a part ({own_bytes} bytes) of a larger storage ({num_bytes} bytes), to which something else refers"
    else:
        what = "shares its memory with another tensor"
    others = [names[other] for other in in_it if other is not parameter]
    beside = f", beside parameter {others[0]!r}" if others else ""
    return (
        f"Parameter {name!r} {what}{beside}: a p.data, p.detach(), NumPy array, state_dict(), loop variable or output "
        f"of a forward pass that is kept. {_REMEDY}, or del what shares it, keep a clone() of it, or take it after "
        "distribute()"
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) is torch.Tensor
