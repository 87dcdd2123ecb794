"""Runs schedules on a fabric: the engine, the loop that it lives on, and the communicator that other threads see."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.runtime.call import CollectiveCall
    from syncline.runtime.communicator import Communicator, communicators_in_memory
    from syncline.runtime.engine import Engine
    from syncline.runtime.host_names import match_topology
    from syncline.runtime.loop import CommunicationLoop
    from syncline.runtime.reduction import Reduction, numpy_reduction
    from syncline.runtime.statistics import FleetStatistics
    from syncline.runtime.work import Work

__all__ = [
    "Communicator",
    "communicators_in_memory",
    "CollectiveCall",
    "Work",
    "Reduction",
    "numpy_reduction",
    "CommunicationLoop",
    "Engine",
    "match_topology",
    "FleetStatistics",
]

__getattr__ = late_names(
    __name__,
    {
        "communicator": "Communicator communicators_in_memory",
        "call": "CollectiveCall",
        "work": "Work",
        "reduction": "Reduction numpy_reduction",
        "loop": "CommunicationLoop",
        "engine": "Engine",
        "host_names": "match_topology",
        "statistics": "FleetStatistics",
    },
)
