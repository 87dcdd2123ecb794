"""The launcher's folder: gone when it ends, and when it was killed, gone when the next one starts."""

import fcntl
import os
import stat
import tempfile

import pytest

from syncline.cli.launcher.scratch import LOCK, own_folder, remove_abandoned
from syncline.errors import ConfigurationError


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leave_folder(parent, name="syncline-left"):
    """What a launcher leaves that was killed."""
    folder = parent / name
    folder.mkdir(mode=0o700)
    (folder / LOCK).touch()
    (folder / "secret").write_text("of a dead job")
    return folder


def test_a_folder_is_private_and_goes_with_its_owner(temporary):
    with own_folder() as folder:
        assert folder.parent == temporary
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(temporary.iterdir())


def test_without_a_place_for_temporary_files_the_error_names_the_remedy(monkeypatch):
    """As with a read-only root and no /tmp; the current folder is the last one that is tried."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    text = r"^temporary files need a folder, .* in none \(.*'/proc/nowhere'\]\); let TMPDIR name one with free space$"
    with pytest.raises(ConfigurationError, match=text), own_folder():
        pass


def test_what_a_killed_launcher_left_goes_when_the_next_one_starts(temporary):
    left = leave_folder(temporary)
    with own_folder():
        assert not left.exists()


def test_a_folder_whose_owner_lives_stays(temporary):
    with own_folder() as first, own_folder() as second:
        assert first.is_dir()
        assert second.is_dir()


def test_a_folder_that_another_process_locks_stays(temporary):
    left = leave_folder(temporary)
    descriptor = os.open(left / LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    remove_abandoned(temporary)
    os.close(descriptor)
    assert left.exists()
    remove_abandoned(temporary)
    assert not left.exists()


def test_what_is_not_a_launchers_folder_stays(temporary):
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    target = leave_folder(elsewhere)
    (temporary / "syncline-link").symlink_to(target)
    (temporary / "syncline-file").touch()
    (temporary / "syncline-being-made").mkdir()
    other = leave_folder(temporary, "something-else")
    remove_abandoned(temporary)
    assert (target / "secret").exists()
    assert (other / "secret").exists()
    assert {path.name for path in temporary.glob("syncline-*")} == {
        "syncline-link",
        "syncline-file",
        "syncline-being-made",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_stays(temporary):
    left = leave_folder(temporary)
    os.chown(left, 12345, 12345)
    remove_abandoned(temporary)
    assert left.exists()
