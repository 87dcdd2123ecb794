"""How torch.distributed comes to know the backend: with torch's own import, and with ours."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IS_KNOWN = "import torch.distributed as dist; assert dist.is_backend_available('syncline')"
NEEDED = {
    "syncline",
    "syncline.late_imports",
    "syncline.backend",
    "syncline.backend.registration",
}
IS_LIGHT = f"import sys; loaded = {{name for name in sys.modules if 'syncline' in name}}; assert loaded == {NEEDED}"


def run_python(code: str, *, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(path)] if path is not None else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT / "src")])}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def entry_points() -> dict[str, dict[str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points: dict[str, dict[str, str]] = project["entry-points"]
    return points


def test_importing_torch_is_enough_and_loads_four_small_modules_of_ours(tmp_path: Path) -> None:
    lines = [f"[{group}]\n{name} = {target}" for group, all_ in entry_points().items() for name, target in all_.items()]
    metadata = tmp_path / "registered-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: registered\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    done = run_python(f"import torch; {IS_KNOWN}; {IS_LIGHT}", path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("order", ["import torch, syncline", "import torch, syncline, syncline.backend.registration"])
def test_importing_us_after_torch_is_enough(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need nothing that torch has not loaded."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # or an installed Syncline would be there before
    torch, _, ours = order.partition(", ")
    before = f"{torch}; import sys, torch.distributed as dist; before = set(sys.modules)"
    done = run_python(f"{before}; import {ours}; {IS_KNOWN}; assert sys.modules.keys() - before == {NEEDED}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_torch_that_cannot_take_it_is_not_in_anybodys_way() -> None:
    code = """
import types, sys, warnings
module = types.ModuleType("torch.distributed.distributed_c10d")
class Backend:
    backend_list = []
    def register_backend(*_, **__): raise TypeError("another signature")
sys.modules[module.__name__] = module
from syncline.backend.registration import register
register()
module.Backend = Backend
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    register()
assert "another signature" in str(caught[0].message)
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
