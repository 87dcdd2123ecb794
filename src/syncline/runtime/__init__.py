"""Runs schedules on a fabric: the engine, the loop that it lives on, and the communicator that other threads see."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.runtime.call import CollectiveCall
    from syncline.runtime.communicator import Communicator
    from syncline.runtime.engine import Engine
    from syncline.runtime.host_names import match_topology
    from syncline.runtime.loop import CommunicationLoop
    from syncline.runtime.memory import communicators_in_memory
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
        "Communicator": "syncline.runtime.communicator",
        "communicators_in_memory": "syncline.runtime.memory",
        "CollectiveCall": "syncline.runtime.call",
        "Work": "syncline.runtime.work",
        "Reduction": "syncline.runtime.reduction",
        "numpy_reduction": "syncline.runtime.reduction",
        "CommunicationLoop": "syncline.runtime.loop",
        "Engine": "syncline.runtime.engine",
        "match_topology": "syncline.runtime.host_names",
        "FleetStatistics": "syncline.runtime.statistics",
    },
)
