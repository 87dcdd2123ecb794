"""A checkpoint's folder: what is called how, and when one is whole.

``run1`` is one checkpoint, beside the one before it, or a folder of ``iteration-0000000120``, ``iteration-0000000140``
and so on (``keep=``). What is not named so is left alone. Where there is one, and the next is to be kept in such a
folder, it becomes the one before.

While a checkpoint is written it is called ``NAME.writing``. When everything is on the disk, the one that was there
becomes ``NAME.previous``, and the new one ``NAME``. At every moment, one of them is whole. What is to be removed is
called ``NAME.removed`` first, so that nothing is taken for a checkpoint of which a part is gone.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from syncline.errors import CheckpointError
from syncline.updates.phased.storage import sync_to_disk

MANIFEST = "syncline.json"
DCP_INDEX = ".metadata"
"""What ``torch.distributed.checkpoint`` writes last, and we before our manifest."""

_NAME = re.compile(r"iteration-(\d{10,})")
_LEFT_OVER = re.compile(r"iteration-\d{10,}\.(removed|previous|writing)")


def writing_folder(path: Path) -> Path:
    """Return where the checkpoint ``path`` is written."""
    return path.with_name(path.name + ".writing")


def previous_folder(path: Path) -> Path:
    """Return where the checkpoint goes that was there before."""
    return path.with_name(path.name + ".previous")


def is_checkpoint(folder: Path) -> bool:
    """Whether a save came to its end in ``folder``, ours or one of ``torch.distributed.checkpoint``."""
    return (folder / MANIFEST).is_file() or (folder / DCP_INDEX).is_file()


def begin(path: Path, is_ours: Callable[[Path], bool]) -> Path:
    """Make an empty folder to write to; what an interrupted attempt left is removed.

    Raises :class:`CheckpointError` if something else is at ``path``: saving moves it away, and saving twice removes it.
    ``is_ours`` says whether a folder is a checkpoint of which the manifest is gone: training went on from the one
    before, and comes there again.
    """
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_free and not (path / MANIFEST).is_file() and not is_ours(path):
        raise CheckpointError(f"{path} is there, but no checkpoint (no {MANIFEST} in it); name a place of its own")
    if _NAME.fullmatch(path.name) and (path.parent / MANIFEST).is_file():
        _put_aside(path.parent)
    folder = writing_folder(path)
    shutil.rmtree(folder, ignore_errors=True)
    new = [parent for parent in folder.parents if not parent.exists()]
    folder.mkdir(parents=True)
    for parent in new:
        sync_to_disk(parent.parent)
    return folder


def discard(path: Path) -> None:
    """Remove what was written for a checkpoint that failed: on a full disk its room is wanted."""
    shutil.rmtree(writing_folder(path), ignore_errors=True)


def commit(path: Path) -> None:
    """Put the folder in its place, whose files are all on the disk."""
    folder = writing_folder(path)
    sync_to_disk(folder)
    if path.exists():
        _put_aside(path)
    folder.rename(path)
    sync_to_disk(path.parent)


def _put_aside(path: Path) -> None:
    """Let a checkpoint be the one before, in whose place another comes."""
    remove(previous_folder(path))
    path.rename(previous_folder(path))


def remove(folder: Path) -> None:
    """Remove a checkpoint, if it is there; if that is cut off, no part of it is taken for one."""
    away = folder.with_name(folder.name + ".removed")
    shutil.rmtree(away, ignore_errors=True)
    if folder.exists():
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def place_of(folder: Path, iteration: int) -> Path:
    """Return where the checkpoint of an iteration lies; names are in the order of iterations."""
    return folder / f"iteration-{iteration:010d}"


def check_keepable(folder: Path) -> None:
    """Raise :class:`CheckpointError` if ``folder`` cannot hold the last few checkpoints, nor become the one before."""
    if (is_checkpoint(folder) and not (folder / MANIFEST).is_file()) or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(
            f"{folder} is another program's checkpoint or a file; with keep= it is a folder of checkpoints: name "
            "another one"
        )


def num_kept(folder: Path) -> int:
    """Return how many checkpoints are kept in ``folder`` by their iterations."""
    return len(_iterations(folder))


def candidates(path: Path) -> list[Path]:
    """Return what may be loaded, the newest first: ``path`` itself or those in it, and the one before."""
    kept = sorted(_iterations(path), key=_iteration_of, reverse=True)
    return [*filter(is_checkpoint, [path]), *kept, *filter(is_checkpoint, [previous_folder(path)])]


def find(path: Path) -> Path:
    """Return the newest checkpoint at ``path``, or what was there before if a save was cut off in between."""
    for folder in candidates(path):
        return folder
    raise CheckpointError(f"There is no checkpoint at {path} (no {MANIFEST} in it); check the path")


def prune(newest: Path, *, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints beside ``newest``, which is complete, and what was left half made.

    Those of later iterations are of a training that went back behind them: they are put aside, and nothing is lost.
    """
    last = _iteration_of(newest)
    for path in _iterations(newest.parent):
        if _iteration_of(path) > last:
            aside = path.with_name(path.name + ".superseded")
            remove(aside)
            path.rename(aside)
    for path in candidates(newest.parent)[keep:]:
        remove(path)
    for path in newest.parent.iterdir():
        if _LEFT_OVER.fullmatch(path.name):
            remove(path)


def _iterations(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and is_checkpoint(path)]


def _iteration_of(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None, "only folders that are named so are asked for"
    return int(found[1])
