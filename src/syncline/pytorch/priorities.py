"""Which priorities a model is trained with, and who tunes them."""

from __future__ import annotations

from syncline.schedule.class_search import divide_by_proportions
from syncline.topology import Topology
from syncline.topology.priorities import Priorities
from syncline.updates import Setting, Updater
from syncline.updates.class_tuning import ClassTuner, Untuned


def choose_priorities(given: Priorities | bool | None, topology: Topology) -> Priorities:
    """Return the argument if it says something, else what the topology file says, else the defaults."""
    if isinstance(given, Priorities):
        return given
    if given is True:
        return topology.priorities or Priorities()
    return Priorities.off()


def assign_first_classes(setting: Setting, priorities: Priorities) -> None:
    """Give each bucket its class where proportions are fixed; otherwise all begin in one."""
    if not priorities.is_on or priorities.is_searched:
        return
    sizes = [bucket.plan.num_bytes for bucket in setting.buckets]
    setting.collectives.assign_classes(divide_by_proportions(sizes, priorities.proportions))
    setting.collectives.communicator.open_classes(priorities)


def tune_classes(updater: Updater, priorities: Priorities, *, is_asked_for: bool) -> Untuned:
    """Begin to measure and search where that may pay: where forward passes wait for more than one bucket of others."""
    collectives = updater.collectives
    waits = updater.divides_gradients and updater.defers_parameters and len(updater.buckets) > 1
    if not (priorities.is_searched and waits and collectives.communicator.world_size > 1):
        return Untuned(collectives, updater.buckets)
    collectives.communicator.open_classes(priorities)
    return ClassTuner(collectives, updater.buckets, priorities, is_asked_for=is_asked_for)
