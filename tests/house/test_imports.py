"""Packages from `errors` to `runtime`, the CLI and the public face answer without importing torch."""

import os
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
    "syncline.cli.launcher.function",
)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_without_torch(module: str) -> None:
    names = "[]" if module == "syncline" else f"[getattr({module}, name) for name in getattr({module}, '__all__', [])]"
    probe = f"import sys, {module}; {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0


def test_the_public_face_names_its_version_and_everything_in_it_exists() -> None:
    import syncline

    assert syncline.__version__.count(".") == 2
    assert all(getattr(syncline, name) is not None for name in dir(syncline))


LATE = (
    "torch.distributed.checkpoint",
    "syncline.discovery.discovery",
    "syncline.runtime.joining.growth",
    "syncline.updates.clustered",
    "syncline.updates.overlapped",
)


def test_a_rank_loads_rules_newcomers_measurements_and_checkpoints_when_it_has_them() -> None:
    probe = f"import sys, syncline; syncline.init, syncline.distribute; print({set(LATE)} & sys.modules.keys())"
    told = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True, timeout=60).stdout
    assert told.strip() == "set()"


MOST_MODULES = {"syncline.init()": 100, 'torch.distributed.init_process_group("syncline", rank=0, world_size=1)': 107}
"""Of ours, all that a rank has loaded when it has joined; each costs every rank of a job about a millisecond."""


@pytest.mark.parametrize("call", MOST_MODULES)
def test_a_rank_that_joins_loads_few_modules_and_none_of_torch(call: str) -> None:
    probe = f"""if True:
    import sys, torch.distributed, syncline
    torch.distributed.HashStore
    before = set(sys.modules)
    {call}
    print(*sys.modules.keys() - before)
    """
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    told = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True, timeout=120, env=environment
    )
    loaded = told.stdout.split()
    ours = [name for name in loaded if name.partition(".")[0] == "syncline"]
    assert len(ours) <= MOST_MODULES[call]
    assert not [name for name in loaded if name.partition(".")[0] in ("torch", "psutil", "statistics")]


@pytest.mark.parametrize("command", ["run", "demo"])
def test_commands_that_send_nothing_themselves_load_no_fabric(command: str) -> None:
    probe = f"import sys, syncline.cli.{command}; sys.exit('syncline.fabric' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0
