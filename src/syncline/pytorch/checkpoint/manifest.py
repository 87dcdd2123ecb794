"""What is said of a checkpoint beside its elements: the schema by which it is written and read, and its checksums.

A checksum tells of damage. It does not tell of an edit by whoever can write the file, who makes it right again: so
nothing here is taken from the file without a look at its kind and its range.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from isal import isal_zlib
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from syncline.errors import CheckpointError, UpdateError
from syncline.pytorch.checkpoint.folder import MANIFEST, previous_folder
from syncline.pytorch.checkpoint.state import STATE_PREFIX
from syncline.updates.state import decode_single, dtype_of

FORMAT = 2
BLOCK_BYTES = 1 << 18
"""What is written, read and checked at once: it stays in the processor's cache in between."""


def _named_dtype(name: str) -> str:
    try:
        dtype_of(name)
    except UpdateError as error:
        raise ValueError(str(error)) from error
    return name


def _plain_file(name: str) -> str:
    if not name or name in {".", ".."} or set(name) & {"/", "\\", "\0"}:
        raise ValueError("a file of a checkpoint lies in its folder itself")
    return name


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Shape = Annotated[list[Count], Field(max_length=64)]
DtypeName = Annotated[str, AfterValidator(_named_dtype)]
FileName = Annotated[str, AfterValidator(_plain_file)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ValueRecord(_Entry):
    """Where a value lies that is no tensor."""

    name: str
    file: FileName
    start: Count
    length: Count


class ChunkRecord(ValueRecord):
    """Where a chunk of a tensor lies: of a tensor of shape ``size``, ``sizes`` elements from ``offset`` on."""

    dtype: DtypeName
    size: Shape
    offset: Shape
    sizes: Shape

    @model_validator(mode="after")
    def _check_place(self) -> ChunkRecord:
        if not len(self.size) == len(self.offset) == len(self.sizes):
            raise ValueError("'size', 'offset' and 'sizes' must have a number for each dimension")
        return self


class SingleEntry(_Entry):
    """A value of the optimizer's state that is one for a whole parameter; ``dtype`` if it is a tensor."""

    dtype: DtypeName | None
    value: Any

    @model_validator(mode="after")
    def _check_value(self) -> SingleEntry:
        try:
            value = decode_single({"dtype": self.dtype, "value": self.value})
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"no tensor of {self.dtype} can be made of it: {error}") from error
        if not (value is None or isinstance(value, torch.Tensor | bool | int | float | str)):
            raise ValueError("it is no number, text or tensor")
        return self


class StateEntries(_Entry):
    """State of one parameter: by key a number type, if it has an element for each of the parameter's, else a value."""

    state: dict[str, DtypeName | Annotated[list[SingleEntry], Field(min_length=1, max_length=1)]]


class OptimizerEntry(_Entry):
    """State by the names of parameters, and the hyper-parameters of each group."""

    state: dict[str, StateEntries]
    groups: list[dict[str, Any]]


def _kind_of(record: Any) -> str:
    return "chunk" if isinstance(record, ChunkRecord) or (isinstance(record, dict) and "dtype" in record) else "value"


RecordEntry = Annotated[
    Annotated[ChunkRecord, Tag("chunk")] | Annotated[ValueRecord, Tag("value")], Discriminator(_kind_of)
]


class CheckpointManifest(_Entry):
    """All that is said of a checkpoint beside its elements; ``files`` has the size and the CRC-32 of each."""

    world_size: Annotated[int, Field(ge=1)]
    iteration: Count
    optimizer: OptimizerEntry | None
    extra: Any
    parts: dict[str, str]
    records: list[RecordEntry]
    files: dict[FileName, Annotated[list[Count], Field(min_length=2, max_length=2)]]

    @model_validator(mode="after")
    def _check_records(self) -> CheckpointManifest:
        parameters = {} if self.optimizer is None else self.optimizer.state
        kinds = {
            f"{STATE_PREFIX}{name}.{key}": kind for name, one in parameters.items() for key, kind in one.state.items()
        }
        for record in self.records:
            if record.file not in self.files:
                raise ValueError(f"{record.name!r} lies in {record.file!r}, which is none of the files")
            if record.name.startswith(STATE_PREFIX):
                kind = kinds.get(record.name)
                dtype = record.dtype if isinstance(record, ChunkRecord) else None
                if kind is None or (isinstance(kind, str) and kind != dtype):
                    raise ValueError(f"{record.name!r} is {dtype} on the disk, and {kind} in the optimizer's state")
        return self


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest to the disk."""
    content = _text_of(manifest.model_dump())
    with (folder / MANIFEST).open("wb") as file:
        file.write(b'{"format": %d, "crc": %d, "content": %b}' % (FORMAT, isal_zlib.crc32(content), content))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest, and check it by its schema; what it says of elements, the table of chunks checks."""
    try:
        outer = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, crc, content = outer["format"], outer["crc"], outer["content"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"The checkpoint {folder} is damaged, its {MANIFEST} is no use: {error}; try {previous_folder(folder)}"
        ) from error
    if version != FORMAT:
        raise CheckpointError(f"The checkpoint {folder} has format {version!r}, this version reads {FORMAT}")
    if crc != isal_zlib.crc32(_text_of(content)):
        raise CheckpointError(f"The checkpoint {folder} is damaged: its {MANIFEST} was changed; use the previous one")
    try:
        return CheckpointManifest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise CheckpointError(
            f"The checkpoint {folder} is damaged: {where} in its {MANIFEST} cannot be {first['input']!r:.80}: "
            f"{first['msg']}; use {previous_folder(folder)}"
        ) from error


def check_sizes(folder: Path, files: Mapping[str, Sequence[int]]) -> None:
    """Check that all files are there, and as long as they were."""
    for name, (size, _) in sorted(files.items()):
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(f"The checkpoint {folder} is damaged: {name} is missing or not {size} bytes long")


def check_files(folder: Path, files: Mapping[str, Sequence[int]], *, part: int, num_parts: int) -> None:
    """Check sizes of all files, and the contents of every ``num_parts``-th from ``part`` on."""
    check_sizes(folder, files)
    for name, (_, crc) in sorted(files.items())[part::num_parts]:
        if _crc(folder / name) != crc:
            raise CheckpointError(f"The checkpoint {folder} is damaged: the contents of {name} have changed")


def _crc(path: Path) -> int:
    crc, buffer = 0, bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            crc = isal_zlib.crc32(memoryview(buffer)[:num_bytes], crc)
    return crc


def _text_of(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()
