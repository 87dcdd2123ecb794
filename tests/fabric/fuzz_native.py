"""Builds the fuzz targets of ``native/`` with address and undefined-behaviour sanitizers, and runs them on many seeds.

    python tests/fabric/fuzz_native.py [--target NAME] [--inputs N] [--first-seed S] [--coverage]

They feed the compiled parsers, the checksums, the grant scheduler and the slice executor directly: no sockets, no
interpreter. An input is a seed, and the first that breaks a rule ends the run with status 1 and is named.
``--coverage`` builds without
sanitizers instead, and prints which share of the lines of each file was run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TARGETS = Path(__file__).parent / "native"
NATIVE = Path(__file__).parents[2] / "src" / "syncline" / "fabric" / "native"
CALL_PYTHON = ("module", "python_reference")
"""With all whose names begin with ``bind_``."""
INPUTS = {"checksums": 20_000, "frames": 20_000, "grants": 5_000, "slices": 1_000}
"""How many take some seconds each."""
FOUND = {"slices": 2617}
"""Seeds beyond these that found a fault once: a call that had begun all its slices was held by the order for good."""
WATCHED = ("-O2", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
COUNTED = ("-O0", "--coverage")


def sources() -> list[Path]:
    """Return the targets, and of the transport all that runs without an interpreter."""
    own = [p for p in NATIVE.glob("*.cpp") if p.stem not in CALL_PYTHON and not p.stem.startswith("bind_")]
    return sorted(TARGETS.glob("*.cpp")) + sorted(own)


def build(folder: Path, flags: Sequence[str]) -> Path:
    """Return the program."""
    includes = (f"-I{NATIVE}", f"-I{sysconfig.get_paths()['include']}")
    compiler = ("g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-D_GLIBCXX_ASSERTIONS", *includes, *flags)

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        subprocess.run([*compiler, "-c", str(source), "-o", str(made)], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources()))
    program = folder / "fuzz"
    subprocess.run(["g++", *flags, *map(str, objects), "-o", str(program)], check=True)
    return program


def run(program: Path, target: str, inputs: int, first_seed: int) -> bool:
    """Run one target; return whether it kept all rules."""
    options = os.environ | {"ASAN_OPTIONS": "abort_on_error=1:detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = (str(program), target, str(inputs), str(first_seed))
    return subprocess.run(command, env=options, check=False).returncode == 0


def print_coverage(folder: Path) -> None:
    """Print which share of the lines of each file of the transport was run."""
    told = subprocess.run(
        ["gcov", "-n", *(str(path) for path in folder.glob("*.gcda"))],
        cwd=folder, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = re.findall(rf"File '{re.escape(str(NATIVE))}/(.+)'\nLines executed:([\d.]+)% of (\d+)", told)
    shares: dict[str, tuple[float, int]] = {}
    for name, share, lines in found:
        shares[name] = max(shares.get(name, (0.0, 0)), (float(share), int(lines)))
    for name, (share, lines) in sorted(shares.items()):
        print(f"{name:28} {share:5.1f} % of {lines} lines")


def main() -> None:
    """Build, and run the targets that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=list(INPUTS), action="append", help="which (default: all)")
    parser.add_argument("--inputs", type=int, help="how many of each (default: some seconds' worth)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--coverage", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="syncline-fuzz-") as name:
        program = build(Path(name), COUNTED if asked.coverage else WATCHED)
        passed = [
            run(program, target, asked.inputs or INPUTS[target], asked.first_seed) for target in asked.target or INPUTS
        ]
        passed += [
            run(program, target, 1, seed) for target, seed in FOUND.items() if target in (asked.target or INPUTS)
        ]
        if asked.coverage:
            print_coverage(Path(name))
    raise SystemExit(not all(passed))


if __name__ == "__main__":
    main()
