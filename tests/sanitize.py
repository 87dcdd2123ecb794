"""Runs tests on the compiled module as g++'s sanitizers see it: what it reads, writes and shares that is not its own.

    python tests/sanitize.py [--kind address|thread] [--quick] [arguments of pytest]

First the fuzz targets run for some seconds (``fabric/fuzz_native.py``; not if tests are named). Each kind builds the
package from this tree in a temporary folder, with address and undefined-behaviour sanitizers or with that of threads,
and runs the tests of the fabric and the runtime on it, or those that are named; with ``--quick``, a part of them, for
continuous integration. Every process that a test starts is watched too. The interpreter is not built for it: what it
allocates and never frees is its own affair (no check for leaks), and only compiled code of ours is looked at for races.
Ends with status 1 if a test fails or a sanitizer reports anything.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "src")
TESTS = ("tests/fabric", "tests/runtime")
NO_TESTS = 5
"""What pytest ends with where the options leave none."""
FUZZ = ROOT / "tests" / "fabric" / "fuzz_native.py"
QUICK = {
    "address": (
        "tests/fabric/test_compiled.py",
        "tests/fabric/test_grants.py",
        "tests/fabric/test_data_connection.py",
        "tests/fabric/test_heartbeat.py",
        "tests/fabric/test_violations.py",
        "tests/runtime/test_slice_order.py",
        "tests/runtime/test_engine_conformance.py",
        "-k=not python and not without_it",  # these run no compiled code
    ),
    "thread": (
        "tests/fabric/test_heartbeat.py",
        "tests/fabric/test_liveness.py",
        "tests/runtime/test_communicator_tcp.py",
    ),
}
"""What finds most in little time: parsers and memory; the heartbeat's thread, and the loop's beside that of a user."""
FLAGS = {"address": "-fsanitize=address,undefined -fno-sanitize-recover=undefined", "thread": "-fsanitize=thread"}
RUNTIMES = {"address": ("libasan.so", "libubsan.so", "libstdc++.so.6"), "thread": ("libtsan.so", "libstdc++.so.6")}
OPTIONS = {
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0:log_path={log}",
        "UBSAN_OPTIONS": "print_stacktrace=1:log_path={log}",
    },
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0:exitcode=0:log_path={log}"},
}


def copy_sources(tree: Path) -> None:
    """Copy into a folder what the package is built from."""
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, tree / name)


def build(kind: str, folder: Path) -> Path:
    """Return a folder in which the package lies with a compiled module that is watched."""
    tree = folder / "tree"
    tree.mkdir()
    copy_sources(tree)
    flags = f"{FLAGS[kind]} -g -fno-omit-frame-pointer"
    environment = os.environ | {
        "CFLAGS": flags,
        "CXXFLAGS": flags,
        "LDFLAGS": FLAGS[kind],
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "SYNCLINE_STRICT_BUILD": "",  # sanitized code makes the compiler warn of what is none
    }
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps")
    subprocess.run([*pip, "--wheel-dir", str(folder), str(tree)], env=environment, check=True)
    (wheel,) = folder.glob("*.whl")
    package = folder / "package"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(package)
    return package


def watched(kind: str, package: Path, log: Path) -> dict[str, str]:
    """Return the environment in which Python runs the package that is watched."""
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in RUNTIMES[kind]
    ]
    options = {name: text.format(log=log) for name, text in OPTIONS[kind].items()}
    return os.environ | options | {"LD_PRELOAD": " ".join(found), "PYTHONPATH": str(package), "PYTHONMALLOC": "malloc"}


def run(kind: str, arguments: list[str], tests: tuple[str, ...]) -> bool:
    """Build and test one kind; return whether all is well."""
    print(f"== {kind} sanitizer: building", flush=True)
    with tempfile.TemporaryDirectory(prefix=f"syncline-{kind}-") as name:
        folder = Path(name)
        environment = watched(kind, build(kind, folder), folder / "report")
        # Where addresses are random in more bits than it knows, the thread sanitizer does not start.
        python = ("setarch", "-R", sys.executable)
        where = "import syncline.fabric._native as native; print(native.__file__)"
        seen = subprocess.run([*python, "-c", where], env=environment, capture_output=True, text=True, check=False)
        if not seen.stdout.startswith(name):
            raise SystemExit(f"the {kind} sanitizer does not start here: {seen.stdout}{seen.stderr}")
        pytest = (*python, "-m", "pytest", "-p", "no:cacheprovider", *arguments)
        ends = [
            subprocess.run([*pytest, *one], env=environment, cwd=ROOT, check=False).returncode
            for one in shares(kind, tests)
        ]
        is_passed = set(ends) <= {0, NO_TESTS} and 0 in ends
        reports = sorted(folder.glob("report*"))
        for report in reports:
            print(report.read_text(errors="replace"), flush=True)
        print(
            f"== {kind} sanitizer: tests {'pass' if is_passed else 'FAIL'}, {len(reports)} processes reported",
            flush=True,
        )
        return is_passed and not reports


def shares(kind: str, tests: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Divide tests among processes: the thread sanitizer fails by itself in one that has begun some 10,000 threads."""
    if kind != "thread":
        return [tests]
    folders = [ROOT / name for name in tests]
    files = [
        path for folder in folders for path in ([folder] if folder.is_file() else sorted(folder.glob("test_*.py")))
    ]
    return [(str(path.relative_to(ROOT)),) for path in files] or [()]


def main() -> None:
    """Run the kinds that were asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=list(FLAGS), action="append", help="which sanitizer (default: all)")
    parser.add_argument("--quick", action="store_true", help="a part of the tests, for continuous integration")
    asked, arguments = parser.parse_known_args()
    is_named = any(Path(ROOT, argument.split("::")[0]).exists() for argument in arguments)
    is_fuzz_passed = is_named or subprocess.run([sys.executable, str(FUZZ)], check=False).returncode == 0
    tests = {kind: () if is_named else QUICK[kind] if asked.quick else TESTS for kind in asked.kind or FLAGS}
    results = [run(kind, arguments, tests[kind]) for kind in tests]
    raise SystemExit(not (is_fuzz_passed and all(results)))


if __name__ == "__main__":
    main()
