"""What a documented command must fulfil: each program has a rule, and a program without one is an error.

Here they are only read, by the program's own parser where it has one; :mod:`story` executes those that are cheap.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markdown_pages import ROOT

from syncline.cli.main import COMMANDS, load_command

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
VARIABLES = {"ARGS", *re.findall(r"^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)}
SECRET = "(umask 077;"


def split(line: str) -> list[str]:
    """Return the words of a command line, without its comment."""
    return shlex.split(line, comments=True)


def read(words: Sequence[str], folder: Path) -> Any:
    """Check a command without running it; returns what was parsed of a ``syncline`` command, as click's context.

    ``folder`` holds the files that the page told its reader to write.
    """
    rules = {
        "syncline": lambda: _parse(list(words[1:]), folder),
        "make": lambda: _check_target(words[1:]),
        "pip": lambda: _check_pip(words),
        ".": lambda: _check_equal(words, [".", ".venv/bin/activate"]),
        "sudo": lambda: _check_sudo(words, folder),
        "torchrun": lambda: _check_launcher(words, folder),
        "srun": lambda: _check_launcher(words, folder),
        "mpirun": lambda: _check_launcher(words, folder),
        "mpiexec": lambda: _check_launcher(words, folder),
        "kubectl": lambda: _check_kubectl(words),
        "python": lambda: _check_program(words[1:], folder),
        ".venv/bin/python": lambda: _check_pytest(words[1:]),
        ".venv/bin/pre-commit": lambda: _check_pre_commit(words[1:]),
    }
    while "=" in words[0] and "/" not in words[0].partition("=")[0]:  # a variable for the command
        words = words[1:]
    assert words[0] in rules, f"no rule for {words[0]!r}: add one to tests/docs/commands.py"
    return rules[words[0]]()


def check_names(words: Sequence[str], folder: Path = ROOT) -> None:
    """Check a command that a sentence mentions, which may leave arguments out: subcommands and options must exist."""
    if words[0] in {"make", "python", "pip"}:
        read(words, folder)
        return
    command: Any = None
    for word in words[1:]:
        if command is None:
            assert word in COMMANDS or word.startswith("-"), f"syncline has no command {word!r}"
            command = load_command(word) if word in COMMANDS else None
        elif hasattr(command, "commands"):
            command = command.commands[word]
        elif word == "--":
            return
        elif word.startswith("-"):
            options = {option for parameter in command.params for option in parameter.opts}
            assert word.split("=")[0] in options | {"--help"}, f"{' '.join(words)}: no option {word}"


def _parse(words: list[str], folder: Path) -> Any:
    assert words[0] in COMMANDS, f"syncline has no command {words[0]!r}"
    command, name, rest = load_command(words[0]), words[0], words[1:]
    context = command.make_context(name, rest)
    if hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, words[1:])
        context = command.make_context(name, rest)
    given = context.params
    if script := given.get("script"):
        assert (folder / script).exists() or (ROOT / script).exists(), f"no block of the page is called {script!r}"
    if "command" in given:  # what runs on each host of the lab
        read([word for word in given["command"] if word != "--"], folder)
    topology = given.get("topology")
    if topology and not topology.endswith(".yaml"):
        assert (ROOT / "src/syncline/topology/shipped" / f"{topology}.yaml").exists(), f"no topology {topology!r}"
    return context


def _check_target(words: Sequence[str]) -> None:
    assert words[0] in TARGETS, f"the Makefile has no target {words[0]!r}"
    unknown = [word for word in words[1:] if word.partition("=")[0] not in VARIABLES]
    assert not unknown, f"make takes {', '.join(sorted(VARIABLES))}, not {unknown}"


def _check_pip(words: Sequence[str]) -> None:
    """Only the library itself is installed: a folder, a wheel of this version, or its name with an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    what = rf"\.|dist/syncline-{re.escape(project['version'])}-[a-z0-9_-]+\.whl|syncline(\[(?P<extra>[a-z]+)\])?"
    _check_equal(words[:2], ["pip", "install"])
    for word in filter(lambda word: word not in ("--force-reinstall", "--no-deps"), words[2:]):
        found = re.fullmatch(what, word)
        assert found, f"no rule for pip install {word}"
        extra = found["extra"]
        assert extra is None or extra in project["optional-dependencies"], f"no extra is called {extra!r}"


def _check_equal(words: Sequence[str], expected: Sequence[str]) -> None:
    assert list(words) == list(expected)


def _check_sudo(words: Sequence[str], folder: Path) -> None:
    _check_equal(words[:3], ["sudo", "env", "PATH=$PATH"])
    read(words[3:], folder)


def _check_launcher(words: Sequence[str], folder: Path) -> None:
    scripts = [word for word in words if word.endswith(".py")]
    assert scripts, f"{words[0]} starts no script"
    assert all((folder / script).exists() for script in scripts), f"no block of the page is called {scripts}"


def _check_kubectl(words: Sequence[str]) -> None:
    files = [words[place + 1] for place, word in enumerate(words) if word == "-f"]
    assert all((ROOT / file).exists() for file in files), f"{files} does not exist"
    assert files or words[1:3] == ["create", "secret"], f"no rule for {words}"


def _check_pytest(words: Sequence[str]) -> None:
    _check_equal(words[:2], ["-m", "pytest"])
    assert (ROOT / words[2]).exists(), f"{words[2]} does not exist"
    if "-k" in words:
        wanted = words[words.index("-k") + 1]
        assert any(wanted in path.read_text() for path in (ROOT / words[2]).rglob("*.py")), f"no test {wanted!r}"


def _check_pre_commit(words: Sequence[str]) -> None:
    _check_equal(words, ["install"])
    assert (ROOT / ".pre-commit-config.yaml").exists()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(package.startswith("pre-commit") for package in extras["dev"])


def _check_program(words: Sequence[str], folder: Path) -> None:
    path = next((root / words[0] for root in (ROOT, folder) if (root / words[0]).exists()), None)
    assert path, f"{words[0]} does not exist"
    # a program hands some of its options on to the ranks that it starts, whose script has the same first word
    text = "".join(part.read_text() for part in path.parent.glob(path.stem.split("_")[0] + "*.py"))
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in text, f"{words[0]} has no option {option}"
