"""Ranks that were equal must stay so: parameters and hyper-parameters are compared bit for bit, now and then.

A rank that skips a ``step()``, has another learning rate, or writes into parameters trains a model of its own, and
nothing fails; with ``Sharded`` each shard would follow its owner's learning rate. Therefore every ``check_every``
synchronised backward passes each rank tells three checksums, of what is trained, of the model's other parameters
(frozen, or in no optimizer) and of its hyper-parameters, in one small sum. Only if they differ is more told, so that an
error on every rank can name who differs, and where. What goes wrong after one check is told at the next, at the latest.
Buffers are made rank 0's in every step, whatever was written there, and so cannot drift.

Passes are counted, not steps: a rank that skips a step makes every pass, so that all ranks come to the same check. It
comes before the first gradient of a pass, when the parameters of the last step are final.

A checksum of parameters is CRC-32 and Adler-32 of their bytes: 64 bits, which tell apart what happens by accident, at
the rate of memory.

All ranks must train the same model from the same values: checked, and then made so, when training is set up.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from numbers import Real
from typing import Any

import torch
from isal import isal_zlib
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.outside_gradients import all_trained
from syncline.pytorch.sync_batch_norm import find_layers
from syncline.tensors.memory import bytes_of, pack, unpack, wide
from syncline.updates.bucket import Bucket, placed
from syncline.updates.control import ControlStream
from syncline.updates.inner import options_of
from syncline.updates.rule import Updater

DEFAULT_EVERY = 100
PACKED_BYTES = 4 << 20
"""Smaller tensors go together in messages of about this size."""
SAME_MODEL = "Build the model in the same way on every rank"
SAME_OPTIONS = (
    "Each rank must have the same hyper-parameters: let the same scheduler set them, from values that all have"
)
SAME_STEPS = (
    "Each rank must call step() after the same backward passes, and write into parameters as all others do. "
    "(Processors of different kinds may round differently: then use Sharded(), where each element is stepped on "
    "one rank, or check_every=None)"
)
SAME_OTHERS = (
    "No optimizer that was given to distribute() has these parameters: distribute() the model once more, with one that "
    "has them, or write into them as all other ranks do"
)


def describe_hyperparameters(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a line for each hyper-parameter of each group; equal values give equal lines on every rank."""
    return [
        f"{name} of parameter group {number} is {_spell(value)}"
        for number, group in enumerate(optimizer.param_groups)
        for name, value in options_of(group).items()
    ]


class Consistency:
    """Compares parameters and hyper-parameters of all ranks after every ``every`` passes; None or 0 is never."""

    def __init__(self, model: nn.Module, updater: Updater, *, every: int | None) -> None:
        self._model = model
        self._updater = updater
        has_equal_ranks = updater.is_synchronous and not updater.collectives.control.is_alone
        self._every = (every or 0) if has_equal_ranks else 0
        self._num_passes = 0

    def begin_pass(self, *, is_joining: bool = False) -> None:
        """Count a synchronised backward pass that begins; compare, if it is time, and raise what differs.

        Ranks that join follow the hyper-parameters of others step by step: then parameters alone are compared.
        """
        if not self._every:
            return
        if self._num_passes and self._num_passes % self._every == 0:
            self.check(has_options=not is_joining)
        self._num_passes += 1

    def check(self, *, has_options: bool = True) -> None:
        """Raise :class:`UpdateError` on every rank if ranks differ; every rank calls this."""
        updater, control = self._updater, self._updater.collectives.control
        updater.synchronize()
        hyperparameters = describe_hyperparameters(updater.optimizer) if has_options else []
        others = self._others()
        own = [
            _checksum_of_lines(hyperparameters),
            _checksum_of_lines([str(_checksum(bucket.parameters)) for bucket in updater.buckets]),
            _checksum_of_lines([str(_checksum(pack([tensor]))) for tensor in others.values()]),
        ]

        def make() -> torch.Tensor:
            table = torch.zeros(control.world_size, len(own), dtype=torch.int64)
            table[control.rank] = torch.tensor(own)
            return table

        sums = control.sum_of(make, f"checksums of parameters before backward pass {self._num_passes + 1}")
        differ = (sums != sums[0]).any(dim=0)
        head = f"The ranks differ after {self._num_passes} synchronised backward passes"
        if bool(differ[0]):
            check_agreement(hyperparameters, control, head=head, remedy=SAME_OPTIONS)
        if bool(differ.any()):
            own_slots = [
                (slot.name, bucket.parameters[slot.start : slot.stop]) for bucket, slot, _ in placed(updater.buckets)
            ]
            lines = [*_describe_values(own_slots), *_describe_values(others.items())]
            check_agreement(lines, control, head=head, remedy=SAME_STEPS if bool(differ[1]) else SAME_OTHERS)

    def _others(self) -> dict[str, torch.Tensor]:
        """Return what the model has beside what is in buckets; another training compares what it trains itself."""
        trained = all_trained() | {tensor for bucket in self._updater.buckets for tensor in bucket.tensors}
        return {name: one for name, one in self._model.named_parameters() if one not in trained and one.numel()}


def _checksum_of_lines(lines: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big", signed=True)


def _checksum(flat: torch.Tensor) -> int:
    """Return 64 bits of all bytes of ``flat``, wherever it lies."""
    content = bytes_of(flat.detach().cpu())
    return isal_zlib.crc32(content) << 32 | isal_zlib.adler32(content)


def _describe_values(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    for name, tensor in named:
        flat = tensor.detach().flatten()
        norm = float(torch.linalg.vector_norm(flat.to(wide(flat.dtype))))
        yield f"parameter {name}: norm {norm!r}, checksum {_checksum(pack([flat])):016x}"


def _spell(value: Any) -> str:
    """Return equal text for equal values; of objects that have no value, such as functions, their type alone."""
    if isinstance(value, torch.Tensor):
        return _spell(value.tolist())
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_spell(one) for one in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_spell(one)}' for key, one in value.items())}}}"
    return f"a {type(value).__qualname__}"


def describe_model(model: nn.Module, optimizer: torch.optim.Optimizer, rule: object, priorities: object) -> list[str]:
    """Say in lines what every rank must have alike beside the optimizer's hyper-parameters."""
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


def check_agreement(
    lines: Sequence[str],
    control: ControlStream,
    *,
    head: str,
    remedy: str = SAME_MODEL,
    ranks: Sequence[int] | None = None,
) -> None:
    """Raise :class:`UpdateError` on every rank if their lines differ; the error names who has others than most.

    It begins with ``head`` and ends with ``remedy``; ``ranks`` are the job's numbers of the ranks, if these are not
    all.
    """
    names = range(control.world_size) if ranks is None else ranks
    digests = control.all_gather(hashlib.sha256("\n".join(lines).encode()).hexdigest(), "digest of the model")
    common, number = Counter(digests).most_common(1)[0]  # of several, the one of the lowest rank
    if number == len(digests):
        return
    most = digests.index(common)
    of_most = control.all_gather(list(lines) if control.rank == most else [], "description of the model")[most]
    differences = control.all_gather(_difference(of_most, lines, names[most]), "difference of the model")
    found = [f"rank {rank}: {text}" for rank, text in zip(names, differences, strict=True) if text]
    raise UpdateError(f"{head}: {'; '.join(found)}. {remedy}")


def broadcast_model(model: nn.Module, buckets: Iterable[Bucket], control: ControlStream) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    bucketed = dict.fromkeys(tensor for bucket in buckets for tensor in bucket.tensors)
    others = [parameter for parameter in model.parameters() if parameter not in bucketed]
    broadcast_tensors([*bucketed, *others, *model.buffers()], control)


def broadcast_tensors(tensors: Sequence[torch.Tensor], control: ControlStream) -> None:
    """Give the first rank's tensors to all: as they lie, where that goes, else packed; the next while one is sent."""
    under_way: list[tuple[Any, torch.Tensor | None, Sequence[torch.Tensor]]] = []
    for batch in _batches(tensors):
        (tensor, *others) = batch
        is_sent_itself = not others and tensor.device.type == "cpu" and tensor.is_contiguous()
        sent = tensor.detach() if is_sent_itself else pack(batch)
        work = control.start_broadcast(sent, "tensors of the model")
        under_way.append((work, None if is_sent_itself else sent, batch))
        while len(under_way) > 2:
            _end(*under_way.pop(0), takes=control.rank != 0)
    for entry in under_way:
        _end(*entry, takes=control.rank != 0)


def _end(work: Any, packed: torch.Tensor | None, batch: Sequence[torch.Tensor], *, takes: bool) -> None:
    work.wait()
    if takes and packed is not None:
        unpack(packed, batch)


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors, small ones together; those of no elements are left out."""
    batch: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if batch and num_bytes + tensor.nbytes > PACKED_BYTES:
            yield batch
            batch, num_bytes = [], 0
        if tensor.numel():
            batch.append(tensor)
            num_bytes += tensor.nbytes
    if batch:
        yield batch


def _difference(of_most: Sequence[str], mine: Sequence[str], most: int) -> str:
    lines = zip_longest(of_most, mine, fillvalue="nothing more")
    unequal = [f"it has {own!r}, rank {most} has {theirs!r}" for theirs, own in lines if theirs != own]
    more = f" (the first of {len(unequal)} differences)" if len(unequal) > 1 else ""
    return f"{unequal[0]}{more}" if unequal else ""
