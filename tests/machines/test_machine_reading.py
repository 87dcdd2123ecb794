import ctypes
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from syncline.machines.nvml import LIBRARY, Gpu, read_gpu
from syncline.machines.reading import clock_of_cpuinfo, probe_disk, read_machine, read_moment


def test_the_real_machine_is_read(tmp_path: Path) -> None:
    features = read_machine(probe_directory=tmp_path)
    assert features["memory_bytes"] == psutil.virtual_memory().total
    assert features["disk_bytes_per_s"] > 0
    assert features["cpu_cores"] >= 1
    assert all(value > 0 for value in features.values())
    assert list(tmp_path.iterdir()) == []


def test_what_changes_is_read_each_period() -> None:
    moment = read_moment()
    assert 0 < moment["available_memory_bytes"] <= psutil.virtual_memory().total
    assert moment.keys() <= {"cpu_hz", "available_memory_bytes"}


def test_a_disk_that_cannot_be_written_has_no_rate(tmp_path: Path) -> None:
    assert probe_disk(tmp_path / "missing") == 0


def test_clock_of_cpuinfo() -> None:
    assert clock_of_cpuinfo("cpu MHz\t\t: 2000.0\nx\ncpu MHz\t\t: 3000.0\n") == 2.5e9
    assert clock_of_cpuinfo("processor: 0\n") == 0


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


def test_no_library_no_gpu() -> None:
    def load(name: str) -> None:
        assert name == LIBRARY
        raise OSError

    assert read_gpu(load=load) == {}
    assert Gpu(load=load).read_moment() == {}


@pytest.mark.parametrize("module", ["features", "clustering", "reading", "nvml"])
def test_imports_without_torch(module: str) -> None:
    probe = f"import sys, syncline.machines.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0
