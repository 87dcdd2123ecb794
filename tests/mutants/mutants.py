r"""Break the library in one place after the other, and see that a simulation or a test finds each.

    python tests/mutants/mutants.py
    python tests/mutants/mutants.py --quick --only "credit leaks"
    python tests/mutants/mutants.py --table > docs/mutants.md

Each mutant is a changed file in a copy of the library, where C++ is compiled anew; what must find it runs on that copy,
in a process of its own.
First it must pass on an unchanged copy, so that it finds the mutant and nothing else. Ends with 1 if one lives.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import native_builds
from mutant_list import MUTANTS
from mutant_types import Change, Mutant, NamedTest, Simulation

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "src" / "syncline"
TIMEOUT_S = 300.0
FOUND, PASSED = 1, 0
"""How a process ends that found something wrong, or nothing."""
_PLAY = """
import sys
sys.path[:0] = {rooms!r}
import logging
import scenario_{scenario} as scenario
for seed in range({num_seeds}):
    try:
        scenario.JobScenario(seed, {fault!r}).run() if {fault!r} else scenario.play(seed)
    except Exception as error:
        print(f"seed {{seed}}: {{type(error).__name__}}: {{error}}")
        sys.exit({found})
"""
_ROOMS = ("simulation", "runtime", "updates/clustered", "updates/overlapped")

HEAD = """# Mutants

Tests that cannot fail prove nothing. So the library is broken on purpose, in one place after the other, as systems of
this kind have been broken: `make mutants` changes a copy of the code, and each change must be found by a
[simulation](contributing.md#simulate-faults) or a test. Changed C++ is compiled in a folder of its own. The tests try
most mutants in every run, of those in C++ one, and hold this page to the list in `tests/mutants/`.

| mutant | what it breaks | what finds it |
|---|---|---|
"""


class MutantError(Exception):
    """A mutant that cannot be made, or whose test cannot be run."""


def apply(change: Change, library: Path) -> None:
    """Change a file of a copy of the library; the original, to which the copy links, stays as it is."""
    path = library / change.file
    text = path.read_text(encoding="utf-8")
    if text.count(change.before) != 1:
        raise MutantError(
            f"src/syncline/{change.file} holds this {text.count(change.before)} times, not once; change the mutant "
            f"with the code:\n{change.before}"
        )
    path.unlink()
    path.write_text(text.replace(change.before, change.after), encoding="utf-8")


@contextmanager
def copy_of_library(changes: Sequence[Change], *, compiles: bool = True) -> Iterator[Path]:
    """Yield a folder with a package `syncline` that links to the files of this one, all but those that are changed.

    What is compiled of them is compiled, with ``compiles``.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        library = Path(folder) / "syncline"
        _link(LIBRARY, library, {parent for change in changes for parent in (LIBRARY / change.file).parents})
        for change in changes:
            apply(change, library)
        compiled = {change.file for change in changes if change.is_compiled}
        if compiled and compiles:
            native_builds.build(library, compiled)
        yield Path(folder)


def _link(source: Path, target: Path, parents: set[Path]) -> None:
    """Link to what is in a folder, and make folders of their own of those that hold what is to be changed."""
    target.mkdir()
    for entry in source.iterdir():
        if entry in parents:
            _link(entry, target / entry.name, parents)
        else:
            (target / entry.name).symlink_to(entry)


def command_of(finder: Simulation | NamedTest) -> list[str]:
    """Return what looks for a mutant."""
    if isinstance(finder, NamedTest):
        node = f"{finder.file}::{finder.name}"
        return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", node]
    rooms = [str(ROOT / "tests" / room) for room in _ROOMS]
    program = _PLAY.format(
        rooms=rooms, scenario=finder.scenario, fault=finder.fault, num_seeds=finder.num_seeds, found=FOUND
    )
    return [sys.executable, "-c", program]


def look(finder: Simulation | NamedTest, changes: Sequence[Change]) -> tuple[bool, str]:
    """Run what should find these changes; return whether it found something, and what it said."""
    with copy_of_library(changes) as folder:
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTEST_ADDOPTS", None)
        ended = subprocess.run(
            command_of(finder),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if ended.returncode not in (FOUND, PASSED):
        raise MutantError(f"{finder} could not be run: {ended.stdout[-2000:]}")
    return ended.returncode == FOUND, ended.stdout


def judge(mutant: Mutant) -> str:
    """Return what is wrong with the tests, if this mutant lives; empty if it is found."""
    try:
        is_found, _ = look(mutant.found_by, mutant.changes)
    except subprocess.TimeoutExpired:
        return "what should find it does not end"
    except (MutantError, native_builds.NativeBuildError) as error:
        return str(error)
    return "" if is_found else f"{mutant.found_by} does not find it"


def judge_unchanged(finder: Simulation | NamedTest) -> str:
    """Return what is wrong if this finds something where nothing is changed."""
    is_found, text = look(finder, ())
    return f"{finder} fails without a mutant: {text[-2000:]}" if is_found else ""


def table() -> str:
    """Return the documentation's page."""
    rows = (f"| {mutant.name} | {mutant.breaks} | {mutant.found_by} |\n" for mutant in MUTANTS)
    return HEAD + "".join(rows)


def main() -> int:
    """Try all mutants, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--quick", action="store_true", help="those that every run of the tests tries")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="write the documentation's page instead")
    options = parser.parse_args()
    if options.table:
        print(table(), end="")
        return 0
    chosen = [mutant for mutant in MUTANTS if options.only is None or mutant.name in options.only]
    chosen = [mutant for mutant in chosen if mutant.is_quick or not options.quick]
    with ThreadPoolExecutor(options.processes) as pool:
        begun_s = time.monotonic()
        unchanged = [text for text in pool.map(judge_unchanged, {mutant.found_by: None for mutant in chosen}) if text]
        verdicts = list(pool.map(judge, chosen))
    for mutant, verdict in zip(chosen, verdicts, strict=True):
        print(f"{'LIVES' if verdict else 'found':<6} {mutant.name}{': ' if verdict else ''}{verdict}")
    print(*unchanged, sep="\n", end="\n" if unchanged else "")
    num_living = sum(bool(verdict) for verdict in verdicts)
    print(f"{len(chosen) - num_living} of {len(chosen)} mutants found in {time.monotonic() - begun_s:.0f} s")
    return int(bool(num_living or unchanged or not chosen))


if __name__ == "__main__":
    sys.exit(main())
