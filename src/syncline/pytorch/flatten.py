"""Moves a model's parameters into buckets, in place: names, modules and ``state_dict`` keys stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.shared_storages import check_no_vector, mark_bucket
from syncline.updates.bucket import Bucket, BucketPlan, ParameterEntry, Slot, plan_buckets
from syncline.updates.large_pages import zeros_in_large_pages
from syncline.updates.private_torch import write_count

_NUM_LOOKED_AT = 1000
"""Values of a bucket, about."""

Named = dict[nn.Parameter, tuple[str, int]]


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
    mark_bucket(flat)
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
        check_no_vector({parameter: slot.name for _, slot, parameter in moved})
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
