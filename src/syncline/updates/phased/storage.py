"""Where stages are while they have no memory: safetensors files, one for each name, in a folder or without a name.

The files are written and read here, in the published format (8 bytes of header length, a JSON header, the elements), so
that elements go straight between a file and the memory where they are used: no copy, no mapped page, and an error of
the disk is an error here. Any library that knows the format opens them.

A file is written beside the old one and then takes its place, so whoever looks finds one of them whole. Nothing is
forced to the disk but what :meth:`Folder.sync` names: all else survives the end of the process, and not that of the
machine. Temporary files survive neither: they have no name in the file system, so that the kernel frees them with the
process, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from syncline.errors import StorageError
from syncline.tensors.memory import bytes_of
from syncline.user_folder import temporary_folder

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


class Folder:
    """Named sets of tensors outside of memory: files of a folder, which is made if need be, and stays.

    It is called from one thread at a time, and raises :class:`StorageError`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"The folder {path} cannot be made for stages: {error}") from error

    def __repr__(self) -> str:
        return f"<Folder {self._path}>"

    @property
    def place(self) -> str:
        """The folder, or that of the file system which takes its files, for errors."""
        return str(self._path)

    def write(self, name: str, tensors: Tensors, notes: Mapping[str, str]) -> int:
        """Write a file beside the old one, and let it take its place; return the bytes that were written."""
        path = self._file(name)
        beside = path.with_suffix(".new")
        try:
            with _write_errors(path, self._path, tensors), FileIO(beside, "wb") as file:
                num_bytes = _write_file(file, tensors, notes)
                beside.replace(path)
        except StorageError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        return num_bytes

    def read_into(self, name: str, tensors: Tensors) -> int:
        """Read a file into memory that is there; return the bytes that were read."""
        path = self._file(name)
        with _read_errors(path), self._open(name) as file:
            return _read_file_into(file, path, tensors)

    def read(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Read a whole file, into memory of its own, and its notes."""
        with _read_errors(self._file(name)), self._open(name) as file:
            return _read_file(file)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        path = self._file(name)
        with _write_errors(path, self._path, {}):
            path.unlink(missing_ok=True)

    def sync(self, names: Iterable[str]) -> None:
        """Force files, and their places in the folder, to the disk."""
        for path in (*map(self._file, names), self._path):
            with _write_errors(path, self._path, {}):
                sync_to_disk(path)

    def close(self) -> None:
        """Leave it as it is: the user named it."""

    def _file(self, name: str) -> Path:
        return self._path / (name + SUFFIX)

    def _open(self, name: str) -> FileIO:
        return FileIO(self._file(name), "rb")


class TemporaryFiles(Folder):
    """Files without a name where temporary files go; each takes a file descriptor, and is gone with the process."""

    def __init__(self) -> None:
        super().__init__(temporary_folder())
        self._files: dict[str, FileIO] = {}

    def __repr__(self) -> str:
        return f"<TemporaryFiles: {len(self._files)} in {self._path}>"

    def write(self, name: str, tensors: Tensors, notes: Mapping[str, str]) -> int:
        """Write a file that takes the place of the old one."""
        with _write_errors(self._file(name), self._path, tensors):
            file = _open_nameless(self._path)
            try:
                num_bytes = _write_file(file, tensors, notes)
            except BaseException:
                file.close()
                raise
        self.remove(name)
        self._files[name] = file
        return num_bytes

    def remove(self, name: str) -> None:
        """Free a file."""
        file = self._files.pop(name, None)
        if file is not None:
            file.close()

    def sync(self, names: Iterable[str]) -> None:
        """Do nothing: they end with the process."""

    def close(self) -> None:
        """Free them all."""
        for name in tuple(self._files):
            self.remove(name)

    def _file(self, name: str) -> Path:
        return self._path / f"(temporary) {name}{SUFFIX}"

    def _open(self, name: str) -> FileIO:
        file = self._files.get(name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "it was never written, or the storage is closed")
        file.seek(0)
        return FileIO(file.fileno(), closefd=False)


def sync_to_disk(path: Path) -> None:
    """Return once a file, or a folder's names, outlive the machine's end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_nameless(folder: Path) -> FileIO:
    """Open a new file that no folder lists, for reading and writing."""
    with contextlib.suppress(OSError):  # not every file system can
        return FileIO(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), "w+b")
    descriptor, path = tempfile.mkstemp(dir=folder)
    Path(path).unlink()
    return FileIO(descriptor, "w+b")


def _write_file(file: FileIO, tensors: Tensors, notes: Mapping[str, str]) -> int:
    header = _encode_header(tensors, notes)
    for memory in (memoryview(header), *map(bytes_of, tensors.values())):
        _write_all(file, memory)
    return len(header) + sum(tensor.nbytes for tensor in tensors.values())


def _read_entries(file: FileIO) -> tuple[dict[str, Any], int]:
    """Return the entries of a file's header, and where its elements begin."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    length = min(length, _MAX_HEADER_BYTES)  # of garbage no more is read than of the longest header
    return json.loads(file.read(length)), _LENGTH_BYTES + length


def _read_file_into(file: FileIO, path: Path, tensors: Tensors) -> int:
    entries, start = _read_entries(file)
    for key, tensor in tensors.items():
        entry = entries.get(key)
        if entry is None or _DTYPES.get(entry["dtype"]) is not tensor.dtype or entry["shape"] != [*tensor.shape]:
            found = "nothing" if entry is None else f"{entry['dtype']} of shape {entry['shape']}"
            raise StorageError(
                f"{path} should hold {key!r} as {tensor.dtype} of shape {[*tensor.shape]}, not {found}; it belongs to "
                "another model"
            )
        file.seek(start + entry["data_offsets"][0])
        _read_all(file, bytes_of(tensor))
    return sum(tensor.nbytes for tensor in tensors.values())


def _read_file(file: FileIO) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    found: dict[str, torch.Tensor] = {}
    entries, start = _read_entries(file)
    notes = entries.pop("__metadata__", {})
    for key, entry in entries.items():
        found[key] = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
        file.seek(start + entry["data_offsets"][0])
        _read_all(file, bytes_of(found[key]))
    return found, notes


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise StorageError(
            f"{path} cannot be read: {error}; a running job's storage must not be changed or removed by others"
        ) from error


@contextlib.contextmanager
def _write_errors(path: Path, folder: Path, tensors: Tensors) -> Iterator[None]:
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(folder).free
            raise StorageError(
                f"The storage is full: {path} takes {num_bytes} bytes and as many again while it is replaced, but "
                f"{free} are free ({error.strerror}); make room, or name another folder with storage=..."
            ) from error
        if error.errno == errno.EMFILE:
            raise StorageError(
                f"{path} cannot be opened ({error.strerror}): each temporary file takes a file descriptor, two for a "
                "stage; raise the limit (ulimit -n), or name a folder with storage=..."
            ) from error
        raise StorageError(f"{path} cannot be written ({num_bytes} bytes): {error}") from error


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
