"""Moves a model's parameters into buckets, in place: names, modules and ``state_dict`` keys stay as they are.

Before that it is found out which parameters share memory with others: a bucket would cut them off from those, and those
from it. PyTorch counts who uses a storage, not who it is. So whoever is neither a parameter nor known to be PyTorch's
own counts as a user's.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from syncline.errors import UpdateError
from syncline.tensors.memory import zeros_in_large_pages
from syncline.updates.bucket import Bucket, BucketPlan, ParameterEntry, Slot, plan_buckets
from syncline.updates.private_torch import num_storage_users, storage_number, write_count

_NUM_LOOKED_AT = 1000
"""Values of a bucket, about."""

Named = dict[nn.Parameter, tuple[str, int]]
_REMEDY = (
    "distribute() moves parameters into buckets, so what shares their memory would be cut off; give the parameters "
    "memory of their own first (p.data = p.data.clone())"
)


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    """Return name and parameter group of each parameter that the optimizer trains, in forward order.

    Tied parameters appear once. Parameters that only the optimizer knows come last, as ``optimizer.GROUP.INDEX``.
    """
    groups: Named = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            groups[parameter] = (f"optimizer.{number}.{index}", number)
    named: Named = {}
    for name, parameter in model.named_parameters():
        if parameter in groups:
            named[parameter] = (name, groups[parameter][1])
    if groups and not named:
        raise UpdateError(
            f"The optimizer has {len(groups)} parameters, but none of this {type(model).__name__}; give distribute() "
            "the model whose parameters the optimizer was made with"
        )
    for parameter, place in groups.items():
        named.setdefault(parameter, place)
    return {parameter: place for parameter, place in named.items() if parameter.requires_grad and parameter.numel()}


def check_shapes(model: nn.Module, where: str = "") -> None:
    """Raise :class:`UpdateError` for parameters that have no shape yet, and buffers that ranks could not be given."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UpdateError(f"{name!r}{where} has no shape yet; call the module with a batch first")
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise UpdateError(
                f"Buffer {name!r}{where} is {buffer.layout}, and only dense ones are made equal on all ranks; keep it "
                "as a plain attribute of the module, or register its indices and values as buffers"
            )
        if any(size > 1 and not stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            raise UpdateError(
                f"Several elements of buffer {name!r}{where} lie in the same memory, as expand() leaves them, so it "
                "cannot be given the values of rank 0; register a clone() of it"
            )


def check_parameters(named: Named) -> None:
    """Raise :class:`UpdateError` for parameters that cannot lie in a bucket."""
    if not named:
        raise UpdateError("The optimizer has no parameter that requires a gradient, so there is nothing to distribute")
    for parameter, (name, _) in named.items():
        if parameter.layout is not torch.strided or type(parameter.data) is not torch.Tensor:
            raise UpdateError(
                f"Parameter {name!r} is a {type(parameter.data).__name__} of layout {parameter.layout}; only dense "
                "tensors can be put into buckets"
            )
        if parameter.is_meta:
            raise UpdateError(f"Parameter {name!r} is on the meta device; call model.to_empty(...) and initialise it")


def plan_model(named: Named, *, bucket_bytes: int) -> tuple[BucketPlan, ...]:
    """Plan the buckets of a model; the parameters stay where they are."""
    entries = [
        ParameterEntry(
            name=name,
            group=group,
            shape=tuple(parameter.shape),
            stride=_dense_stride(parameter),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        for parameter, (name, group) in named.items()
    ]
    return plan_buckets(entries, bucket_bytes=bucket_bytes)


def flatten(named: Named, plans: tuple[BucketPlan, ...]) -> tuple[Bucket, ...]:
    """Allocate the buckets and make each parameter's data a view of its place there.

    A bucket of parameters of which one was in a bucket in shared memory (``model.share_memory()``) is there too.
    """
    parameters = list(named)
    places = zip(plans, _allocate(plans), _allocate(plans), strict=True)
    return tuple(
        _fill(plan, [parameters[slot.position] for slot in plan.slots], flat, gradients)
        for plan, flat, gradients in places
    )


def _allocate(plans: Sequence[BucketPlan]) -> Iterator[torch.Tensor]:
    """Return memory for each bucket: zeros, those in host memory one behind the other."""
    sizes = [plan.num_bytes for plan in plans if plan.device.type == "cpu"]
    host = iter(zeros_in_large_pages(sizes) if sizes else ())
    for plan in plans:
        if plan.device.type == "cpu":
            yield next(host).view(plan.dtype)
        else:
            yield torch.zeros(plan.num_elements, dtype=plan.dtype, device=plan.device)


def _fill(plan: BucketPlan, owners: list[nn.Parameter], flat: torch.Tensor, gradients: torch.Tensor) -> Bucket:
    if plan.device.type == "cpu" and any(owner.is_shared() for owner in owners):  # type: ignore[no-untyped-call]
        flat.share_memory_()  # type: ignore[no-untyped-call]
    _mark_bucket(flat)
    for slot, parameter in zip(plan.slots, owners, strict=True):
        view = slot.view(flat)
        view.copy_(parameter.data)
        parameter.data = view
    return Bucket(plan, parameters=flat, gradients=gradients, owners=owners)


def check_in_place(buckets: tuple[Bucket, ...]) -> None:
    """Take values that were assigned to a parameter's ``.data`` into its bucket, where its data lies from then on.

    Raises :class:`UpdateError` if what was assigned does not fit there: another shape, number type or device; or is a
    part of a vector that is kept.
    """
    moved: list[tuple[Bucket, Slot, nn.Parameter]] = []
    for bucket in buckets:
        base = bucket.parameters.data_ptr()
        size = bucket.parameters.element_size()
        for slot, parameter in zip(bucket.plan.slots, bucket.tensors, strict=True):
            if parameter.data_ptr() != base + slot.start * size or parameter.dtype is not bucket.plan.dtype:
                moved.append((bucket, slot, parameter))
    if moved:
        _check_no_vector({parameter: slot.name for _, slot, parameter in moved})
    for place in moved:
        _take_back(*place)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatus:
    """What tells whether parameters are written from now on: PyTorch's counts of writes, and some of the values.

    Writes through ``.data`` or NumPy are not counted; what they change shows where it is looked at.
    """

    counts: tuple[int, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def take(cls, buckets: tuple[Bucket, ...]) -> WriteStatus:
        """Look at the parameters as they are."""
        values = tuple(
            bucket.parameters[:: max(1, len(bucket.parameters) // _NUM_LOOKED_AT)].clone().view(torch.uint8)
            for bucket in buckets
        )
        return cls(counts=tuple(write_count(one) for bucket in buckets for one in bucket.tensors), values=values)

    def is_same_as(self, other: WriteStatus) -> bool:
        """Whether nothing was written in between."""
        return self.counts == other.counts and all(map(torch.equal, self.values, other.values))


def _take_back(bucket: Bucket, slot: Slot, parameter: nn.Parameter) -> None:
    place = slot.view(bucket.parameters)
    given = parameter.data
    if (given.shape, given.dtype, given.device) != (place.shape, place.dtype, place.device):
        raise UpdateError(
            f"The data of parameter {slot.name!r} was replaced after distribute() by a tensor of shape "
            f"{tuple(given.shape)}, {given.dtype}, on {given.device}, where it has shape {tuple(place.shape)}, "
            f"{place.dtype}, on {place.device} (model.to(...), or an assignment to .data); do that before distribute()"
        )
    place.copy_(given)
    parameter.data = place


def _dense_stride(parameter: nn.Parameter) -> tuple[int, ...]:
    """Keep a memory order such as channels_last; what has gaps or overlaps becomes contiguous."""
    return tuple(torch.empty_like(parameter, device="meta").stride())


def _mark_bucket(flat: torch.Tensor) -> None:
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


def _check_no_vector(replaced: Mapping[nn.Parameter, str]) -> None:
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
