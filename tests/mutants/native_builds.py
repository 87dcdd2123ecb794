"""Compiled mutants: the changed files are compiled in a copy of the library, and linked with what is the same.

Nothing is optimized, so a mutant of one source takes seconds. What did not change is compiled once in a process.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pybind11

ROOT = Path(__file__).parents[2]
NATIVE = "fabric/native"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
_COMPILER = ("g++", "-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden")
_INCLUDES = ("-isystem", pybind11.get_include(), "-isystem", sysconfig.get_paths()["include"])
_lock = threading.Lock()


class NativeBuildError(Exception):
    """C++ code that does not compile."""


def build(library: Path, changed: Iterable[str]) -> None:
    """Compile the extension module anew in ``library``, a copy of which only the files ``changed`` are others."""
    affected = {ROOT / "src" / "syncline" / file for file in changed}
    made = library / NATIVE / "objects"
    made.mkdir()
    # first what was changed itself: an error in it is told at once
    chosen = {file.name: _compile(library / NATIVE / file.name, made) for file in affected if file.suffix == ".cpp"}
    with _lock:
        objects, _ = _objects()
    for name, same in objects.items():
        if name not in chosen:
            is_affected = not affected.isdisjoint(_dependencies(same))
            chosen[name] = _compile(library / NATIVE / name, made) if is_affected else same
    module = library / "fabric" / f"_native{SUFFIX}"
    module.unlink(missing_ok=True)
    _run([_COMPILER[0], "-shared", *map(str, chosen.values()), "-o", str(module)])


@cache
def _objects() -> tuple[dict[str, Path], tempfile.TemporaryDirectory[str]]:
    """Compile all sources as they are; return the object of each, and their folder, which goes with this process."""
    folder = tempfile.TemporaryDirectory(prefix="native-")
    sources = sorted((ROOT / "src" / "syncline" / NATIVE).glob("*.cpp"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, Path(folder.name)), sources))
    return {source.name: made for source, made in zip(sources, objects, strict=True)}, folder


def _compile(source: Path, folder: Path) -> Path:
    made = folder / f"{source.stem}.o"
    _run([*_COMPILER, *_INCLUDES, "-MMD", "-c", str(source), "-o", str(made)])
    return made


def _dependencies(made: Path) -> set[Path]:
    """Return what an object was made of, as the compiler wrote it beside it."""
    return {Path(name) for name in made.with_suffix(".d").read_text(encoding="utf-8").split()[1:] if name != "\\"}


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ended.returncode:
        raise NativeBuildError(ended.stdout[-2000:])
