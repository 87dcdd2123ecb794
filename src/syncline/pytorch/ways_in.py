"""Ways into a job that runs: where this rank listens for newcomers, and how it comes in itself if it is one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from syncline.elastic.entry import Entry
from syncline.elastic.growth import Growth
from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions
from syncline.pytorch.connecting import choose_fabric_options, with_secret
from syncline.pytorch.environment import Environment
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.fleet_growth import FleetGrowth
from syncline.pytorch.limits import Limits
from syncline.runtime import CommunicationLoop
from syncline.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What is opened before a rank connects: a newcomer asks first, and takes over how the job behaves."""

    environment: Environment
    options: FabricOptions
    service: Growth | None = None
    entry: Entry | None = None

    @classmethod
    def open(cls, environment: Environment, options: FabricOptions, stack: ExitStack) -> Ways:
        """Listen, if a port was asked for, and ask to come in, if a member was named; ``stack`` undoes it.

        Raises ``HandshakeError`` with the reason where a newcomer is refused.
        """
        if not environment.join and environment.join_port is None:
            return cls(environment=environment, options=options)
        service = _listen(environment, options)
        stack.callback(service.close)
        if not environment.join:
            return cls(environment=environment, options=options, service=service)
        loop = CommunicationLoop(native=environment.native)
        loop.start()
        stack.callback(loop.stop)
        address, _ = service.join_address
        entry = Entry(
            loop=loop,
            options=options,
            own_address=address,
            machine=environment.host,
            join_address=service.join_address,
            addresses=list(environment.join),
            topology=_text_of(environment.topology),
        )
        terms = entry.ask().terms
        environment = _adopted(replace(environment, topology=None), terms)
        options = choose_fabric_options(environment)
        service.adopt(options, terms)
        entry.options = options
        return cls(environment=environment, options=options, service=service, entry=entry)

    def growth_of(self, fleet: Fleet) -> FleetGrowth:
        """Return the fleet's part in growth, which its close ends."""
        growth = FleetGrowth(
            fleet,
            machine=self.environment.host,
            listen=lambda: _listen(self.environment, self.options),
            service=self.service,
            entry=self.entry,
        )
        fleet.on_close(lambda _: growth.close())
        return growth


def _listen(environment: Environment, options: FabricOptions) -> Growth:
    return Growth(
        with_secret(options), machine=environment.host, terms=_terms(environment), port=environment.join_port or 0
    )


def _terms(environment: Environment) -> dict[str, Any]:
    limits = environment.limits
    return {
        "authenticates_frames": environment.authenticates_frames,
        "connect_timeout_s": limits.connect_timeout_s,
        "silence_s": limits.silence_s,
        "timeout_s": limits.timeout_s,
        "stall_s": limits.stall_s,
    }


def _adopted(environment: Environment, terms: Any) -> Environment:
    names = ("connect_timeout_s", "silence_s", "timeout_s", "stall_s")
    limits = Limits(**{name: float(terms[name]) for name in names})
    return replace(environment, limits=limits, authenticates_frames=bool(terms["authenticates_frames"]))


def _text_of(topology: Any) -> str | None:
    """Return the tree that a newcomer brings for the larger job, as text."""
    if topology is None:
        return None
    chosen = topology if isinstance(topology, Topology) else Topology.load(topology)
    if chosen.helpers:
        raise ConfigurationError("A job with helpers does not grow; write 'gateway: one' in the topology")
    return chosen.to_yaml()
