"""A limit on open files that is too low is an error before the first connection."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rank_scripts import script_environment
from syncline.errors import ConfigurationError
from syncline.fabric import sockets
from syncline.fabric.sockets import NUM_OWN_FILES, check_open_files

START = """
import resource, sys
from meeting_stores import DictStore
from syncline.errors import SynclineError
from syncline.fabric import FabricOptions
from syncline.runtime import Communicator
from syncline.topology import Topology
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
try:
    Communicator.connect(
        rank=0, world_size=8, topology=Topology.flat(8), store=DictStore(), options=FabricOptions(connect_s=0.1)
    )
except SynclineError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def limits(monkeypatch):
    """Let the kernel say that these are the limits, and that 5 files are open."""

    def say(*numbers):
        monkeypatch.setattr(resource, "getrlimit", lambda _: numbers)
        monkeypatch.setattr(sockets, "_count_open", lambda _: 5)

    return say


def test_enough_is_enough(limits):
    needed = 5 + NUM_OWN_FILES + 7 * 3
    limits(needed, needed)
    check_open_files(0, num_peers=7, num_classes=2)
    limits(needed - 1, 1 << 20)
    text = (
        f"^rank 3 needs {needed} open files, 3 for each of 7 other ranks, .* but RLIMIT_NOFILE allows {needed - 1}; "
        f"say ulimit -n {needed} or more in the shell that starts it$"
    )
    with pytest.raises(ConfigurationError, match=text):
        check_open_files(3, num_peers=7, num_classes=2)


def test_no_limit_is_enough(limits):
    limits(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    check_open_files(0, num_peers=1000, num_classes=4)


def test_a_hard_limit_is_named(limits):
    limits(12, 12)
    with pytest.raises(ConfigurationError, match=r"for which root must raise the hard limit 12$"):
        check_open_files(0, num_peers=1, num_classes=1)


def test_without_proc_that_is_said_and_no_number(monkeypatch):
    def missing(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(Path, "iterdir", missing)
    text = r"^/proc/self/fd of process \d+ cannot be read \(No such file or directory\).*: mount -t proc proc /proc$"
    with pytest.raises(ConfigurationError, match=text):
        check_open_files(0, num_peers=1, num_classes=1)


@pytest.mark.parametrize("allowed", [6, 12, 30])
def test_a_start_with_few_files_says_what_it_needs(allowed):
    """At 6 even the loop cannot be made, at 12 not what compiled code needs, at 30 not all connections."""
    ended = subprocess.run(
        [sys.executable, "-c", START, str(allowed)],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.startswith("ConfigurationError: rank 0 needs "), ended.stderr
    assert f"2 for each of 7 other ranks, {NUM_OWN_FILES} of its own" in ended.stdout
    assert f"RLIMIT_NOFILE allows {allowed}; say ulimit -n " in ended.stdout
