"""Which checkpoints a folder has: one by its name, or the last few of a training, each named by its iteration.

``run1`` is one checkpoint, beside the one before it, or a folder of ``iteration-0000000120``, ``iteration-0000000140``
and so on. What is not named so is left alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from syncline.arguments import checked
from syncline.errors import CheckpointError
from syncline.pytorch import checkpoint_folder as place

_NAME = re.compile(r"iteration-(\d{10,})")
_LEFT_OVER = re.compile(r"iteration-\d{10,}\.(removed|previous|writing)")


def place_of(folder: Path, iteration: int) -> Path:
    """Return where the checkpoint of an iteration lies; names are in the order of iterations."""
    return folder / f"iteration-{iteration:010d}"


def superseded_folder(path: Path) -> Path:
    """Return where a checkpoint goes that a training went back behind."""
    return path.with_name(path.name + ".superseded")


def check_keepable(folder: Path) -> None:
    """Raise :class:`CheckpointError` if ``folder`` cannot hold the last few checkpoints, since it is one itself."""
    if place.is_checkpoint(folder) or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(
            f"{folder} is itself a checkpoint or a file; with keep= it is a folder of checkpoints: name another one"
        )


def has_several(folder: Path) -> bool:
    """Whether checkpoints are kept in ``folder`` by their iterations."""
    return bool(_iterations(folder))


def candidates(path: Path) -> list[Path]:
    """Return what may be loaded, the newest first: ``path`` itself, the one before it, or those in it."""
    folders = [folder for folder in (path, place.previous_folder(path)) if place.is_checkpoint(folder)]
    return folders + sorted(_iterations(path), key=_iteration_of, reverse=True)


def find(path: Path) -> Path:
    """Return the newest checkpoint at ``path``, or what was there before if a save was cut off in between."""
    for folder in candidates(path):
        return folder
    raise CheckpointError(f"There is no checkpoint at {path} (no {place.MANIFEST} in it); check the path")


def is_whole(folder: Path) -> bool:
    """Whether nothing is missing; contents are compared when it is loaded."""
    if not (folder / place.MANIFEST).is_file():
        return place.is_checkpoint(folder)  # of others, nothing tells what there should be
    try:
        place.check_sizes(folder, place.read_manifest(folder).files)
    except CheckpointError:
        return False
    return True


@checked
def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest whole checkpoint at ``folder``, an absolute path; None if there is none.

    ``folder`` is one checkpoint, or has several (``save_checkpoint(..., keep=n)``), of which the latest iteration is
    taken whose files are all there; :func:`load_checkpoint` compares their contents too. Any process may ask.

    >>> for number in range(3):
    ...     syncline.save_checkpoint("run1", model, iteration=number, keep=2)
    >>> syncline.latest_checkpoint("run1").name
    'iteration-0000000002'
    """
    return next(filter(is_whole, candidates(Path(folder).absolute())), None)


def prune(newest: Path, *, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints beside ``newest``, which is complete, and what was left half made.

    Those of later iterations are of a training that went back behind them: they are put aside, and nothing is lost.
    """
    last = _iteration_of(newest)
    earlier: list[Path] = []
    for path in _iterations(newest.parent):
        if _iteration_of(path) > last:
            aside = superseded_folder(path)
            place.remove(aside)
            path.rename(aside)
        else:
            earlier.append(path)
    for path in sorted(earlier, key=_iteration_of)[:-keep]:
        place.remove(path)
    for path in newest.parent.iterdir():
        if _LEFT_OVER.fullmatch(path.name):
            place.remove(path)


def _iterations(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and place.is_checkpoint(path)]


def _iteration_of(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None, "only folders that are named so are asked for"
    return int(found[1])
