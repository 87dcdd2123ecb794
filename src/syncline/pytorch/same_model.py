"""All ranks must train the same model from the same values: checked, and then made so, when training is set up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.consistency import describe_hyperparameters
from syncline.pytorch.packing import pack, unpack
from syncline.pytorch.sync_batch_norm import find_layers
from syncline.updates.bucket import Bucket
from syncline.updates.control import ControlStream


def describe(model: nn.Module, optimizer: torch.optim.Optimizer, rule: object, priorities: object) -> list[str]:
    """Say in lines what every rank must have alike."""
    return [*describe_model(model, optimizer, rule, priorities), *describe_hyperparameters(optimizer)]


def describe_model(model: nn.Module, optimizer: torch.optim.Optimizer, rule: object, priorities: object) -> list[str]:
    """Say all of it but the optimizer's hyper-parameters."""
    groups = {parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    lines = [
        f"update rule {rule!r}",
        f"{priorities!r}",
        f"optimizer {type(optimizer).__name__} of {len(groups)} parameters",
    ]
    for name, parameter in model.named_parameters():
        trained = f"group {groups[parameter]}" if parameter in groups else "not in the optimizer"
        frozen = "" if parameter.requires_grad else ", frozen"
        lines.append(f"parameter {name}: {tuple(parameter.shape)} of {parameter.dtype}, {trained}{frozen}")
    lines += [f"module {name}: SyncBatchNorm" for name in find_layers(model)]
    lines += [f"buffer {name}: {tuple(buffer.shape)} of {buffer.dtype}" for name, buffer in model.named_buffers()]
    return lines


WHOLE_CALL = "distribute() with the same model, optimizer, update rule and priorities"


def check_agreement(
    lines: Sequence[str], control: ControlStream, *, call: str = WHOLE_CALL, ranks: Sequence[int] | None = None
) -> None:
    """Raise :class:`UpdateError` on every rank if one describes another model; the error names the difference.

    ``call`` says what must be alike; ``ranks`` are the job's numbers of the ranks, if these are not all.
    """
    names = range(control.world_size) if ranks is None else ranks
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(control.all_gather(digest, "digest of the model"))) == 1:
        return
    of_root = control.all_gather(list(lines) if control.rank == 0 else [], "description of the model")[0]
    differences = control.all_gather(_first_difference(of_root, lines, names[0]), "difference of the model")
    found = [f"rank {rank}: {text}" for rank, text in zip(names, differences, strict=True) if text]
    raise UpdateError(
        f"All ranks must call {call}, but they differ from rank {names[0]}: {'; '.join(found)}. Build the model in the "
        "same way on every rank"
    )


def broadcast_model(model: nn.Module, buckets: Iterable[Bucket], control: ControlStream) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    works = []
    bucketed: set[nn.Parameter] = set()
    for bucket in buckets:
        bucketed.update(bucket.tensors)
        bucket.stage_parameters()
        bucket.wait_staged()
        works.append((bucket, control.start_broadcast(bucket.wire_parameters, f"initial values of {bucket!r}")))
    others = [parameter for parameter in model.parameters() if parameter not in bucketed] + list(model.buffers())
    packed = pack(others)
    control.start_broadcast(packed, "initial values of frozen parameters and buffers").wait()
    unpack(packed, others)
    for bucket, work in works:
        work.wait()
        bucket.unstage_parameters()


def _first_difference(of_root: Sequence[str], mine: Sequence[str], root: int) -> str:
    for theirs, own in zip_longest(of_root, mine, fillvalue="nothing more"):
        if theirs != own:
            return f"it has {own!r}, rank {root} has {theirs!r}"
    return ""
