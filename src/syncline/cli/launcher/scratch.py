"""What a launch needs on the side: a free port, a secret that nobody else can read, a trace file for each rank.

They lie in a folder of the launcher's own; folders of killed launchers are removed first. The owner holds a lock
(flock) on a file in its folder. The kernel frees the lock when the owner ends, however that happens: a folder with a
free lock is nobody's any more. No process ids are compared, since ids are used again. The file gets its name when the
lock is held, so that a folder that is being made is never mistaken for one that was left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from syncline.cli.launcher.job import Job
from syncline.errors import ConfigurationError
from syncline.pytorch.secret import SECRET_BYTES, read_secret_file
from syncline.user_folder import temporary_folder

PREFIX = "syncline-"
LOCK = "owner"


@contextmanager
def reserved_port(address: str = "127.0.0.1") -> Iterator[int]:
    """Yield a TCP port of one address that the kernel gives to nobody else as long as this lasts.

    It is bound here and not listened on, so that rank 0, as every server that sets ``SO_REUSEADDR``, may listen on it.
    A port that was only free a moment before may be another program's by the time rank 0 binds it.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]


def prepare_secret(job: Job, *, asked: Path | None, environment: Mapping[str, str], folder: Path) -> Path | None:
    """Find the file with the job's secret: the one asked for; else a fresh one, where all ranks start here.

    Ranks on several machines must share a secret that the user spread; it never travels through the store.
    """
    if asked is not None:
        read_secret_file(asked, who="--secret-file")  # said now and once, not later by every rank
        return asked.absolute()
    if has_secret(environment) or not job.is_whole:
        return None
    return write_secret(folder)


def has_secret(environment: Mapping[str, str]) -> bool:
    """Whether the user gave a secret already."""
    return bool(environment.get("SYNCLINE_SECRET") or environment.get("SYNCLINE_SECRET_FILE"))


def write_secret(folder: Path) -> Path:
    """Write a fresh secret to a file in ``folder`` that only this user can read."""
    path = folder / "secret"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(SECRET_BYTES))
    return path


@contextmanager
def shared_secret(environment: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Yield what tells the hosts of a lab their secret: a fresh one in a file, as they share this machine's files.

    Nothing is to be told where the user gave one, since they inherit ``environment``.
    """
    if has_secret(environment):
        yield {}
        return
    with own_folder() as folder:
        yield {"SYNCLINE_SECRET_FILE": str(write_secret(folder))}


def check_place(path: Path, option: str) -> None:
    """Raise :class:`ConfigurationError` now, not after hours, if what an option names cannot be written there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigurationError(f"{option} {path}: there is no folder {folder}")
    if path.is_dir():
        raise ConfigurationError(f"{option} {path}: this is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigurationError(f"{option} {path}: it cannot be written there; name a file in another folder")


def trace_parts(job: Job, target: Path) -> Mapping[int, Path]:
    """Say where each rank of this launcher writes its own trace: beside the whole, so that a killed launcher's stay."""
    folder = target.absolute().with_name(f"{target.name}.parts")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return {process.rank: folder / f"trace-{process.rank}.json" for process in job.processes}


def merge_trace_parts(parts: Mapping[int, Path], target: Path) -> int:
    """Write one trace of what the ranks left behind, and remove that; returns how many of them left something."""
    from syncline.observe import merge_traces

    written = [path for path in parts.values() if path.exists() and path.stat().st_size]  # none on a full disk
    if written:
        merge_traces(written, target)
    for folder in {path.parent for path in parts.values()}:
        shutil.rmtree(folder, ignore_errors=True)
    return len(written)


def open_logs(job: Job, asked: Path | None, environment: Mapping[str, str]) -> Mapping[int, Path]:
    """Make the file of each rank's output, where these are asked for; those of an earlier job are replaced."""
    if asked is None and not environment.get("SYNCLINE_LOG_DIR"):
        return {}
    folder = asked or Path(environment["SYNCLINE_LOG_DIR"])
    logs = {process.rank: folder.absolute() / f"rank-{process.rank}.log" for process in job.processes}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in logs.values():
            path.write_bytes(b"")
    except OSError as error:
        raise ConfigurationError(f"--log-dir {folder}: logs cannot be written there: {error.strerror}") from error
    return logs


def own_target(job: Job, asked: Path, host: str | None) -> Path:
    """Name this launcher's trace or report: as asked, with the host's name in it where others write theirs too."""
    return asked if job.is_whole or host is None else asked.with_suffix(f".{host}{asked.suffix}")


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """Make a folder that only this user can read, and remove it in the end; remove what killed launchers left, too."""
    remove_abandoned(temporary_folder())
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
