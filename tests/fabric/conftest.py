"""The fabrics that the conformance suite runs on, and the loops that they run on."""

import asyncio

import loops
import pytest
from fabric_scenarios import OPENERS, run_scenario


@pytest.fixture(params=["served", "any loop"])
def on_each_loop(request, monkeypatch):
    """Open TCP fabrics on the loop that serves their transports, and on one that only hears when they are ready."""
    if request.param == "any loop":
        monkeypatch.setattr(loops, "factory", asyncio.new_event_loop)


@pytest.fixture(params=[name for name in OPENERS if "memory" not in name])
def on_sockets(request, on_each_loop):
    """Run ``scenario(fabrics, recorders, mail)`` on fabrics of each kind that has connections."""
    return lambda world_size, scenario: run_scenario(OPENERS[request.param], world_size, scenario)


@pytest.fixture(params=list(OPENERS))
def on_fabrics(request, on_each_loop):
    """Run ``scenario(fabrics, recorders, mail)`` on a fabric of each kind."""
    return lambda world_size, scenario: run_scenario(OPENERS[request.param], world_size, scenario)
