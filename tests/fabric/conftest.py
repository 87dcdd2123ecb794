"""The fabrics that the conformance suite runs on, and the loops that transports run on."""

import asyncio

import loops
import pytest
from fabric_scenarios import AUTHENTICATED, OPENERS, run_scenario

from syncline.fabric.transport_sets import VARIABLE
from transports import ON_ANY_LOOP, TRANSPORTS


@pytest.fixture(params=[*TRANSPORTS, *ON_ANY_LOOP])
def transport(request, monkeypatch):
    """Open TCP fabrics with transports of each kind; compiled ones also on a loop that does not serve them."""
    monkeypatch.setenv(VARIABLE, (TRANSPORTS | ON_ANY_LOOP)[request.param])
    if request.param in ON_ANY_LOOP:
        monkeypatch.setattr(loops, "factory", asyncio.new_event_loop)
    return request.param


@pytest.fixture(params=list(OPENERS))
def on_fabrics(request, transport):
    """Run ``scenario(fabrics, recorders, mail)`` on a fabric of each kind."""
    if request.param == AUTHENTICATED and "native" not in TRANSPORTS:
        pytest.skip("compiled code authenticates frames, and it is not installed")
    return lambda world_size, scenario: run_scenario(OPENERS[request.param], world_size, scenario)
