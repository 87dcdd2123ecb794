"""The fabrics that the conformance suite runs on, and the loops that wires run on."""

import asyncio

import loops
import pytest
from fabric_scenarios import AUTHENTICATED, OPENERS, run_scenario

from syncline.fabric.wirings import VARIABLE
from wires import WIRES

ON_ANY_LOOP = {"native on any loop": WIRES["native"]} if "native" in WIRES else {}


@pytest.fixture(params=[*WIRES, *ON_ANY_LOOP])
def wire(request, monkeypatch):
    """Open TCP fabrics with wires of each kind; compiled ones also on a loop that does not serve them."""
    monkeypatch.setenv(VARIABLE, (WIRES | ON_ANY_LOOP)[request.param])
    if request.param in ON_ANY_LOOP:
        monkeypatch.setattr(loops, "factory", asyncio.new_event_loop)
    return request.param


@pytest.fixture(params=list(OPENERS))
def on_fabrics(request, wire, monkeypatch):
    """Run ``scenario(fabrics, recorders, mail)`` on a fabric of each kind."""
    if request.param == AUTHENTICATED:
        monkeypatch.delenv(VARIABLE)  # nobody asks for compiled wires; where they could be used, they are not
    return lambda world_size, scenario: run_scenario(OPENERS[request.param], world_size, scenario)
