"""Jobs in network namespaces need root. Without it they fail, and say so; they are never skipped."""

import os

import pytest
from soak_forker import Forker
from soak_network import open_network
from soak_oracle import Oracle


@pytest.fixture(scope="module")
def forker():
    if os.geteuid() != 0:
        pytest.fail("these tests make network namespaces and need root; run them with sudo (they are never skipped)")
    forker = Forker()
    yield forker
    forker.end()


@pytest.fixture(scope="module")
def network(forker):
    with open_network() as network:
        yield network


@pytest.fixture(scope="module")
def oracle():
    """One for all jobs, so that their bits are compared too."""
    return Oracle()
