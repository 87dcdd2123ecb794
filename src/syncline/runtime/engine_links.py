"""What collectives in shared memory get of an engine and of what it lives on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from syncline.fabric import Fabric
from syncline.runtime.engine import Engine
from syncline.runtime.loop import CommunicationLoop
from syncline.runtime.shared_memory import EngineLinks
from syncline.topology import Topology


def link_engine(
    loop: CommunicationLoop, engine: Engine, fabric: Fabric, topology: Topology, members: Sequence[int]
) -> EngineLinks:
    """Return the ways to ``engine``, which lives on ``loop``, for any thread."""
    return EngineLinks(
        start=partial(loop.call_soon, engine.submit),
        has_failed=lambda: engine.failure is not None,
        give_up=lambda failure: loop.call_soon(engine.give_up, failure),
        crash=lambda error: loop.call_soon(engine.crash, error),
        describe_rank=fabric.describe_peer,
        host_of=lambda rank: topology.host_of(rank).name,
        stalls=fabric.stalls,
        members=members,
    )
