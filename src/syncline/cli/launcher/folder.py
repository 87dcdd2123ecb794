"""The launcher's own folder among the temporary ones, with the job's secret in it; those of killed launchers go first.

The owner holds a lock (flock) on a file in its folder. The kernel frees the lock when the owner ends, however that
happens: a folder with a free lock is nobody's any more. No process ids are compared, since ids are used again. The file
gets its name when the lock is held, so that a folder that is being made is never mistaken for one that was left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "syncline-"
LOCK = "owner"


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """Make a folder that only this user can read, and remove it in the end; remove what killed launchers left, too."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with _locked(folder):
            yield folder


def remove_abandoned(parent: Path) -> None:
    """Remove this user's folders in ``parent`` whose owners are dead; what cannot be judged stays."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                _remove_if_free(folder)


def _remove_if_free(folder: Path) -> None:
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the owner lives
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    unnamed = folder / f"{LOCK}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: others will leave this folder alone
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(folder / LOCK)
        yield
    finally:
        os.close(descriptor)
