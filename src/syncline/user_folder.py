"""The folder on this machine that this user's processes share, and nobody else can read or write.

It is ``$XDG_RUNTIME_DIR/syncline``, or where that is not this user's alone (or not there, as under Slurm and in
containers) ``syncline-UID`` among the temporary files. There others can make names too: so no link is followed, and a
folder or file that another user owns, or may read, is refused.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from syncline.errors import ConfigurationError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # what is no file, as a pipe, is not waited for


def user_folder(values: Mapping[str, str]) -> Path:
    """Return where the folder is, or is to be; ``values`` are the process's variables."""
    given = values.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_absolute():
        with contextlib.suppress(OSError):
            status = os.lstat(given)
            if stat.S_ISDIR(status.st_mode) and _is_own(status):
                return Path(given) / "syncline"
    return temporary_folder() / f"syncline-{os.geteuid()}"


def temporary_folder() -> Path:
    """Return where temporary files go; :class:`ConfigurationError` where nothing can be written, as in many images."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"temporary files need a folder, and user {os.geteuid()} can write in none "
            f"({error.strerror}); let TMPDIR name one with free space"
        ) from error


@contextlib.contextmanager
def opened(path: Path, *, place: int | None = None, is_folder: bool = False, remedy: str = "") -> Iterator[int]:
    """Open a folder, which is made if it is not there, or a file in the open folder ``place``: this user's alone.

    :class:`ConfigurationError` says which folder or file others could have made, or could read, and the ``remedy``.
    """
    name = path if place is None else path.name
    if is_folder:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=place)
    status = os.stat(name, dir_fd=place, follow_symlinks=False)
    _check(path, status, is_folder=is_folder, remedy=remedy)  # what is another's may not be opened at all
    descriptor = os.open(name, _READ | (os.O_DIRECTORY if is_folder else 0), dir_fd=place)
    try:
        _check(path, os.fstat(descriptor), is_folder=is_folder, remedy=remedy)  # and this one is what is read
        yield descriptor
    finally:
        os.close(descriptor)


def served_paths(folder: int, pattern: str) -> list[Path]:
    """Return where datagrams are taken under names of an open folder that match; what the dead left is removed.

    The paths are short wherever the folder is, as those of sockets must be, and last as long as it is open.
    """
    names = sorted(fnmatch.filter(os.listdir(folder), pattern))
    return [path for path in (path_in(folder, name) for name in names) if _is_served(path)]


def path_in(folder: int, name: str) -> Path:
    """Return such a path."""
    return Path(f"/proc/self/fd/{folder}/{name}")


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return False
    return True


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


def _check(path: Path, status: os.stat_result, *, is_folder: bool, remedy: str) -> None:
    if _is_own(status) and (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        return
    kind, mode = ("folder", 0o700) if is_folder else ("file", 0o600)
    raise ConfigurationError(
        f"{path} is not a {kind} of this user alone (owner {status.st_uid}, {stat.filemode(status.st_mode)}; it "
        f"must be {os.geteuid()}, {stat.filemode((stat.S_IFDIR if is_folder else stat.S_IFREG) | mode)}), so another "
        f"user may know what is in it: remove it, or let XDG_RUNTIME_DIR name a folder of this user alone{remedy}"
    )
