"""Packages from `errors` to `runtime`, the CLI and the public face answer without importing torch."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = (
    "syncline",
    "syncline.errors",
    "syncline.units",
    "syncline.endpoints",
    "syncline.variables",
    "syncline.observe",
    "syncline.topology",
    "syncline.members",
    "syncline.schedule",
    "syncline.fabric",
    "syncline.runtime",
    "syncline.lab",
    "syncline.report",
    "syncline.machines",
    "syncline.cli.main",
    "syncline.cli.launcher.called",
)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_without_torch(module: str) -> None:
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0


def test_the_public_face_names_its_version_and_everything_in_it_exists() -> None:
    import syncline

    assert syncline.__version__.count(".") == 2
    assert all(getattr(syncline, name) is not None for name in dir(syncline))


def test_a_rank_loads_what_writes_checkpoints_when_it_writes_one() -> None:
    loaded = "'torch.distributed.checkpoint' in sys.modules"
    probe = f"import sys, syncline; syncline.init, syncline.distribute; sys.exit({loaded})"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("command", ["run", "demo"])
def test_commands_that_send_nothing_themselves_load_no_fabric(command: str) -> None:
    probe = f"import sys, syncline.cli.{command}; sys.exit('syncline.fabric' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0
