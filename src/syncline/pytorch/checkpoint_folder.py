"""The folder of a checkpoint: written beside its place and moved there when it is complete; checked when it is read.

While a checkpoint is written it is called ``NAME.writing``. When everything is on the disk, the one that was there
becomes ``NAME.previous``, and the new one ``NAME``. At every moment, one of them is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from syncline.errors import CheckpointError

FORMAT = 1
MANIFEST = "syncline.json"
_BLOCK_BYTES = 1 << 20


def writing_folder(path: Path) -> Path:
    """Return where the checkpoint ``path`` is written."""
    return path.with_name(path.name + ".writing")


def previous_folder(path: Path) -> Path:
    """Return where the checkpoint goes that was there before."""
    return path.with_name(path.name + ".previous")


def begin(path: Path) -> Path:
    """Make an empty folder to write to; what an interrupted attempt left is removed.

    Raises :class:`CheckpointError` if something else is at ``path``: saving moves it away, and saving twice removes it.
    """
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_free and not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is there, but no checkpoint (no {MANIFEST} in it); name a place of its own")
    folder = writing_folder(path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def discard(path: Path) -> None:
    """Remove what was written for a checkpoint that failed: on a full disk its room is wanted."""
    shutil.rmtree(writing_folder(path), ignore_errors=True)


def checksums(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Return size and CRC-32 of files."""
    return {name: [(folder / name).stat().st_size, _crc(folder / name)] for name in sorted(set(names))}


def commit(path: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, and put the folder in its place."""
    folder, previous = writing_folder(path), previous_folder(path)
    text = json.dumps({"format": FORMAT, "crc": _text_crc(manifest), "content": manifest}, indent=1)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
    folder.rename(path)
    _sync_folder(path.parent)


def find(path: Path) -> Path:
    """Return the folder of a whole checkpoint: ``path``, or what was there before if a save was cut off in between."""
    for folder in (path, previous_folder(path)):
        if (folder / MANIFEST).is_file():
            return folder
    raise CheckpointError(f"There is no checkpoint at {path} (no {MANIFEST} in it); check the path")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest."""
    try:
        outer = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, crc, manifest = outer["format"], outer["crc"], outer["content"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The checkpoint {folder} is damaged, its {MANIFEST} is no use: {error}; try {previous_folder(folder)}"
        ) from error
    if version != FORMAT:
        raise CheckpointError(f"The checkpoint {folder} has format {version}, this version reads {FORMAT}")
    if crc != _text_crc(manifest) or not isinstance(manifest, dict):
        raise CheckpointError(f"The checkpoint {folder} is damaged: its {MANIFEST} was changed; use the previous one")
    return manifest


def check_files(folder: Path, files: dict[str, list[int]], *, part: int, num_parts: int) -> None:
    """Check sizes of all files, and the contents of every ``num_parts``-th from ``part`` on."""
    for number, (name, (size, crc)) in enumerate(sorted(files.items())):
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(f"The checkpoint {folder} is damaged: {name} is missing or not {size} bytes long")
        if number % num_parts == part and _crc(path) != crc:
            raise CheckpointError(f"The checkpoint {folder} is damaged: the contents of {name} have changed")


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def _text_crc(manifest: Any) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
