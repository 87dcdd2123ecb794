"""PyTorch's own tests of ``torch.distributed``, from its wheel, on this backend: ``torch_suite.py [NAME_PART ...]``.

Tests that PyTorch keeps for gloo, or for MPI, because no other backend could do what they ask for are asked here too.
Prints a line for each test that failed or was skipped, with the reason, and the three counts; the status is 1 if one
failed. Needs ``expecttest``, as those tests do. Ranks are forked, not spawned, so as not to import torch a thousand
times; ``WORLD_SIZE`` says how many (default: 4).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any

os.environ["BACKEND"] = "syncline"
os.environ.setdefault("WORLD_SIZE", "4")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="torch-suite-")

import torch
from torch.testing._internal.common_distributed import DistTestCases

import syncline  # noqa: F401 - registers the backend

FOLDER = tempfile.tempdir = os.environ["TEMP_DIR"]
"""What the tests leave is removed in the end."""
MODULE = "torch.testing._internal.distributed.distributed_test"
WIDENED = {
    'BACKEND != "gloo"': 'BACKEND not in ("gloo", "syncline")',
    'BACKEND != "mpi"': 'BACKEND not in ("mpi", "syncline")',
    'available({"gloo"})': 'available({"gloo", "syncline"})',
    '" (Timed out|closed|timeout) "': '"deadline"',
    'if BACKEND == "mpi" or BACKEND == "gloo":': 'if BACKEND in ("mpi", "gloo", "syncline"):',
}


OF_GLOO_ALONE = "test_monitored_barrier"
"""These call ``dist.monitored_barrier``, which takes gloo's groups alone, and ask for gloo's words."""


def load_tests_for_all() -> Any:
    """Return the module of tests, whose conditions on the backend's name know this one."""
    for feature in ("ddp", "subgroup", "gpu", "cuda", "plugin"):
        DistTestCases.backend_feature[feature].add("syncline")
    found = importlib.util.find_spec(MODULE)
    assert found is not None
    assert found.origin is not None, "it is in the wheel"
    text = Path(found.origin).read_text(encoding="utf-8")
    for before, after in WIDENED.items():
        assert before in text, f"PyTorch's tests do not say {before} any more"
        text = text.replace(before, after)
    module = importlib.util.module_from_spec(found)
    sys.modules[MODULE] = module
    exec(compile(text, found.origin, "exec", dont_inherit=True), vars(module))
    return module


distributed_test = load_tests_for_all()


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All of them."""

    def setUp(self) -> None:
        if OF_GLOO_ALONE in self.id():
            self.skipTest("dist.monitored_barrier takes gloo's groups alone")
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Counts(unittest.TestResult):
    """What became of each test."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[str] = []

    def addSuccess(self, test: Any) -> None:  # noqa: N802 - unittest's name
        self.passed.append(_name(test))

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802 - unittest's name
        super().addSkip(test, reason)
        print(f"skipped {_name(test)}: {reason}", flush=True)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802 - unittest's name
        super().addError(test, err)
        print(f"FAILED {_name(test)}: {self.errors[-1][1]}", flush=True)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802 - unittest's name
        super().addFailure(test, err)
        print(f"FAILED {_name(test)}: {self.failures[-1][1]}", flush=True)


def _name(test: Any) -> str:
    return str(test.id().rsplit(".", 1)[-1])


def main(parts: list[str]) -> int:
    """Run the tests whose names contain one of ``parts``, or all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = unittest.TestLoader().getTestCaseNames(TorchSuite)
    chosen = [name for name in names if not parts or any(part in name for part in parts)]
    counts = Counts()
    unittest.TestSuite(TorchSuite(name) for name in chosen).run(counts)
    num_failed = len({_name(test) for test, _ in counts.errors + counts.failures})
    print(f"passed {len(counts.passed)}, skipped {len(counts.skipped)}, failed {num_failed}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    sys.exit(status)
