"""The part of the package that is compiled, and what compiles it: no rank starts without it.

A C++ compiler of the machine does it: ``$CXX``, the one that Python was built with, or another that is found. Without
one, pip brings zig, which is a compiler in a wheel. What zig makes runs wherever PyTorch's own wheels do, so wheels are
made by it: ``SYNCLINE_BUILD_FOR=linux-aarch64`` (or ``linux-x86_64``) takes it on any machine.

``SYNCLINE_STRICT_BUILD=1`` makes every warning of the compiler an error: continuous integration sets it. A user's
compiler may know warnings that ours does not, and must not fail on them.
"""

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import PlatformError

NATIVE = Path("src/syncline/fabric/native")
PROCESSORS = {"linux-x86_64": "x86_64", "linux-aarch64": "aarch64"}
OLDEST_GLIBC = "2.28"  # that of PyTorch's wheels
ZIG = "ziglang>=0.17,<0.18"
ASKED = os.environ.get("SYNCLINE_BUILD_FOR", "")
PLATFORM = ASKED or sysconfig.get_platform()
IS_STRICT = os.environ.get("SYNCLINE_STRICT_BUILD") == "1"
# Additions are fast where loops become vectors, which not every compiler does at -O2. What a sanitizer watches is not
# meant to be fast, and takes twice as long to compile at -O3.
LEVEL = "-O1" if "-fsanitize" in os.environ.get("CXXFLAGS", "") else "-O3"
OPTIONS = [LEVEL, "-ffp-contract=off", *(["-Wall", "-Wextra", "-Werror"] if IS_STRICT else [])]


def find_compiler() -> str | None:
    """Return the command of this machine's C++ compiler."""
    if ASKED:
        return None
    if named := os.environ.get("CXX"):
        return named
    usual = (sysconfig.get_config_var("CXX") or "c++", "g++", "c++", "clang++")
    return next((command for command in usual if shutil.which(shlex.split(command)[0])), None)


def take_zig(processor: str) -> None:
    """Let zig compile and link, without the options that are for the compiler of this Python."""
    zig = f"{shlex.quote(sys.executable)} -m ziglang c++ -target {processor}-linux-gnu.{OLDEST_GLIBC}"
    os.environ |= {"CXX": zig, "LDCXXSHARED": f"{zig} -shared -s", "CXXFLAGS": "-DNDEBUG", "LDFLAGS": ""}
    if ASKED:
        os.environ["SETUPTOOLS_EXT_SUFFIX"] = f".{sys.implementation.cache_tag}-{processor}-linux-gnu.so"


class BuildNative(build_ext):
    """Says what is missing before it compiles."""

    def run(self) -> None:
        """Compile, or say why that cannot be."""
        processor = PROCESSORS.get(PLATFORM)
        if processor is None:
            raise PlatformError(f"Syncline runs on Linux, on x86-64 and aarch64; this is {PLATFORM}")
        headers = Path(sysconfig.get_path("include"), "Python.h")
        if not headers.exists():
            raise PlatformError(f"there is no {headers}; install Python's headers (Debian: apt install python3-dev)")
        if compiler := find_compiler():
            os.environ["CXX"] = compiler
        elif importlib.util.find_spec("ziglang"):
            take_zig(processor)
        else:
            raise PlatformError(f"there is no C++ compiler; this brings one: {sys.executable} -m pip install '{ZIG}'")
        super().run()


ParallelCompile().install()  # as many files at once as there are processors
setup(
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"plat_name": ASKED}, "build": {"build_base": f"build/{ASKED}"}} if ASKED else {},
    setup_requires=[] if find_compiler() else [ZIG],
    ext_modules=[
        Pybind11Extension(
            "syncline.fabric._native",
            sorted(map(str, NATIVE.glob("*.cpp"))),
            depends=sorted(map(str, NATIVE.glob("*.hpp"))),
            extra_compile_args=OPTIONS,
            cxx_std=20,
        )
    ],
)
