"""The secret of a job that was given none: this user's own on this machine, made by whichever rank asks first.

All ranks on one machine that run as one user find the same file, and so does a newcomer that the user starts there
later; nothing about it is sent. It lies in ``$XDG_RUNTIME_DIR/syncline``, or where that is not this user's alone (or
not there, as under Slurm and in containers) in ``syncline-UID`` among the temporary files. There others can make names
too: so no link is followed, and a folder or file that another user owns, or may read, is refused.

The file appears under its name whole or not at all (a hard link, which fails if another process was first), so ranks
that start at once agree without waiting for one another, and nothing of an earlier start can be mistaken for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from syncline.errors import ConfigurationError

NAME = "secret"
SECRET_BYTES = 32
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # what is no file, as a pipe, is not waited for
_REMEDY = "or give all ranks a secret: init(secret=), or SYNCLINE_SECRET_FILE (mode 0600, at least 32 bytes)"


def user_secret(values: Mapping[str, str]) -> bytes:
    """Return this user's secret on this machine, made now if there is none; ``values`` are the process's variables.

    :class:`ConfigurationError` says which folder or file others could have made, or could read.
    """
    folder = _choose_folder(values)
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with _opened(folder, os.O_DIRECTORY) as place:
            with contextlib.suppress(FileExistsError):
                _make(place)
            with _opened(folder / NAME, 0, place=place) as file:
                secret = os.read(file, 4096).strip()
    except OSError as error:
        raise ConfigurationError(
            f"this job was given no secret, and its user's own cannot be kept in {folder}: {error.strerror}; let "
            f"XDG_RUNTIME_DIR or TMPDIR name a folder that this user can write, {_REMEDY}"
        ) from error
    if len(secret) < SECRET_BYTES:
        raise ConfigurationError(
            f"{folder / NAME} holds {len(secret)} bytes, fewer than {SECRET_BYTES}: remove it, {_REMEDY}"
        )
    return secret


def _choose_folder(values: Mapping[str, str]) -> Path:
    given = values.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_absolute():
        with contextlib.suppress(OSError):
            status = os.lstat(given)
            if stat.S_ISDIR(status.st_mode) and _is_own(status):
                return Path(given) / "syncline"
    return Path(tempfile.gettempdir()) / f"syncline-{os.geteuid()}"


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


@contextlib.contextmanager
def _opened(path: Path, flags: int, *, place: int | None = None) -> Iterator[int]:
    """Open a folder, or a file in the open folder ``place``, that is this user's alone."""
    name = path if place is None else path.name
    _check(path, os.stat(name, dir_fd=place, follow_symlinks=False), is_folder=bool(flags))  # may not be opened at all
    descriptor = os.open(name, _READ | flags, dir_fd=place)
    try:
        _check(path, os.fstat(descriptor), is_folder=bool(flags))  # and this one is what is read
        yield descriptor
    finally:
        os.close(descriptor)


def _check(path: Path, status: os.stat_result, *, is_folder: bool) -> None:
    if _is_own(status) and (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        return
    kind, mode = ("folder", 0o700) if is_folder else ("file", 0o600)
    raise ConfigurationError(
        f"{path} is not a {kind} of this user alone (owner {status.st_uid}, {stat.filemode(status.st_mode)}; it "
        f"must be {os.geteuid()}, {stat.filemode((stat.S_IFDIR if is_folder else stat.S_IFREG) | mode)}), so another "
        f"user may know what is in it: remove it, let XDG_RUNTIME_DIR name a folder of this user alone, {_REMEDY}"
    )


def _make(place: int) -> None:
    """Write a new secret in the open folder ``place``; ``FileExistsError`` if there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(NAME, dir_fd=place, follow_symlinks=False)
        raise FileExistsError(NAME)
    draft = f"{NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES))
        os.link(draft, NAME, src_dir_fd=place, dst_dir_fd=place, follow_symlinks=False)
    finally:
        os.unlink(draft, dir_fd=place)
