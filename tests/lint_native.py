"""Checks the compiled part as ``make lint`` does: clang-format on every file, clang-tidy on every translation unit.

    python tests/lint_native.py

What is checked stands in ``.clang-format`` and ``.clang-tidy``. Both tools and pybind11's headers come with the ``dev``
extra; the standard library's headers are those of the machine's C++ compiler. Ends with status 1 if anything is found.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

ROOT = Path(__file__).parent.parent
NATIVE = ROOT / "src" / "syncline" / "fabric" / "native"
FUZZ = ROOT / "tests" / "fabric" / "native"
TOOLS = Path(sys.executable).parent


def is_tidy(source: Path) -> bool:
    """Run clang-tidy on one file; print what it finds."""
    foreign = ("-isystem", pybind11.get_include(), "-isystem", sysconfig.get_paths()["include"])
    command = (str(TOOLS / "clang-tidy"), "--quiet", str(source), "--", "-std=c++20", f"-I{NATIVE}", *foreign)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="", end="", flush=True)
    return done.returncode == 0


def main() -> None:
    """Check everything, and say how much that was."""
    files = sorted(path for folder in (NATIVE, FUZZ) for path in folder.iterdir() if path.suffix in (".cpp", ".hpp"))
    command = (str(TOOLS / "clang-format"), "--dry-run", "-Werror", *map(str, files))
    is_formatted = subprocess.run(command, check=False).returncode == 0
    sources = [path for path in files if path.suffix == ".cpp"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = list(pool.map(is_tidy, sources))
    print(f"{len(files)} C++ files formatted: {is_formatted}; {sum(passed)} of {len(sources)} sources tidy")
    raise SystemExit(not (is_formatted and all(passed)))


if __name__ == "__main__":
    main()
