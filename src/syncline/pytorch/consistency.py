"""Ranks that were equal must stay so: parameters and hyper-parameters are compared bit for bit, now and then.

A rank that skips a ``step()``, has another learning rate, or writes into parameters trains a model of its own, and
nothing fails; with ``Sharded`` each shard would follow its owner's learning rate. Therefore every ``check_every``
synchronised backward passes each rank tells three checksums, of what is trained, of the model's other parameters
(frozen, or in no optimizer) and of its hyper-parameters, in one small sum. Only if they differ is more told, so that an
error on every rank can name who differs, where and by how much. What goes wrong after one check is told at the next, at
the latest. Buffers are made rank 0's in every step, whatever was written there, and so cannot drift.

Passes are counted, not steps: a rank that skips a step makes every pass, so that all ranks come to the same check. It
comes before the first gradient of a pass, when the parameters of the last step are final.

A checksum of parameters is CRC-32 and Adler-32 of their bytes: 64 bits, which tell apart what happens by accident, at
the rate of memory.

All ranks must train the same model from the same values: checked, and then made so, when training is set up.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from syncline.updates.bucket import Bucket
from syncline.updates.control import ControlStream
from syncline.updates.inner import options_of
from syncline.updates.rule import Updater

DEFAULT_EVERY = 100
PACKED_BYTES = 4 << 20
"""Smaller tensors go together in messages of about this size."""
WHOLE_CALL = "distribute() with the same model, optimizer, update rule and priorities"


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
            _checksum_of_buckets(updater.buckets),
            _checksum_of_lines([str(_checksum(pack([tensor]))) for tensor in others.values()]),
        ]

        def make() -> torch.Tensor:
            table = torch.zeros(control.world_size, len(own), dtype=torch.int64)
            table[control.rank] = torch.tensor(own)
            return table

        sums = control.sum_of(make, f"checksums of parameters before backward pass {self._num_passes + 1}")
        if bool((sums == sums[0]).all()):
            return
        parameters = [*_parameters(updater.buckets), *_each(others.items())]
        mine = [hyperparameters, [[checksum, norm] for _, checksum, norm in parameters]]
        told = control.all_gather(mine, "parameters that differ")
        views = [_View(tuple(lines), tuple((one, norm) for one, norm in values)) for lines, values in told]
        names = [name for name, _, _ in parameters]
        raise UpdateError(_explain(views, names, self._num_passes))

    def _others(self) -> dict[str, torch.Tensor]:
        """Return what the model has beside what is in buckets; another training compares what it trains itself."""
        trained = all_trained() | {tensor for bucket in self._updater.buckets for tensor in bucket.tensors}
        return {name: one for name, one in self._model.named_parameters() if one not in trained and one.numel()}


@dataclass(frozen=True, slots=True)
class _View:
    """What one rank has."""

    hyperparameters: tuple[str, ...]
    parameters: tuple[tuple[int, float], ...]
    """Checksum and norm of each."""


def _explain(views: Sequence[_View], names: Sequence[str], num_passes: int) -> str:
    """Say what differs from what most ranks have, and what can be done."""
    common = Counter(views).most_common(1)[0][0]  # of several, the one of the lowest rank
    other = views.index(common)
    found: list[str] = []
    have_equal_options = True
    for rank, view in enumerate(views):
        found += _differences(rank, view, other, common, names)
        have_equal_options = have_equal_options and view.hyperparameters == common.hyperparameters
    remedy = (
        "Each rank must call step() after the same backward passes, and write into parameters as all others do. "
        "(Processors of different kinds may round differently: then use Sharded(), where each element is stepped on "
        "one rank, or check_every=None)"
        if have_equal_options
        else "Each rank must have the same hyper-parameters: let the same scheduler set them, from values that all have"
    )
    return f"The ranks differ after {num_passes} synchronised backward passes: {'; '.join(found)}. {remedy}"


def _differences(rank: int, view: _View, other: int, common: _View, names: Sequence[str]) -> Iterator[str]:
    missing = "there is no such hyper-parameter"
    count = max(len(view.hyperparameters), len(common.hyperparameters))
    lines, others = ([*one.hyperparameters, *[missing] * count][:count] for one in (view, common))
    for mine, theirs in zip(lines, others, strict=True):
        if mine != theirs:
            yield f"on rank {rank} {mine}, but on rank {other} {theirs}"
    unequal = [place for place in range(len(names)) if view.parameters[place][0] != common.parameters[place][0]]
    if unequal:
        first = unequal[0]
        more = f" (and of {len(unequal) - 1} more)" if len(unequal) > 1 else ""
        yield (
            f"the values of parameter {names[first]!r}{more} on rank {rank} are not those on rank {other}: their norms "
            f"are {view.parameters[first][1]!r} and {common.parameters[first][1]!r}"
        )


def _checksum_of_lines(lines: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big", signed=True)


def _checksum_of_buckets(buckets: Sequence[Bucket]) -> int:
    return _checksum_of_lines([str(_checksum(bucket.parameters)) for bucket in buckets])


def _checksum(flat: torch.Tensor) -> int:
    """Return 64 bits of all bytes of ``flat``, wherever it lies."""
    content = bytes_of(flat.detach().cpu())
    return isal_zlib.crc32(content) << 32 | isal_zlib.adler32(content)


def _parameters(buckets: Sequence[Bucket]) -> Iterator[tuple[str, int, float]]:
    """Yield name, checksum and norm of each parameter."""
    for bucket in buckets:
        slots = bucket.plan.slots
        yield from _each((slot.name, bucket.parameters[slot.start : slot.stop]) for slot in slots)


def _each(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, int, float]]:
    for name, tensor in named:
        flat = tensor.detach().flatten()
        norm = float(torch.linalg.vector_norm(flat.to(wide(flat.dtype))))
        yield name, _checksum(pack([flat])), norm if math.isfinite(norm) else math.inf


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
    bucketed = dict.fromkeys(tensor for bucket in buckets for tensor in bucket.tensors)
    others = [parameter for parameter in model.parameters() if parameter not in bucketed]
    broadcast_tensors([*bucketed, *others, *model.buffers()], control)


def broadcast_tensors(tensors: Sequence[torch.Tensor], control: ControlStream) -> None:
    """Give the first rank's tensors to all: as they lie, where that goes, else packed; the next while one is sent."""
    under_way: list[tuple[Any, torch.Tensor | None, Sequence[torch.Tensor]]] = []
    for batch in _batches(tensors):
        (tensor, *others) = batch
        if not others and tensor.device.type == "cpu" and tensor.is_contiguous():
            under_way.append((control.start_broadcast(tensor.detach(), "a tensor of the model"), None, batch))
        else:
            packed = pack(batch)
            under_way.append((control.start_broadcast(packed, "tensors of the model"), packed, batch))
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


def _first_difference(of_root: Sequence[str], mine: Sequence[str], root: int) -> str:
    for theirs, own in zip_longest(of_root, mine, fillvalue="nothing more"):
        if theirs != own:
            return f"it has {own!r}, rank {root} has {theirs!r}"
    return ""
