import ctypes
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from syncline.machines import measurement
from syncline.machines.measurement import Limits, is_in_memory, probe_disk, read_machine, read_moment
from syncline.machines.nvml import LIBRARY, Gpu, find_gpu, read_gpu


def test_the_real_machine_is_read(tmp_path: Path) -> None:
    features = read_machine(probe_directory=tmp_path)
    assert 0 < features["memory_bytes"] <= psutil.virtual_memory().total
    assert ("disk_bytes_per_s" in features) is not is_in_memory(tmp_path)
    assert 0 < features["cpu_cores"] <= len(os.sched_getaffinity(0))
    assert all(value > 0 for value in features.values())
    assert list(tmp_path.iterdir()) == []


def test_what_changes_is_read_each_period() -> None:
    moment = read_moment()
    assert 0 < moment["available_memory_bytes"] <= psutil.virtual_memory().total
    assert moment.keys() <= {"cpu_hz", "available_memory_bytes"}


def test_a_disk_that_cannot_be_written_has_no_rate(tmp_path: Path) -> None:
    assert probe_disk(tmp_path / "missing") == 0


def test_a_folder_in_memory_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "is_in_memory", lambda folder: False)
    assert probe_disk(tmp_path) > 0
    monkeypatch.setattr(measurement, "is_in_memory", lambda folder: folder == tmp_path)
    assert probe_disk(tmp_path) == 0
    monkeypatch.chdir(tmp_path)
    assert "disk_bytes_per_s" not in read_machine()


def test_what_control_groups_leave_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(cores=0.25, memory_bytes=1 << 20, available_bytes=1 << 19)
    monkeypatch.setattr(measurement, "read_limits", lambda: limits)
    features = read_machine()
    assert (features["cpu_cores"], features["memory_bytes"]) == (0.25, 1 << 20)
    assert read_moment()["available_memory_bytes"] == 1 << 19


class FakeLibrary:
    """NVIDIA's library as the driver's documentation describes it; a call named in ``broken`` reports an error."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.is_open = False

    def result(self, name: str) -> int:
        return int(name == self.broken)

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.is_open = self.broken != "init"
        return self.result("init")

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: object) -> int:  # noqa: N802
        self.asked_for: int | bytes = index.value
        return self.result("handle")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: object) -> int:  # noqa: N802
        self.asked_for = uuid
        return self.result("handle")

    def nvmlDeviceGetMaxClockInfo(self, device: object, kind: ctypes.c_int, clock: object) -> int:  # noqa: N802
        clock._obj.value = 1980
        return self.result("clock")

    def nvmlDeviceGetClockInfo(self, device: object, kind: ctypes.c_int, clock: object) -> int:  # noqa: N802
        clock._obj.value = 1200
        return self.result("clock")

    def nvmlDeviceGetMemoryInfo(self, device: object, memory: object) -> int:  # noqa: N802
        memory._obj.total, memory._obj.free = 80 << 30, 30 << 30
        return self.result("memory")


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("", {"gpu_hz": 1.98e9, "gpu_memory_bytes": float(80 << 30)}),
        ("clock", {"gpu_memory_bytes": float(80 << 30)}),
        ("memory", {"gpu_hz": 1.98e9}),
        ("handle", {}),
        ("init", {}),
    ],
)
def test_gpu_is_read_as_far_as_the_library_answers(broken: str, expected: dict[str, float]) -> None:
    library = FakeLibrary(broken)
    assert read_gpu(load=lambda name: library) == expected
    assert not library.is_open


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("", {"gpu_hz": 1.2e9, "available_gpu_memory_bytes": float(30 << 30)}),
        ("clock", {"available_gpu_memory_bytes": float(30 << 30)}),
        ("memory", {"gpu_hz": 1.2e9}),
        ("handle", {}),
        ("init", {}),
    ],
)
def test_gpu_is_read_in_each_period_while_it_is_open(broken: str, expected: dict[str, float]) -> None:
    library = FakeLibrary(broken)
    gpu = Gpu(load=lambda name: library)
    moment = read_moment(gpu)
    assert {name: value for name, value in moment.items() if "gpu" in name} == expected
    gpu.close()
    assert not library.is_open
    assert gpu.read_moment() == {}


@pytest.mark.parametrize(("which", "asked_for"), [(0, 0), (5, 5), ("GPU-8932f937", b"GPU-8932f937")])
def test_the_gpu_that_was_named_is_read(which: int | str, asked_for: int | bytes) -> None:
    library = FakeLibrary()
    assert read_gpu(which, load=lambda name: library)["gpu_hz"] == 1.98e9
    assert library.asked_for == asked_for


def test_where_no_gpu_may_be_used_none_is_read() -> None:
    assert read_gpu(None, load=lambda name: FakeLibrary()) == {}


@pytest.mark.parametrize(
    ("ordinal", "environment", "expected"),
    [
        (None, {}, 0),
        (None, {"LOCAL_RANK": "3"}, 3),
        (None, {"SLURM_LOCALID": "2"}, 2),
        (None, {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 1),
        (1, {"LOCAL_RANK": "3"}, 1),
        (None, {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4, 6"}, 6),
        (None, {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "5"}, 5),
        (0, {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, 4),
        (0, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,1"}, "GPU-8932f937"),
        (None, {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,-1,3"}, 2),
        (None, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (None, {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        (2, {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
    ],
)
def test_the_gpu_of_a_process(ordinal: int | None, environment: dict[str, str], expected: int | str | None) -> None:
    assert find_gpu(ordinal, environment) == expected


def test_no_library_no_gpu() -> None:
    def load(name: str) -> None:
        assert name == LIBRARY
        raise OSError

    assert read_gpu(load=load) == {}
    assert Gpu(load=load).read_moment() == {}


@pytest.mark.parametrize("module", ["features", "clustering", "measurement", "nvml"])
def test_imports_without_torch(module: str) -> None:
    probe = f"import sys, syncline.machines.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0
