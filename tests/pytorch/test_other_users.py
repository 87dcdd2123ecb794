"""Another user of the machine: what it can do to a job that was given no secret, tried by a process of another user."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from other_user import KNOCKS, OTHER_USER

from rank_scripts import run_script
from syncline.errors import ConfigurationError
from syncline.pytorch.secret import user_secret
from syncline.testing import run_threads

SCRIPT = Path(__file__).with_name("other_user.py")


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.geteuid() != 0:
        pytest.fail("tests of another user become one, and need root; run them with sudo (they are never skipped)")


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder for temporary files as a machine has it: all may make names there, and remove their own."""
    place = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))
    place.chmod(0o1777)
    yield place
    shutil.rmtree(place)


def play(place: Path, folder: Path, plan: str, number: int) -> list[dict[str, Any]]:
    """Run the script's parts; return what each told."""
    extra = {"TMPDIR": str(place), "XDG_RUNTIME_DIR": "", "WORLD_SIZE": "2"}
    results = run_script(SCRIPT, number, str(folder), plan, extra=extra)
    told = [[line for line in output.splitlines() if line.startswith("told ")] for _, output in results]
    assert all(len(lines) == 1 for lines in told), results
    return [json.loads(lines[0].removeprefix("told ")) for lines in told]


def test_another_user_neither_joins_nor_reads_an_elastic_job(everybodys: Path, tmp_path: Path) -> None:
    for name in ("told", "pause"):
        for rank in range(2):
            os.mkfifo(tmp_path / f"{name}-{rank}")
    first, second, ends = play(everybodys, tmp_path, "stranger", 3)
    assert ends.pop("its ports are seen") is True
    assert ends.pop("names in /dev/shm") == []
    for name in ("no secret", "another secret"):
        assert "refuses this process: the shared secrets differ" in ends.pop(name)
    assert ends.pop("its words") == "b''"
    assert all(end.startswith(("PermissionError", "OSError: [Errno 1]")) for end in ends.values()), ends
    assert first["objects"] == second["objects"] == ["of rank 0", "of rank 1"]
    assert (first["world_size"], first["refused"]) == (2, KNOCKS)


def test_another_user_does_not_become_a_rank_by_what_the_store_tells(everybodys: Path, tmp_path: Path) -> None:
    rank_0, stranger = play(everybodys, tmp_path, "impostor", 2)
    assert "the shared secrets differ" in rank_0["refused"]
    assert stranger["refused"].startswith("HandshakeError")
    assert "the shared secrets differ" in stranger["refused"]


@pytest.fixture
def values(everybodys: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables of a process without a run-time folder, whose temporary files lie among everybody's."""
    monkeypatch.setattr(tempfile, "tempdir", str(everybodys))
    return {}


def test_ranks_that_start_at_once_agree_and_leave_one_file_of_their_user(
    everybodys: Path, values: dict[str, str]
) -> None:
    found = run_threads(16, lambda _: user_secret(values))
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    folder = everybodys / "syncline-0"
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert (folder.stat().st_mode & 0o777, (folder / "secret").stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_folder_that_another_user_made_first_is_refused(kind: str, everybodys: Path, values: dict[str, str]) -> None:
    place, own = everybodys / "syncline-0", everybodys / "own"
    if kind == "folder":
        place.mkdir(mode=0o700)
    elif kind == "file":
        place.touch(mode=0o600)
    else:
        own.mkdir(mode=0o700)
        place.symlink_to(own)  # to a folder of this user, where its secret would be all the same
    os.chown(place, OTHER_USER, OTHER_USER, follow_symlinks=False)
    with pytest.raises(ConfigurationError, match=r"syncline-0 is not a folder of this user alone .* SYNCLINE_SECRET"):
        user_secret(values)
    assert not own.exists() or not list(own.iterdir())


@pytest.mark.parametrize("kind", ["readable", "another's", "link", "pipe"])
def test_a_secret_that_others_know_is_refused(kind: str, everybodys: Path, values: dict[str, str]) -> None:
    user_secret(values)
    file, other = everybodys / "syncline-0" / "secret", everybodys / "other"
    if kind == "readable":
        file.chmod(0o640)
    elif kind == "another's":
        os.chown(file, OTHER_USER, OTHER_USER)
    elif kind == "link":
        file.rename(other)
        file.symlink_to(other)
    else:
        file.unlink()
        os.mkfifo(file, 0o600)
    with pytest.raises(ConfigurationError, match=r"secret is not a file of this user alone"):
        user_secret(values)


def test_the_run_time_folder_counts_if_it_is_this_users_alone(everybodys: Path, values: dict[str, str]) -> None:
    place = everybodys / "run"
    place.mkdir(mode=0o700)
    values["XDG_RUNTIME_DIR"] = str(place)
    inside = user_secret(values)
    assert (place / "syncline" / "secret").read_bytes() == inside
    place.chmod(0o755)
    assert user_secret(values) != inside
    assert (everybodys / "syncline-0" / "secret").exists()


def test_a_secret_that_is_too_short_is_told_with_what_to_do(everybodys: Path, values: dict[str, str]) -> None:
    user_secret(values)
    (everybodys / "syncline-0" / "secret").write_text("short")
    with pytest.raises(ConfigurationError, match="holds 5 bytes, fewer than 32: remove it, or give all ranks a secret"):
        user_secret(values)


def test_a_folder_in_which_nothing_can_be_made_is_told_with_what_to_do(
    values: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(ConfigurationError, match=r"no secret, and its user's own cannot be kept in /proc/syncline-0: "):
        user_secret(values)
