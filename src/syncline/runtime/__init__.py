"""Runs schedules on a fabric: the engine, the loop that it lives on, and the communicator that other threads see."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.runtime.call import CollectiveCall as CollectiveCall
    from syncline.runtime.communicator import (
        Communicator as Communicator,
        communicators_in_memory as communicators_in_memory,
    )
    from syncline.runtime.engine import Engine as Engine
    from syncline.runtime.host_names import match_topology as match_topology
    from syncline.runtime.loop import CommunicationLoop as CommunicationLoop
    from syncline.runtime.reduction import Reduction as Reduction, numpy_reduction as numpy_reduction
    from syncline.runtime.statistics import FleetStatistics as FleetStatistics
    from syncline.runtime.work import Work as Work

_NAMES = {
    "communicator": "Communicator communicators_in_memory",
    "call": "CollectiveCall",
    "work": "Work",
    "reduction": "Reduction numpy_reduction",
    "loop": "CommunicationLoop",
    "engine": "Engine",
    "host_names": "match_topology",
    "statistics": "FleetStatistics",
}

__all__ = [name for text in _NAMES.values() for name in text.split()]
__getattr__ = late_names(__name__, _NAMES)
