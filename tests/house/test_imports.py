"""Rooms from `errors` to `runtime`, the CLI and the public face answer without importing torch."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = (
    "syncline",
    "syncline.errors",
    "syncline.units",
    "syncline.observe",
    "syncline.topology",
    "syncline.schedule",
    "syncline.fabric",
    "syncline.runtime",
    "syncline.lab",
    "syncline.report",
    "syncline.cli.main",
)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_without_torch(module: str) -> None:
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0
