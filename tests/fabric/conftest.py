"""The fabrics that the conformance suite runs on."""

import pytest
from fabric_scenarios import OPENERS, run_scenario


@pytest.fixture(params=list(OPENERS))
def on_fabrics(request, wire):
    """Run ``scenario(fabrics, recorders, mail)`` on a fabric of each kind."""
    return lambda world_size, scenario: run_scenario(OPENERS[request.param], world_size, scenario)
