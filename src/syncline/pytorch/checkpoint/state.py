"""State as a checkpoint has it: chunks of tensors, other values by name, and states of schedulers as text.

Names, shapes and single values are those of ``torch.distributed.checkpoint.state_dict``, so that programs with FSDP or
DistributedDataParallel read what is written here: ``optimizer.state.NAME.exp_avg`` has the shape of the parameter. A
rank that owns elements 5 to 17 of a matrix in memory order writes them as up to three rectangles.

States of schedulers, samplers and the like are in torch's own format, which keeps what JSON does not (numbers as keys,
tensors), and only plain values are loaded from it: a checkpoint cannot run code.
"""

from __future__ import annotations

import base64
import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from syncline.errors import CheckpointError
from syncline.updates.bucket import Slot
from syncline.updates.state import StateEntry, decode_value

MODEL_PREFIX = "model."
STATE_PREFIX = "optimizer.state."
GROUPS_PREFIX = "optimizer.param_groups."


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of the tensor called ``name`` (of shape ``size``), which begins at ``offset``."""

    name: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Chunk:
        """Make a chunk that is all of its tensor."""
        return cls(name=name, size=tuple(tensor.shape), offset=(0,) * tensor.dim(), tensor=tensor)


Catalogue = dict[str, dict[str, Any]]
"""By parameter's name its "state": for each key a number type (divided into elements), or a list of the one value."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a rectangle of a tensor begins, and its sizes."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a rank writes, by names: chunks of tensors, which are those of the model itself, and what is no tensor."""

    chunks: list[Chunk] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def add_model(
        self, model: nn.Module, alike: Mapping[str, torch.Tensor] | None = None, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """Add a model's ``state_dict``: this rank's even part of what is ``alike`` on all, and on rank 0 all the rest.

        Tensors are cut between rows, so that the sizes of parts differ by a row at most.
        """
        values = model.state_dict()
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{name!r} of the model's state_dict is a {type(value).__name__}; only tensors are saved; use extra"
                )
        # what a hook has put there in a parameter's place may differ
        divided = {name for name, tensor in (alike or {}).items() if _is_same(tensor, values.get(name))}
        num_bytes, seen = sum(values[name].nbytes for name in divided), 0
        for name, value in values.items():
            if name not in divided:
                if rank == 0:
                    self._add(f"{MODEL_PREFIX}{name}", value)
                continue
            edges = (place * num_bytes / world_size - seen for place in (rank, rank + 1))
            self.chunks.extend(_rows_between(f"{MODEL_PREFIX}{name}", value, *edges))
            seen += value.nbytes

    def add_entries(self, entries: Iterable[StateEntry], slots: Mapping[str, Slot]) -> None:
        """Add optimizer state that a rank owns."""
        for entry in entries:
            name = f"{STATE_PREFIX}{entry.parameter}.{entry.key}"
            if entry.start is None:
                self._add(name, entry.value)
            else:
                self.chunks.extend(chunks_of(name, slots[entry.parameter], entry.start, entry.value))

    def add_groups(self, groups: Sequence[Mapping[str, Any]], names: Mapping[torch.Tensor, str]) -> None:
        """Add hyper-parameters as PyTorch's programs look for them."""
        for number, group in enumerate(groups):
            named = {**group, "params": [names[tensor] for tensor in group["params"] if tensor in names]}
            for key, value in named.items():
                if key != "param_names":
                    self._add(f"{GROUPS_PREFIX}{number}.{key}", value)

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.chunks.append(Chunk.whole(name, value))
        else:
            self.values[name] = value


class CheckpointState:
    """Optimizer state of a checkpoint as a source; :attr:`wanted` is what is still to be read from disk."""

    def __init__(self, catalogue: Mapping[str, Mapping[str, Any]], *, prefix: str = STATE_PREFIX) -> None:
        self._catalogue = catalogue
        self._prefix = prefix
        self.wanted: list[Chunk] = []

    def values(self, parameter: str) -> Mapping[str, Any]:
        """Return a parameter's state: a number type for what has one value for each element, else the value."""
        state = self._catalogue[parameter]["state"] if parameter in self._catalogue else {}
        return {key: decode_value(value) for key, value in state.items()}

    def fill(self, slot: Slot, key: str, start: int, target: torch.Tensor) -> None:
        """Note that elements are wanted."""
        if target.numel():
            self.wanted += chunks_of(f"{self._prefix}{slot.name}.{key}", slot, start, target)


def _is_same(tensor: torch.Tensor, value: torch.Tensor | None) -> bool:
    """Whether ``value`` is the tensor itself, of which something is to be written."""
    return (
        value is not None and value.nbytes > 0 and (value.data_ptr(), value.shape) == (tensor.data_ptr(), tensor.shape)
    )


def _rows_between(name: str, value: torch.Tensor, start: float, stop: float) -> Iterator[Chunk]:
    """Yield the rows of a tensor that lie nearest to its bytes from ``start`` to ``stop``, if there are any."""
    rows = value if value.dim() else value[None]
    first, last = (min(max(round(edge * len(rows) / value.nbytes), 0), len(rows)) for edge in (start, stop))
    if last - first == len(rows):
        yield Chunk.whole(name, value)
    elif first < last:
        offset = (first, *(0 for _ in value.shape[1:]))
        yield Chunk(name=name, size=tuple(value.shape), offset=offset, tensor=value[first:last])


def chunks_of(name: str, slot: Slot, start: int, flat: torch.Tensor) -> list[Chunk]:
    """Return elements of a parameter, in memory order from ``start`` on, as chunks of the tensor ``name``."""
    return [
        Chunk(name=name, size=slot.shape, offset=offset, tensor=part) for offset, part in rectangles(slot, start, flat)
    ]


def rectangles(slot: Slot, start: int, flat: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Cut elements of a parameter, in memory order from ``start`` on, into rectangles: where each begins, and a view.

    >>> from syncline.updates.bucket import Slot
    >>> slot = Slot(name="w", position=0, start=0, stop=12, shape=(3, 4), stride=(4, 1))
    >>> [(offset, part.tolist()) for offset, part in rectangles(slot, 2, torch.arange(2, 9))]
    [((0, 2), [[2, 3]]), ((1, 0), [[4, 5, 6, 7]]), ((2, 0), [[8]])]
    """
    order = _order(slot)
    place = [order.index(dimension) for dimension in range(len(order))]
    first = 0
    for offset, sizes in _boxes([slot.shape[dimension] for dimension in order], start, start + flat.numel()):
        last = first + math.prod(sizes)
        part = flat[first:last].view(sizes).permute(place)
        yield tuple(offset[dimension] for dimension in place), part
        first = last


def _boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut the range from ``start`` to ``stop`` of a row-major tensor into rectangles, in their order in memory."""
    if not sizes:
        yield (), ()
        return
    inner = math.prod(sizes[1:])
    row, skipped = divmod(start, inner)
    if skipped:
        end = min(stop, (row + 1) * inner)
        yield from _in_row(sizes, row, skipped, skipped + end - start)
        row, start = row + 1, end
    num_rows = (stop - start) // inner
    if num_rows:
        yield (row, *(0 for _ in sizes[1:])), (num_rows, *sizes[1:])
    rest = (stop - start) % inner
    if rest:
        yield from _in_row(sizes, row + num_rows, 0, rest)


def _in_row(sizes: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for offset, lengths in _boxes(sizes[1:], start, stop):
        yield (row, *offset), (1, *lengths)


def _order(slot: Slot) -> list[int]:
    """Return the dimensions from the slowest to the fastest in memory."""
    return sorted(range(len(slot.shape)), key=lambda dimension: (-slot.stride[dimension], dimension))


class Stateful(Protocol):
    """A scheduler, sampler or the like."""

    def state_dict(self) -> Any:
        """Return all that it needs to go on, in plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from there."""


def encode_parts(parts: Mapping[str, Stateful]) -> dict[str, str]:
    """Return the state of each as text."""
    return {name: _encode(name, part) for name, part in parts.items()}


def load_part(name: str, part: Stateful, text: str) -> None:
    """Let ``part`` go on from the state that is told by a text."""
    try:
        part.load_state_dict(_decode(text))
    except Exception as error:  # a damaged pickle, and a state that does not fit, may raise anything
        raise CheckpointError(
            f"The state of {name}= that was saved cannot be loaded into a {type(part).__name__}: {error}; give the "
            "object that it was saved from, or leave it out"
        ) from error


def _decode(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)


def _encode(name: str, part: Stateful) -> str:
    data = io.BytesIO()
    try:
        torch.save(part.state_dict(), data)
        text = base64.b64encode(data.getvalue()).decode()
        _decode(text)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"The state_dict() of {name}= has more than plain values and tensors, so it could not be loaded again: "
            f"{error}"
        ) from error
    return text
