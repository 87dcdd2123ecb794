"""The job's secret, from the file or the variable that the user gave; it never travels through the store."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from syncline.errors import ConfigurationError


def read_secret(values: Mapping[str, str]) -> bytes | None:
    """Return the job's secret: that of its file, else the variable itself."""
    named = values.get("SYNCLINE_SECRET_FILE")
    if named:
        return read_secret_file(named, who="SYNCLINE_SECRET_FILE")
    text = values.get("SYNCLINE_SECRET")
    return text.strip().encode() if text else None


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
