"""What collectives in shared memory get of an engine and of what it lives on."""

from __future__ import annotations

from functools import partial

from syncline.fabric import Fabric
from syncline.runtime.engine import Engine
from syncline.runtime.loop import CommunicationLoop
from syncline.runtime.shared_memory import EngineLinks


def link_engine(loop: CommunicationLoop, engine: Engine, fabric: Fabric) -> EngineLinks:
    """Return the ways to ``engine``, which lives on ``loop``, for any thread."""
    return EngineLinks(
        start=partial(loop.call_soon, engine.submit),
        has_failed=lambda: engine.failure is not None,
        late=lambda *about: loop.call_soon(engine.late, *about),
        crash=lambda error: loop.call_soon(engine.crash, error),
        stalls=fabric.stalls,
    )
