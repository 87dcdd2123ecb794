"""Whatever is compiled into the module is in what is fuzzed, or named as what needs an interpreter."""

import re
from pathlib import Path

from fuzz_native import CALL_PYTHON, INPUTS, NATIVE, TARGETS, sources

ROOT = Path(__file__).parents[2]


def test_only_what_calls_python_is_left_out():
    left_out = {path.stem for path in NATIVE.glob("*.cpp")} - {path.stem for path in sources()}
    assert set(CALL_PYTHON) < left_out
    for name in left_out:
        text = NATIVE.joinpath(f"{name}.cpp").read_text()
        assert re.search(r"bindings\.hpp|Python\.h|pybind11|python_reference\.hpp", text), name


def test_every_target_is_run():
    assert {path.stem.removeprefix("fuzz_") for path in TARGETS.glob("fuzz_*.cpp")} - {"main"} == set(INPUTS)


def test_the_sanitizers_build_what_the_module_is_built_of():
    assert 'NATIVE.glob("*.cpp")' in (ROOT / "setup.py").read_text()
    assert '"setup.py"' in (ROOT / "tests" / "sanitize.py").read_text()
