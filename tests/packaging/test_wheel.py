"""What somebody else gets: a wheel from the source archive, in an environment with neither compiler nor clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from sanitize import copy_sources
from syncline.fabric import _native

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
SCRIPT = """
from pathlib import Path
import syncline, torch
fleet = syncline.init()
model = torch.nn.Linear(8, 1)
model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    model(torch.full((4, 8), float(fleet.rank))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = fleet.all_gather_object(model.weight.tolist())
assert weights[0] == weights[1]
print("trained with", Path(syncline.__file__).parent)
"""
HOOK = "import setuptools.build_meta as backend; print(backend.{}({!r}))"


def run(*words: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the test's own environment, or of a new one, which ends well or badly."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("SYNCLINE", "PYTHONPATH"))}
    return subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=mine | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def pip_wheel(source: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel with the setuptools and pybind11 that are here: nothing is fetched."""
    pip = (sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    return run(*pip, "--wheel-dir", folder, source, folder=folder, **environment)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone holds of the library."""
    folder = tmp_path_factory.mktemp("tree")
    copy_sources(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip makes of the source archive, with what was compiled when these tests were set up."""
    folder = tmp_path_factory.mktemp("wheel")
    made = run(sys.executable, "-c", HOOK.format("build_sdist", str(folder)), folder=tree)
    assert made.returncode == 0, made.stdout
    with tarfile.open(next(folder.glob("syncline-*.tar.gz"))) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    built = unpacked / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/syncline/fabric"
    built.mkdir(parents=True)
    shutil.copy(_native.__file__, built)  # newer than its sources, so that nobody compiles it for minutes
    made = pip_wheel(unpacked, folder)
    assert made.returncode == 0, made.stdout
    return next(folder.glob("syncline-*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel alone; what it depends on is seen where the tests have it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin/python")
    installed = run(*pip, "install", "--no-deps", "--no-index", wheel, folder=folder)
    assert installed.returncode == 0, installed.stdout
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    seen = [path for path in sys.path if path.endswith("site-packages")]
    Path(packages, "dependencies.pth").write_text("\n".join(seen) + "\n")
    return folder


def test_the_wheel_holds_what_is_compiled_and_neither_sources_of_it_nor_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert f"syncline/fabric/_native{suffix}" in names
    assert {"syncline/py.typed", "syncline/demo/__main__.py", "syncline/topology/shipped/demo-1-3.yaml"} <= set(names)
    assert not [name for name in names if not name.startswith(("syncline/", "syncline-")) or name.endswith(".cpp")]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["run", "--ranks", "2", "train.py"], "trained with {environment}"),
        (["demo", "--ranks", "2", "--steps", "2"], "All 2 ranks hold the same parameters"),
        (["doctor"], "compiled part"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_it_trains_without_compiler_and_clone(command: list[str], said: str, environment: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(environment / "bin/syncline", *command, folder=tmp_path, PATH=f"{environment}/bin")
    assert done.returncode == 0, done.stdout
    assert said.format(environment=environment) in done.stdout


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"PATH": "/nowhere"}, f"there is no C++ compiler; this brings one: {sys.executable} -m pip install 'ziglang"),
        (
            {"SYNCLINE_BUILD_FOR": "linux-riscv64"},
            "Syncline runs on Linux, on x86-64 and aarch64; this is linux-riscv64",
        ),
    ],
    ids=["no compiler", "another platform"],
)
def test_what_cannot_be_compiled_says_so(changes: dict[str, str], said: str, tree: Path, tmp_path: Path) -> None:
    hidden = {"CXX": "", "PYTHONPATH": str(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ziglang'] = None\n")
    failed = pip_wheel(tree, tmp_path, **hidden, **changes)
    assert failed.returncode == 1
    assert f"error: {said}" in " ".join(failed.stdout.split())


@pytest.mark.parametrize(("path", "is_needed"), [("/nowhere", True), (os.environ["PATH"], False)])
def test_pip_brings_zig_where_there_is_no_compiler(path: str, is_needed: bool, tree: Path) -> None:
    asked = run(sys.executable, "-c", HOOK.format("get_requires_for_build_wheel", None), folder=tree, PATH=path, CXX="")
    assert asked.returncode == 0, asked.stdout
    assert ("ziglang>=" in asked.stdout.splitlines()[-1]) == is_needed
