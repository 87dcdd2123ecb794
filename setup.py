"""The part of the package that is compiled. Where that fails it is left out, and Python does its work, only slower.

``SYNCLINE_STRICT_BUILD=1`` makes every warning of the compiler an error and insists that it compiles: continuous
integration sets it. A user's compiler may know warnings that ours does not, and must not fail on them.
"""

import os
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

NATIVE = Path("src/syncline/fabric/native")
IS_STRICT = os.environ.get("SYNCLINE_STRICT_BUILD") == "1"
# Additions are fast where loops become vectors, which not every compiler does at -O2. What a sanitizer watches is not
# meant to be fast, and takes twice as long to compile at -O3.
LEVEL = "-O1" if "-fsanitize" in os.environ.get("CXXFLAGS", "") else "-O3"
OPTIONS = [LEVEL, "-ffp-contract=off", *(["-Wall", "-Wextra", "-Werror"] if IS_STRICT else [])]

ParallelCompile().install()  # as many files at once as there are processors
setup(
    ext_modules=[
        Pybind11Extension(
            "syncline.fabric._native",
            sorted(map(str, NATIVE.glob("*.cpp"))),
            depends=sorted(map(str, NATIVE.glob("*.hpp"))),
            extra_compile_args=OPTIONS,
            cxx_std=20,
            optional=not IS_STRICT,
        )
    ]
)
