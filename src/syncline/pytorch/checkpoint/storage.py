"""Tensors and values on disk, written and read by ``torch.distributed.checkpoint`` (DCP) without a process group.

Every rank writes its own chunks into its own file. What DCP's coordinator would learn by exchanging pickled plans, the
ranks exchange as JSON; it also is what a checkpoint is read by, so that reading one unpickles nothing but plain values.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from ctypes import CDLL, c_int64
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache, partial
from io import BufferedReader, BufferedWriter, BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from isal import isal_zlib
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from syncline.errors import CheckpointError
from syncline.pytorch.checkpoint.folder import DCP_INDEX, MANIFEST
from syncline.pytorch.checkpoint.manifest import BLOCK_BYTES, ChunkRecord, ValueRecord, check_sizes, read_manifest
from syncline.pytorch.checkpoint.state import Chunk, SavedState
from syncline.tensors.memory import bytes_of
from syncline.updates.private_torch import CHECKPOINT_INDEX_NAMES, checkpoint_place
from syncline.updates.state import dtype_of

_AHEAD_BYTES = 1 << 22
_start_writing, _WRITE = CDLL(None).sync_file_range, 2  # of Linux, and no function of Python's

Taken = TypeVar("Taken")
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
        with ExitStack() as opened:
            file_of = cache(lambda name: opened.enter_context((self.folder / name).open("rb")))
            for chunk in wanted:
                stored = self.tensors.get(chunk.name)
                if stored is None or tuple(stored.size) != chunk.size or stored.properties.dtype != chunk.tensor.dtype:
                    found = f"{tuple(stored.size)} of {stored.properties.dtype}" if stored else "nothing"
                    raise CheckpointError(
                        f"The checkpoint {self.folder} has {found} for {chunk.name!r}, but the model needs "
                        f"{chunk.size} of {chunk.tensor.dtype}; load it into the model that it was made from"
                    )
                for item in create_read_items_for_chunk_list(chunk.name, stored, [_place_of(chunk)]):
                    target = _part(chunk.tensor.detach(), item.dest_offsets, item.lengths)
                    self._fill(target, item, file_of(self.places[item.storage_index].relative_path))

    def read_whole(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what is stored under ``names``: tensors, and plain values; nothing else is unpickled."""
        stored = {name: self.tensors[name] for name in names if name in self.tensors}
        found: dict[str, Any] = {
            name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in stored.items()
        }
        self.read([Chunk.whole(name, tensor) for name, tensor in found.items()])
        for name in (name for name in names if name not in stored):
            place = self.places[MetadataIndex(name)]
            with (self.folder / place.relative_path).open("rb") as file:
                found[name] = self._load(place, file)
        return found

    def _fill(self, target: torch.Tensor, item: ReadItem, file: BufferedReader) -> None:
        """Read elements to where they belong, or through torch, if it is another that wrote them in another way."""
        place, number = self.places[item.storage_index], item.storage_index.index
        assert number is not None, "torch has told which chunk it is"
        sizes = self.tensors[item.storage_index.fqn].chunks[number].sizes
        is_direct = target.shape == sizes and target.is_cpu and target.is_contiguous() and not target.is_conj()
        chunk = target if is_direct else torch.empty(sizes, dtype=target.dtype, device="cpu")
        head, _ = _envelope(chunk.dtype, sizes)
        file.seek(place.offset)
        is_known = place.length >= len(head) + chunk.nbytes and file.read(len(head)) == head
        if not is_known or file.readinto(bytes_of(chunk)) != chunk.nbytes:
            chunk = self._load(place, file)
            if not isinstance(chunk, torch.Tensor) or (chunk.shape, chunk.dtype) != (sizes, target.dtype):
                raise self._damage(f"there is {chunk!r:.80} and not {tuple(sizes)} of {target.dtype}")
        if chunk is target:
            torch.autograd.graph.increment_version(target)
        else:
            target.copy_(_part(chunk, item.storage_offsets, item.lengths))

    def _load(self, place: Any, file: BufferedReader) -> Any:
        """Return a tensor or a plain value that torch has saved."""
        file.seek(place.offset)
        try:
            return torch.load(BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # what is stored may be anything, also a pickle that raises what it likes
            raise self._damage(error) from error

    def _damage(self, told: object) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint {self.folder} is damaged: what is stored is not what its index says: {told}"
        )


def write_chunks(folder: Path, state: SavedState, *, rank: int) -> dict[str, Any]:
    """Write what this rank has to a file of ``folder`` and to the disk, in one pass over memory.

    Returns, as JSON has it, ``records`` of where each chunk and value lies, and ``files``: size and CRC-32 by name.
    """
    if not state.chunks and not state.values:
        return {"records": [], "files": {}}
    path, records = folder / f"__{rank}_0.distcp", []
    with path.open("wb") as file:
        written = _Written(file)
        for record, parts in _archives(state):
            start = written.num_bytes
            for part in parts:
                written.add(part)
            records.append({**record, "file": path.name, "start": start, "length": written.num_bytes - start})
        file.flush()
        os.fsync(file.fileno())
    return {"records": records, "files": {path.name: [written.num_bytes, written.crc]}}


class _Written:
    """What was written to a file; the disk begins with it at once, where it would else begin with ``fsync()``."""

    def __init__(self, file: BufferedWriter) -> None:
        self.num_bytes = self.crc = 0
        self._file = file
        self._num_started = 0

    def add(self, part: bytes | memoryview) -> None:
        """Write, and check in the same pass, while a block is in the processor's cache."""
        for block in (part[at : at + BLOCK_BYTES] for at in range(0, len(part), BLOCK_BYTES)):
            self.crc = isal_zlib.crc32(block, self.crc)
            self.num_bytes += self._file.write(block)
            ahead = self.num_bytes - self._num_started
            if ahead >= _AHEAD_BYTES:
                _start_writing(self._file.fileno(), c_int64(self._num_started), c_int64(ahead), _WRITE)
                self._num_started = self.num_bytes


def _archives(state: SavedState) -> Iterator[tuple[dict[str, Any], Sequence[bytes | memoryview]]]:
    """Yield what is said of each value and chunk, and the bytes that ``torch.load()`` makes it of again."""
    for name, value in state.values.items():
        data = BytesIO()
        torch.save(value, data)
        yield {"name": name}, [data.getvalue()]
    for chunk in state.chunks:
        tensor = chunk.tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        head, tail = _envelope(tensor.dtype, tensor.shape)
        said = {"name": chunk.name, "dtype": str(tensor.dtype), "size": list(chunk.size)}
        yield {**said, "offset": list(chunk.offset), "sizes": list(tensor.shape)}, [head, bytes_of(tensor), tail]


class _Envelope(BytesIO):
    """What ``torch.save()`` writes before and after the elements of a tensor, which it skips by ``seek()``."""

    place = 0

    def seek(self, _: int, whence: int = os.SEEK_SET) -> int:
        """Note the place of the elements, of which there are none."""
        assert whence == os.SEEK_CUR, "torch skips elements, and nothing else"
        self.place = self.tell()
        return self.place


@lru_cache(maxsize=4096)
def _envelope(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """Return what is before and after the elements where torch has saved such a tensor.

    So elements go from where they are to the file and back: torch would copy them, and compute a checksum of its own,
    which it never compares. What is before them says their number type, shape and order, and is the same whoever saved.
    """
    envelope = _Envelope()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), envelope)  # of which no page is touched
    whole = envelope.getvalue()
    return whole[: envelope.place], whole[envelope.place :]


def write_index(folder: Path, records: Sequence[ValueRecord]) -> None:
    """Write the index that makes ``folder`` a checkpoint for DCP itself, too.

    Raises :class:`CheckpointError` if the records do not tell of whole tensors.
    """
    table = ChunkTable.of_records(folder, records)
    metadata = Metadata(state_dict_metadata=dict.fromkeys(table.values, BytesStorageMetadata()) | dict(table.tensors))
    metadata.planner_data = {name: _path_of(name) for name in metadata.state_dict_metadata}
    results = [
        WriteResult(index=index, size_in_bytes=place.length, storage_data=place)
        for index, place in table.places.items()
    ]
    writer = FileSystemWriter(folder)
    writer.save_id = SAVE_ID
    writer.finish(metadata, [results])


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


def _part(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))]


def _place_of(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.tensor.shape))


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
    """Return what DCP's own index says, a pickle; raises :class:`CheckpointError` if it is none, or no index.

    So it does of what this library wrote, whose own manifest must lie beside.
    """
    return _take_from_index(folder, partial(_table_of, folder))


def is_whole(folder: Path) -> bool:
    """Whether nothing is missing; contents are compared when it is loaded."""
    try:
        if (folder / MANIFEST).is_file():
            check_sizes(folder, read_manifest(folder).files)
        else:
            read_index(folder)
    except CheckpointError:
        return False
    return True


def is_ours(folder: Path) -> bool:
    """Whether DCP's index says that this library wrote it: where our manifest is gone, nothing else tells."""
    with suppress(CheckpointError):
        return _take_from_index(folder, _says_ours)
    return False


def _take_from_index(folder: Path, take: Callable[[Any], Taken]) -> Taken:
    try:
        with (folder / DCP_INDEX).open("rb") as file:
            return take(_IndexUnpickler(file).load())
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"The index {folder / DCP_INDEX} of torch.distributed.checkpoint cannot be read: {error}"
        ) from error


def _says_ours(index: Any) -> bool:
    return getattr(index.storage_meta, "save_id", None) == SAVE_ID


def _table_of(folder: Path, index: Any) -> ChunkTable:
    if _says_ours(index):
        raise CheckpointError(f"The checkpoint {folder} is damaged: {MANIFEST} is missing; use the previous one")
    tensors = {name: one for name, one in index.state_dict_metadata.items() if hasattr(one, "chunks")}
    return ChunkTable(folder=folder, tensors=tensors, places=dict(index.storage_data))
