"""The folder of a checkpoint: written beside its place and moved there when it is complete; checked when it is read.

While a checkpoint is written it is called ``NAME.writing``. When everything is on the disk, the one that was there
becomes ``NAME.previous``, and the new one ``NAME``. At every moment, one of them is whole. What is to be removed is
called ``NAME.removed`` first, so that nothing is taken for a checkpoint of which a part is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import CheckpointError

if TYPE_CHECKING:
    from syncline.pytorch.checkpoint_manifest import CheckpointManifest

FORMAT = 2
MANIFEST = "syncline.json"
DCP_INDEX = ".metadata"
"""What ``torch.distributed.checkpoint`` writes last, and we before our manifest."""
_BLOCK_BYTES = 1 << 20


def writing_folder(path: Path) -> Path:
    """Return where the checkpoint ``path`` is written."""
    return path.with_name(path.name + ".writing")


def previous_folder(path: Path) -> Path:
    """Return where the checkpoint goes that was there before."""
    return path.with_name(path.name + ".previous")


def removed_folder(path: Path) -> Path:
    """Return what a folder is called while it is removed."""
    return path.with_name(path.name + ".removed")


def is_checkpoint(folder: Path) -> bool:
    """Whether a save came to its end in ``folder``, ours or one of ``torch.distributed.checkpoint``."""
    return (folder / MANIFEST).is_file() or (folder / DCP_INDEX).is_file()


def begin(path: Path) -> Path:
    """Make an empty folder to write to; what an interrupted attempt left is removed.

    Raises :class:`CheckpointError` if something else is at ``path``: saving moves it away, and saving twice removes it.
    """
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_free and not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is there, but no checkpoint (no {MANIFEST} in it); name a place of its own")
    folder = writing_folder(path)
    shutil.rmtree(folder, ignore_errors=True)
    new = [parent for parent in folder.parents if not parent.exists()]
    folder.mkdir(parents=True)
    for parent in new:
        _sync_folder(parent.parent)
    return folder


def discard(path: Path) -> None:
    """Remove what was written for a checkpoint that failed: on a full disk its room is wanted."""
    shutil.rmtree(writing_folder(path), ignore_errors=True)


def checksums(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Return size and CRC-32 of files."""
    return {name: [(folder / name).stat().st_size, _crc(folder / name)] for name in sorted(set(names))}


def commit(path: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest, and put the folder in its place."""
    content = manifest.model_dump()
    folder, previous = writing_folder(path), previous_folder(path)
    text = json.dumps({"format": FORMAT, "crc": _text_crc(content), "content": content}, indent=1)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    if path.exists():
        remove(previous)
        path.rename(previous)
    folder.rename(path)
    _sync_folder(path.parent)


def remove(folder: Path) -> None:
    """Remove a checkpoint, if it is there; if that is cut off, no part of it is taken for one."""
    away = removed_folder(folder)
    shutil.rmtree(away, ignore_errors=True)
    if folder.exists():
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest, and check it by its schema; what it says of elements, the table of chunks checks."""
    from pydantic import ValidationError

    from syncline.pytorch.checkpoint_manifest import CheckpointManifest  # needs torch, which the command line does not

    try:
        outer = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, crc, content = outer["format"], outer["crc"], outer["content"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"The checkpoint {folder} is damaged, its {MANIFEST} is no use: {error}; try {previous_folder(folder)}"
        ) from error
    if version != FORMAT:
        raise CheckpointError(f"The checkpoint {folder} has format {version!r}, this version reads {FORMAT}")
    if crc != _text_crc(content):
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
