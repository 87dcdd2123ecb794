"""Limits of both versions of control groups, from trees of files as the kernel writes them."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from syncline.machines import measurement
from syncline.machines.measurement import Limits, is_in_memory, read_limits, usable_cores

GIB = 1 << 30


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_the_second_version_counts_all_groups_on_the_path(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/job/cpu.max": "600000 100000",
        "sys/fs/cgroup/job/memory.max": str(4 * GIB),
        "sys/fs/cgroup/job/memory.current": str(3 * GIB),
        "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7",
        "sys/fs/cgroup/job/step/cpu.max": "250000 100000",
        "sys/fs/cgroup/job/step/memory.max": "max",
    }
    found = read_limits(tree(tmp_path, "0::/job/step", files))
    assert found == Limits(cores=2.5, memory_bytes=4 * GIB, available_bytes=3 * GIB)


def test_the_first_version_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/docker/ab/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    groups = "4:memory:/docker/ab\n2:cpu,cpuacct:/docker/ab\n1:name=systemd:/x\n0::/"
    assert read_limits(tree(tmp_path, groups, files)) == Limits(cores=1.5, memory_bytes=2 * GIB, available_bytes=GIB)


def test_a_container_that_sees_only_its_own_part_of_the_tree(tmp_path: Path) -> None:
    """The path is the machine's, the files are at the top."""
    files = {"sys/fs/cgroup/cpu.max": "50000 100000", "sys/fs/cgroup/memory.max": "max"}
    assert read_limits(tree(tmp_path, "0::/kubepods/pod1", files)) == Limits(cores=0.5)


def test_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == Limits()
    unlimited = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert read_limits(tree(tmp_path, "1:cpu:/", unlimited)) == Limits()


def test_cores_are_those_that_the_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement.os, "sched_getaffinity", lambda process: {2, 5, 7})
    assert usable_cores(Limits()) == 3
    assert usable_cores(Limits(cores=1.5)) == 1.5
    assert usable_cores(Limits(cores=64)) == 3


def test_what_lies_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = [("/", "overlay"), ("/tmp", "ext4"), (str(tmp_path), "ext4"), (str(tmp_path), "tmpfs")]
    partitions = [SimpleNamespace(mountpoint=where, fstype=kind) for where, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: partitions)
    assert is_in_memory(tmp_path / "below")
    assert not is_in_memory(tmp_path.parent)
    assert not is_in_memory(Path("/"))
    partitions[2:] = []
    assert not is_in_memory(tmp_path)
