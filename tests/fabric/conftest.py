"""The fabrics that the conformance suite runs on, and the wires that they may have."""

import pytest
from fabric_scenarios import OPENERS, run_scenario

from syncline.fabric.wirings import VARIABLE, NativeWiring

WIRES = {"python": "0"} if NativeWiring is None else {"python": "0", "native": "1"}


@pytest.fixture(params=list(WIRES))
def wire(request, monkeypatch):
    """Open TCP fabrics, here and in processes that are started, with wires of each kind that is installed."""
    monkeypatch.setenv(VARIABLE, WIRES[request.param])
    return request.param


@pytest.fixture(params=list(OPENERS))
def on_fabrics(request, wire):
    """Run ``scenario(fabrics, recorders, mail)`` on a fabric of each kind."""
    return lambda world_size, scenario: run_scenario(OPENERS[request.param], world_size, scenario)
