"""Chunks of tensors on disk, written and read by ``torch.distributed.checkpoint`` (DCP) without a process group.

Every rank writes its own chunks into its own file. What DCP's coordinator would learn by exchanging pickled plans, the
ranks exchange as JSON; it also is what a checkpoint is read by, so that reading one never unpickles anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from syncline.errors import CheckpointError
from syncline.pytorch.optimizer_state import dtype_of
from syncline.updates.private_torch import checkpoint_place


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

    @property
    def index(self) -> MetadataIndex:
        """How DCP refers to it."""
        return MetadataIndex(self.name, self.offset)

    @property
    def place(self) -> ChunkStorageMetadata:
        """Where it lies in its tensor."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.tensor.shape))


Record = dict[str, Any]
"""What JSON says of a chunk: name, dtype, size, offset, sizes, file, start, length."""


def write_chunks(folder: Path, chunks: Sequence[Chunk], *, rank: int) -> list[Record]:
    """Write this rank's chunks to ``folder`` and to the disk; return a record of each."""
    if not chunks:
        return []
    planner = _Chunks(chunks)
    writer = _writer(folder)
    items = [
        WriteItem(
            index=chunk.index,
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk.place,
                properties=TensorProperties(dtype=chunk.tensor.dtype),
                size=torch.Size(chunk.size),
            ),
        )
        for chunk in chunks
    ]
    # a plan's place in the list is the rank that the writer names its file after
    plans = [*(SavePlan([]) for _ in range(rank)), SavePlan(items)]
    results = writer.write_data(writer.prepare_global_plan(plans)[rank], planner).wait()
    return [_record(planner.by_index[result.index], result.storage_data) for result in results]


def write_index(folder: Path, records: Sequence[Record]) -> None:
    """Write the index that makes ``folder`` a checkpoint for DCP itself, too."""
    results = [
        WriteResult(index=MetadataIndex(record["name"], record["offset"]), size_in_bytes=record["length"],
                    storage_data=_storage(record))
        for record in records
    ]  # fmt: skip
    _writer(folder).finish(Metadata(state_dict_metadata=dict(_tensors(records))), [results])


def read_chunks(folder: Path, records: Sequence[Record], wanted: Sequence[Chunk]) -> None:
    """Fill the tensors of ``wanted`` from whatever chunks the checkpoint has of them."""
    tensors = _tensors(records)
    items: list[ReadItem] = []
    targets: dict[MetadataIndex, Chunk] = {}
    for chunk in wanted:
        stored = tensors.get(chunk.name)
        if stored is None or tuple(stored.size) != chunk.size or stored.properties.dtype != chunk.tensor.dtype:
            found = f"{tuple(stored.size)} of {stored.properties.dtype}" if stored else "nothing"
            raise CheckpointError(
                f"The checkpoint {folder} has {found} for {chunk.name!r}, but the model needs {chunk.size} of "
                f"{chunk.tensor.dtype}; load it into the model that it was made from"
            )
        targets[chunk.index] = chunk
        # DCP names the target after the place of the chunk in the list that it is given
        found_items = create_read_items_for_chunk_list(chunk.name, stored, [chunk.place])
        items += [replace(item, dest_index=chunk.index) for item in found_items]
    reader = FileSystemReader(folder)
    storage = {MetadataIndex(record["name"], record["offset"]): _storage(record) for record in records}
    reader.set_up_storage_reader(Metadata(state_dict_metadata={}, storage_data=storage), is_coordinator=False)
    reader.read_data(LoadPlan(items), _Targets(targets)).wait()


def check_complete(records: Sequence[Record]) -> None:
    """Raise :class:`CheckpointError` if the chunks of a tensor do not cover it exactly once, as far as counts tell."""
    for name, stored in _tensors(records).items():
        covered = sum(chunk.sizes.numel() for chunk in stored.chunks)
        if covered != math.prod(stored.size):
            raise CheckpointError(f"{name!r} has {covered} of {math.prod(stored.size)} elements in the checkpoint")


class _Chunks(SavePlanner):
    """Gives the writer the data of each chunk."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.by_index = {chunk.index: chunk for chunk in chunks}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the chunk's elements."""
        return self.by_index[write_item.index].tensor.detach().contiguous()

    def set_up_planner(self, *_: Any, **__: Any) -> NoReturn:
        """Nobody asks: the plan is made already."""
        raise NotImplementedError

    create_local_plan = create_global_plan = finish_plan = set_up_planner


class _Targets(LoadPlanner):
    """Shows the reader where elements go."""

    def __init__(self, targets: Mapping[MetadataIndex, Chunk]) -> None:
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the part of the target that is read now."""
        part = self._targets[read_item.dest_index].tensor.detach()
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dimension, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do: the target itself was written."""

    def set_up_planner(self, *_: Any, **__: Any) -> NoReturn:
        """Nobody asks: the plan is made already."""
        raise NotImplementedError

    create_local_plan = create_global_plan = finish_plan = load_bytes = set_up_planner


def _writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)


def _record(chunk: Chunk, storage: Any) -> Record:
    return {
        "name": chunk.name,
        "dtype": str(chunk.tensor.dtype),
        "size": list(chunk.size),
        "offset": list(chunk.offset),
        "sizes": list(chunk.tensor.shape),
        "file": storage.relative_path,
        "start": storage.offset,
        "length": storage.length,
    }


def _storage(record: Record) -> Any:
    return checkpoint_place(record["file"], start=record["start"], length=record["length"])


def _tensors(records: Sequence[Record]) -> dict[str, TensorStorageMetadata]:
    tensors: dict[str, TensorStorageMetadata] = {}
    for record in records:
        properties = TensorProperties(dtype=dtype_of(record["dtype"]))
        stored = tensors.setdefault(
            record["name"], TensorStorageMetadata(properties, torch.Size(record["size"]), chunks=[])
        )
        stored.chunks.append(ChunkStorageMetadata(torch.Size(record["offset"]), torch.Size(record["sizes"])))
    return tensors
