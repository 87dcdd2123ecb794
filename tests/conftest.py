"""What every test starts with: one thread for arithmetic (two cores are shared by all ranks) and a printed seed."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from syncline.fabric.wirings import VARIABLE
from wires import WIRES

hypothesis.settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("house")


def pytest_report_header():
    """Say which wires are tested: without a compiler it is one."""
    return f"wires of TCP fabrics: {', '.join(WIRES)}"


@pytest.fixture(params=list(WIRES))
def wire(request, monkeypatch):
    """Open TCP fabrics, here and in processes that are started, with wires of each kind that is installed."""
    monkeypatch.setenv(VARIABLE, WIRES[request.param])
    return request.param
