"""The front door: answers without torch, and turns errors into one message."""

import subprocess
import sys

import pytest

from syncline.cli.main import COMMANDS
from syncline.cli.run import build_command
from syncline.errors import ConfigurationError


def run_syncline(*args):
    command = [sys.executable, "-m", "syncline", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def modules_after(*args):
    """The modules that ``syncline ARGS`` imported."""
    script = (
        "import sys; from syncline.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print('\\n' + ' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_is_answered_without_torch_or_anything_else_that_is_slow():
    modules = modules_after("--help")
    assert not modules & {"torch", "numpy", "scipy", "rich", "yaml", "asyncio", "syncline.topology"}
    assert not any(module in modules for module, _ in COMMANDS.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself_without_torch(name):
    assert "torch" not in modules_after(name, "--help")


@pytest.mark.parametrize("name", ["run", "demo", "lab", "bench", "doctor"])
def test_commands_that_do_not_compute_explain_themselves_without_numpy(name):
    assert not modules_after(name, "--help") & {"numpy", "scipy", "syncline.fabric"}


def test_doctor_answers_without_what_it_judges():
    assert not modules_after("doctor") & {"torch", "numpy", "isal", "asyncio", "syncline.fabric"}


def test_plan_loads_of_numpy_only_what_it_plans_with():
    slow = {"torch", "scipy", "asyncio", "numpy.random", "numpy.ma", "syncline.fabric", "syncline.runtime"}
    assert not modules_after("plan", "two-racks-5-3") & slow


def test_help_lists_every_command():
    shown = run_syncline("--help").stdout
    assert all(name in shown for name in COMMANDS)


def test_version_is_printed():
    assert run_syncline("--version").stdout.startswith("syncline ")


def test_an_error_is_one_message_with_exit_code_2():
    done = run_syncline("run", "--ranks", "2", "/no/such/script.py")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no script '/no/such/script.py'")
    assert "Traceback" not in done.stderr


def test_an_unknown_command_is_refused():
    assert run_syncline("dance").returncode == 2


def test_how_a_rank_is_started():
    def build(script, **kinds):
        return build_command(script, ("-x", "1"), **({"is_module": False, "is_program": False} | kinds))

    assert build(__file__) == (sys.executable, __file__, "-x", "1")
    assert build("json.tool", is_module=True) == (sys.executable, "-m", "json.tool", "-x", "1")
    assert build("ls", is_program=True) == ("ls", "-x", "1")
    with pytest.raises(ConfigurationError, match="exclude each other"):
        build("ls", is_module=True, is_program=True)
