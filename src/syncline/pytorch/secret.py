"""The job's secret: from the file or the variable that the user gave, or else the user's own on this machine.

It never travels through the store. The user's own is made by whichever rank asks first. All ranks on one machine that
run as one user find the same file, and so does a newcomer that the user starts there later; nothing about it is sent.
It lies in the user's own folder (:mod:`syncline.user_folder`). The file appears under its name whole or not at all (a
hard link, which fails if another process was first), so ranks that start at once agree without waiting for one another,
and nothing of an earlier start can be mistaken for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from syncline.errors import ConfigurationError
from syncline.user_folder import opened, user_folder
from syncline.variables import process_variables

NAME = "secret"
SECRET_BYTES = 32
_REMEDY = ", or give all ranks a secret: init(secret=), or SYNCLINE_SECRET_FILE (mode 0600, at least 32 bytes)"


def read_secret(values: Mapping[str, str]) -> bytes | None:
    """Return the job's secret: that of its file, else the variable itself."""
    named = values.get("SYNCLINE_SECRET_FILE")
    if named:
        return read_secret_file(named, who="SYNCLINE_SECRET_FILE")
    text = values.get("SYNCLINE_SECRET")
    return text.strip().encode() if text else None


def choose_secret(path: Path | None) -> bytes | None:
    """Return the secret in the file that ``--secret-file`` names, else that of the variables."""
    return read_secret(process_variables()) if path is None else read_secret_file(path, who="--secret-file")


def read_secret_file(path: str | Path, *, who: str) -> bytes:
    """Return the secret in a file; :class:`ConfigurationError`, which begins with ``who``, if others may read it."""
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(64 << 10).strip()
    except OSError as error:
        raise ConfigurationError(f"{who} '{path}' cannot be read: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(
            f"{who} '{path}' may be read by others (mode {stat.S_IMODE(mode):04o}); run chmod 600 on it"
        )
    return secret


def user_secret(values: Mapping[str, str]) -> bytes:
    """Return this user's secret on this machine, made now if there is none; ``values`` are the process's variables.

    :class:`ConfigurationError` says which folder or file others could have made, or could read.
    """
    folder = user_folder(values)
    try:
        with opened(folder, is_folder=True, remedy=_REMEDY) as place:
            with contextlib.suppress(FileExistsError):
                _make(place)
            with opened(folder / NAME, place=place, remedy=_REMEDY) as file:
                secret = os.read(file, 4096).strip()
    except OSError as error:
        raise ConfigurationError(
            f"this job was given no secret, and its user's own cannot be kept in {folder}: {error.strerror}; let "
            f"XDG_RUNTIME_DIR or TMPDIR name a folder that this user can write{_REMEDY}"
        ) from error
    if len(secret) < SECRET_BYTES:
        raise ConfigurationError(
            f"{folder / NAME} holds {len(secret)} bytes, fewer than {SECRET_BYTES}: remove it{_REMEDY}"
        )
    return secret


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
