"""Ways into a job that runs: where this rank listens for newcomers, and how it comes in itself if it is one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions
from syncline.pytorch.connecting import with_address, with_secret
from syncline.pytorch.environment import UNWRITTEN, Environment
from syncline.pytorch.epochs import FleetGrowth
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.limits import with_times
from syncline.runtime import CommunicationLoop, joining
from syncline.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What is opened before a rank connects: a newcomer asks first, and takes over how the job behaves."""

    environment: Environment
    service: joining.Growth | None = None
    entry: joining.Entry | None = None

    @classmethod
    def open(cls, environment: Environment, stack: ExitStack) -> Ways:
        """Listen, if a port was asked for, and ask to come in, if a member was named; ``stack`` undoes it.

        Raises ``HandshakeError`` with the reason where a newcomer is refused.
        """
        if not environment.join and environment.join_port is None:
            return cls(environment=environment)
        service = _listen(environment)
        stack.callback(service.close)
        if not environment.join:
            return cls(environment=environment, service=service)
        loop = CommunicationLoop()
        loop.start()
        stack.callback(loop.stop)
        address, _ = service.join_address
        entry = joining.Entry(
            loop=loop,
            options=environment.fabric,
            own_address=address,
            machine=environment.host,
            join_address=service.join_address,
            addresses=list(environment.join),
            topology=_text_of(environment.topology),
        )
        terms = entry.ask().terms
        environment = with_address(_adopted(replace(environment, topology=None), terms))
        service.adopt(environment.fabric, terms)
        entry.options = environment.fabric
        return cls(environment=environment, service=service, entry=entry)

    def growth_of(self, fleet: Fleet) -> FleetGrowth:
        """Return the fleet's part in growth, which its close ends."""
        growth = FleetGrowth(
            fleet,
            machine=self.environment.host,
            listen=lambda: _listen(self.environment),
            service=self.service,
            entry=self.entry,
        )
        fleet.on_close(lambda is_failing: growth.close(is_over=not is_failing))
        return growth


def _listen(environment: Environment) -> joining.Growth:
    return joining.Growth(
        with_secret(environment.fabric),
        terms=_terms(environment.fabric),
        port=environment.join_port or 0,
    )


def _terms(options: FabricOptions) -> dict[str, Any]:
    return {
        "authenticates_frames": options.authenticate_frames,
        "connect_timeout_s": options.connect_s,
        "silence_s": options.dead_s,
        "timeout_s": options.held_s,
        "stall_s": options.stall_s,
    }


def _adopted(environment: Environment, terms: Any) -> Environment:
    names = ("connect_timeout_s", "silence_s", "timeout_s", "stall_s")
    options = replace(environment.fabric, authenticate_frames=terms["authenticates_frames"])
    return replace(environment, fabric=with_times(options, **{name: float(terms[name]) for name in names}))


def _text_of(topology: Any) -> str | None:
    """Return the tree that a newcomer brings for the larger job, as text."""
    if topology in UNWRITTEN:
        return None
    chosen = topology if isinstance(topology, Topology) else Topology.load(topology)
    if chosen.helpers:
        raise ConfigurationError("A job with helpers does not grow; write 'gateway: one' in the topology")
    return chosen.to_yaml()
