"""Where stages are while they have no memory: a folder of safetensors files, one for each name.

The files are written and read here, in the published format (8 bytes of header length, a JSON header, the elements), so
that elements go straight between a file and the memory where they are used: no copy, no mapped page, and an error of
the disk is an error here. Any library that knows the format opens them.

A file is written beside the old one and then takes its place, so whoever looks finds one of them whole. Nothing is
forced to the platter: this storage survives the end of a process, not that of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import tempfile
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch

from syncline.errors import StorageError
from syncline.updates.memory import bytes_of

Tensors = Mapping[str, torch.Tensor]

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
SUFFIX = ".safetensors"


class Storage(Protocol):
    """Named sets of tensors outside of memory; called from one thread at a time."""

    @property
    def place(self) -> str:
        """Where it is, for errors."""

    def write(self, name: str, tensors: Tensors, notes: Mapping[str, str]) -> int:
        """Replace what is stored as ``name``; returns the bytes that were written. Raises :class:`StorageError`."""

    def read_into(self, name: str, tensors: Tensors) -> int:
        """Fill ``tensors`` with those that are stored as ``name``; returns the bytes that were read."""

    def read(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return everything that is stored as ``name``, in memory of its own, and its notes."""

    def close(self) -> None:
        """Release it; what the user did not name is removed."""


class Folder:
    """A folder of files. ``path`` is made if need be, and stays; None is a temporary one that :meth:`close` removes."""

    def __init__(self, path: str | Path | None) -> None:
        self._is_temporary = path is None
        try:
            if path is None:
                self._path = Path(tempfile.mkdtemp(prefix="syncline-phased-"))
            else:
                self._path = Path(path)
                self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"The folder {path or tempfile.gettempdir()} cannot be made for stages: {error}"
            ) from error

    def __repr__(self) -> str:
        return f"<Folder {self._path}{' (temporary)' if self._is_temporary else ''}>"

    @property
    def place(self) -> str:
        """The folder."""
        return str(self._path)

    def write(self, name: str, tensors: Tensors, notes: Mapping[str, str]) -> int:
        """Write a file beside the old one, and let it take its place."""
        path = self._file(name)
        beside = path.with_suffix(".new")
        header = _encode_header(tensors, notes)
        num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
        try:
            with FileIO(beside, "wb") as file:
                for memory in (memoryview(header), *map(bytes_of, tensors.values())):
                    _write_all(file, memory)
            beside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise self._write_error(path, num_bytes, error) from error
        return num_bytes

    def read_into(self, name: str, tensors: Tensors) -> int:
        """Read a file into memory that is there."""
        num_bytes = 0
        with self._open(name) as (file, entries, start):
            for key, tensor in tensors.items():
                entry = entries.get(key)
                if (
                    entry is None
                    or _DTYPES.get(entry["dtype"]) is not tensor.dtype
                    or entry["shape"] != [*tensor.shape]
                ):
                    found = "nothing" if entry is None else f"{entry['dtype']} of shape {entry['shape']}"
                    raise StorageError(
                        f"{self._file(name)} should hold {key!r} as {tensor.dtype} of shape {[*tensor.shape]}, not "
                        f"{found}; it belongs to another model"
                    )
                file.seek(start + entry["data_offsets"][0])
                _read_all(file, bytes_of(tensor))
                num_bytes += tensor.nbytes
        return num_bytes

    def read(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Read a whole file."""
        found: dict[str, torch.Tensor] = {}
        with self._open(name) as (file, entries, start):
            notes = entries.pop("__metadata__", {})
            for key, entry in entries.items():
                found[key] = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
                file.seek(start + entry["data_offsets"][0])
                _read_all(file, bytes_of(found[key]))
        return found, notes

    def close(self) -> None:
        """Remove the folder, if it is a temporary one."""
        if self._is_temporary:
            shutil.rmtree(self._path, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self._path / (name + SUFFIX)

    @contextlib.contextmanager
    def _open(self, name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - a file, its entries, where elements begin
        path = self._file(name)
        try:
            with FileIO(path, "rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                length = min(length, _MAX_HEADER_BYTES)  # of garbage no more is read than of the longest header
                yield file, json.loads(file.read(length)), _LENGTH_BYTES + length
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(
                f"{path} cannot be read: {error}; a running job's storage must not be changed or removed by others"
            ) from error

    def _write_error(self, path: Path, num_bytes: int, error: OSError) -> StorageError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(self._path).free
            return StorageError(
                f"The storage is full: {path} takes {num_bytes} bytes and as many again while it is replaced, but "
                f"{free} are free ({error.strerror}); make room, or name another folder with storage=..."
            )
        return StorageError(f"{path} cannot be written ({num_bytes} bytes): {error}")


def _encode_header(tensors: Tensors, notes: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(notes)}
    start = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise StorageError(f"{name!r} is of {tensor.dtype}, which the file format does not know; convert it")
        stop = start + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _write_all(file: FileIO, memory: memoryview) -> None:
    while memory:
        memory = memory[file.write(memory) or 0 :]


def _read_all(file: FileIO, memory: memoryview) -> None:
    while memory:
        count = file.readinto(memory)
        if not count:
            raise ValueError(f"{len(memory)} bytes are missing at its end")
        memory = memory[count:]
