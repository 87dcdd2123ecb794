"""The part of the package that is compiled. Where that fails it is left out, and Python does its work, only slower."""

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

NATIVE = "src/syncline/fabric/native"

setup(
    ext_modules=[
        Pybind11Extension(
            "syncline.fabric._native",
            [f"{NATIVE}/{name}.cpp" for name in ("module", "exchange", "heartbeat", "calls", "slices")],
            depends=[
                f"{NATIVE}/{name}.hpp"
                for name in ("calls", "crc32", "exchange", "frames", "grants", "heartbeat", "slice_order", "slices")
            ],
            cxx_std=17,
            optional=True,
        )
    ]
)
