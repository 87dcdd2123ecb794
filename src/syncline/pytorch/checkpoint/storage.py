"""Tensors and values on disk, written and read by ``torch.distributed.checkpoint`` (DCP) without a process group.

Every rank writes its own chunks into its own file. What DCP's coordinator would learn by exchanging pickled plans, the
ranks exchange as JSON; it also is what a checkpoint is read by, so that reading one unpickles nothing but plain values.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from syncline.errors import CheckpointError
from syncline.pytorch.checkpoint.folder import DCP_INDEX, MANIFEST
from syncline.pytorch.checkpoint.manifest import ChunkRecord, ValueRecord
from syncline.pytorch.checkpoint.state import Chunk, SavedState
from syncline.updates.private_torch import CHECKPOINT_INDEX_NAMES, checkpoint_place
from syncline.updates.state import dtype_of

SAVE_ID = "syncline"
"""In DCP's index it says who wrote it: our own manifest must lie beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable:
    """What a checkpoint has, and where.

    Raises :class:`CheckpointError` unless chunks cover each tensor exactly once, and each lies in a file of ``folder``
    where nothing else lies.
    """

    folder: Path
    tensors: Mapping[str, TensorStorageMetadata]
    places: Mapping[MetadataIndex, Any]

    def __post_init__(self) -> None:
        """Check what it says against itself, and against the files."""
        try:
            for name, stored in self.tensors.items():
                _check_cover(name, stored)
            _check_places(self.folder, self.places)
        except CheckpointError as error:
            raise CheckpointError(f"The checkpoint {self.folder} is damaged: {error}; use the previous one") from error

    @classmethod
    def of_records(cls, folder: Path, records: Sequence[ValueRecord]) -> ChunkTable:
        """Make the table of what ranks have written."""
        places = {
            MetadataIndex(record.name, record.offset if isinstance(record, ChunkRecord) else None): checkpoint_place(
                record.file, start=record.start, length=record.length
            )
            for record in records
        }
        return cls(folder=folder, tensors=_tensors(records), places=places)

    @property
    def values(self) -> list[str]:
        """The names of what is no tensor."""
        return [index.fqn for index in self.places if index.fqn not in self.tensors]

    def read(self, wanted: Sequence[Chunk]) -> None:
        """Fill the tensors of ``wanted`` from whatever chunks there are of them."""
        items: list[ReadItem] = []
        for chunk in wanted:
            stored = self.tensors.get(chunk.name)
            if stored is None or tuple(stored.size) != chunk.size or stored.properties.dtype != chunk.tensor.dtype:
                found = f"{tuple(stored.size)} of {stored.properties.dtype}" if stored else "nothing"
                raise CheckpointError(
                    f"The checkpoint {self.folder} has {found} for {chunk.name!r}, but the model needs {chunk.size} of "
                    f"{chunk.tensor.dtype}; load it into the model that it was made from"
                )
            items += create_read_items_for_chunk_list(chunk.name, stored, [_place_of(chunk)])
        self._read(LoadPlan(items), _Reading({_index_of(chunk): chunk.tensor.detach() for chunk in wanted}))

    def read_whole(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what is stored under ``names``: tensors, and plain values; nothing else is unpickled."""
        stored = {name: self.tensors[name] for name in names if name in self.tensors}
        tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in stored.items()}
        self.read([Chunk.whole(name, tensor) for name, tensor in tensors.items()])
        rest = [name for name in names if name not in tensors]
        values = _Reading({})
        self._read(create_default_local_load_plan(dict.fromkeys(rest), _values_index(rest)), values)
        return tensors | values.found

    def _read(self, plan: LoadPlan, planner: _Reading) -> None:
        reader = FileSystemReader(self.folder)
        metadata = Metadata(state_dict_metadata={}, storage_data=self.places)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        try:
            reader.read_data(plan, planner).wait()
        except OSError:
            raise
        except Exception as error:  # what is stored may be anything, also a pickle that raises what it likes
            raise CheckpointError(
                f"The checkpoint {self.folder} is damaged: what is stored is not what its index says: {error}"
            ) from error


def write_chunks(folder: Path, state: SavedState, *, rank: int) -> list[dict[str, Any]]:
    """Write what this rank has to ``folder`` and to the disk; return a record of each, as JSON has it."""
    if not state.chunks and not state.values:
        return []
    writer = _writer(folder)
    items = [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in state.values]
    items += [
        WriteItem(
            index=_index_of(chunk),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_place_of(chunk),
                properties=TensorProperties(dtype=chunk.tensor.dtype),
                size=torch.Size(chunk.size),
            ),
        )
        for chunk in state.chunks
    ]
    # a plan's place in the list is the rank that the writer names its file after
    plans = [*(SavePlan([]) for _ in range(rank)), SavePlan(items)]
    results = writer.write_data(writer.prepare_global_plan(plans)[rank], _Writing(state)).wait()
    by_index = {_index_of(chunk): chunk for chunk in state.chunks}
    return [_record(by_index.get(result.index), result) for result in results]


def write_index(folder: Path, records: Sequence[ValueRecord]) -> None:
    """Write the index that makes ``folder`` a checkpoint for DCP itself, too.

    Raises :class:`CheckpointError` if the records do not tell of whole tensors.
    """
    table = ChunkTable.of_records(folder, records)
    metadata = _values_index(table.values)
    metadata.state_dict_metadata.update(table.tensors)
    metadata.planner_data = {name: _path_of(name) for name in metadata.state_dict_metadata}
    results = [
        WriteResult(index=index, size_in_bytes=place.length, storage_data=place)
        for index, place in table.places.items()
    ]
    _writer(folder).finish(metadata, [results])


def _check_cover(name: str, stored: TensorStorageMetadata) -> None:
    """Raise unless the chunks of a tensor cover each of its elements once: as many elements, and no two overlap."""
    size = np.array(stored.size, dtype=np.int64).reshape(1, -1)
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks if chunk.sizes.numel()]
    starts = np.array([offset for offset, _ in boxes], dtype=np.int64).reshape(len(boxes), size.shape[1])
    stops = starts + np.array([sizes for _, sizes in boxes], dtype=np.int64).reshape(starts.shape)
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(stored.size):
        raise CheckpointError(f"{name!r} has {covered} of {math.prod(stored.size)} elements")
    is_within = bool(((starts >= 0) & (stops <= size)).all())
    for number in range(len(boxes) - 1):
        meets = (starts[number] < stops[number + 1 :]) & (starts[number + 1 :] < stops[number])
        is_within = is_within and not meets.all(axis=1).any()
    if not is_within:
        raise CheckpointError(f"chunks of {name!r} overlap, or reach beyond it")


def _check_places(folder: Path, places: Mapping[MetadataIndex, Any]) -> None:
    """Raise unless everything lies within a file of the folder, by itself."""
    sizes: dict[str, int] = {}
    last_name, last_stop = "", 0
    for place in sorted(places.values(), key=lambda place: (place.relative_path, place.offset)):
        name, start, stop = place.relative_path, place.offset, place.offset + place.length
        if name not in sizes:
            path = (folder / name).resolve()
            if path.parent != folder.resolve() or not path.is_file():
                raise CheckpointError(f"{name!r} is no file in it")
            sizes[name] = path.stat().st_size
        if not (0 <= start <= stop <= sizes[name]):
            raise CheckpointError(f"bytes {start} to {stop} of {name!r} are meant, which has {sizes[name]}")
        if name == last_name and start < last_stop:
            raise CheckpointError(f"two things are said to lie at byte {start} of {name!r}")
        last_name, last_stop = name, stop


class _Writing(DefaultSavePlanner):
    """Gives the writer the data of each chunk and value."""

    def __init__(self, state: SavedState) -> None:
        super().__init__()
        self._data = {MetadataIndex(name): value for name, value in state.values.items()}
        self._data |= {_index_of(chunk): chunk.tensor.detach() for chunk in state.chunks}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the chunk's elements, or the value, which DCP brings in torch's format."""
        data = self._data[index]
        return data.contiguous() if isinstance(data, torch.Tensor) else data


class _Reading(DefaultLoadPlanner):
    """Shows the reader where elements go, and takes values: plain ones alone, where DCP would unpickle anything."""

    def __init__(self, targets: Mapping[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.found: dict[str, Any] = {}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the target, of which DCP takes the part that is read now."""
        return self._targets[index]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a plain value."""
        self.found[read_item.storage_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def _writer(folder: Path) -> FileSystemWriter:
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    writer.save_id = SAVE_ID
    return writer


def _record(chunk: Chunk | None, result: WriteResult) -> dict[str, Any]:
    storage = result.storage_data
    place = {"file": storage.relative_path, "start": storage.offset, "length": storage.length}
    if chunk is None:
        return {"name": result.index.fqn, **place}
    return {
        "name": chunk.name,
        "dtype": str(chunk.tensor.dtype),
        "size": list(chunk.size),
        "offset": list(chunk.offset),
        "sizes": list(chunk.tensor.shape),
        **place,
    }


def _index_of(chunk: Chunk) -> MetadataIndex:
    return MetadataIndex(chunk.name, chunk.offset)


def _place_of(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.tensor.shape))


def _values_index(names: Sequence[str]) -> Metadata:
    """Return an index that has values by these names, which are no tensors."""
    return Metadata(state_dict_metadata={name: BytesStorageMetadata() for name in names})


def _path_of(name: str) -> tuple[str | int, ...]:
    """Return where a name of ours lies in the nested dictionaries that PyTorch's own functions make."""
    first, _, rest = name.partition(".")
    second, _, last = rest.partition(".")
    if (first, second) == ("optimizer", "state"):
        parameter, _, key = last.rpartition(".")
        return first, second, parameter, key
    if (first, second) == ("optimizer", "param_groups"):
        number, _, key = last.partition(".")
        return first, second, int(number), key
    return first, rest


def _tensors(records: Sequence[ValueRecord]) -> dict[str, TensorStorageMetadata]:
    tensors: dict[str, TensorStorageMetadata] = {}
    for record in records:
        if not isinstance(record, ChunkRecord):
            continue
        dtype, size = dtype_of(record.dtype), torch.Size(record.size)
        stored = tensors.setdefault(record.name, TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks=[]))
        if (stored.properties.dtype, stored.size) != (dtype, size):
            raise CheckpointError(f"Chunks of {record.name!r} in the checkpoint are of tensors of several kinds")
        stored.chunks.append(ChunkStorageMetadata(torch.Size(record.offset), torch.Size(record.sizes)))
    return tensors


class _IndexUnpickler(pickle.Unpickler):
    """Loads the classes of DCP's index, and no other: a pickle can name any function."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that DCP writes."""
        if (module, name) == ("builtins", "getattr"):
            return _member  # so Python 3.11.2, among others, writes a member of an enum
        root = module.partition(".")[0]
        is_known = name in CHECKPOINT_INDEX_NAMES and root in {"torch", "pathlib", "collections"}
        if not is_known and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of DCP has")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """Return the member of an enum; nothing else of anything is got for a pickle."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which no index of DCP does")
    return kind[name]


def read_index(folder: Path) -> ChunkTable:
    """Return what DCP's own index says, a pickle; raises :class:`CheckpointError` if it is none, or no index."""
    try:
        with (folder / DCP_INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
        is_ours = getattr(index.storage_meta, "save_id", None) == SAVE_ID
        tensors = {name: one for name, one in index.state_dict_metadata.items() if hasattr(one, "chunks")}
        places = dict(index.storage_data)
        table = None if is_ours else ChunkTable(folder=folder, tensors=tensors, places=places)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"The index {folder / DCP_INDEX} of torch.distributed.checkpoint cannot be read: {error}"
        ) from error
    if table is None:
        raise CheckpointError(f"The checkpoint {folder} is damaged: {MANIFEST} is missing; use the previous one")
    return table
