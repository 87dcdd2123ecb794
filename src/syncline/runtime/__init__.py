"""Runs schedules on a fabric: the engine, the loop that it lives on, and the communicator that other threads see."""

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
